"""Folder of checkpoints: published whole, verified, kept and deleted."""
