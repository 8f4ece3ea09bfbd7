"""Checkpoints as folders: publishing, verifying and deleting them, and the format of their files."""
