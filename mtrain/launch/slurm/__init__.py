"""Runs on Slurm: one readable script, frozen with everything that it starts, and submitted."""
