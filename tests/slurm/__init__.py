"""Tests on a real Slurm: a controller and several nodes on this machine."""
