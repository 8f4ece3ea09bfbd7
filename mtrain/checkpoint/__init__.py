"""Checkpoints as folders: what is published, what is good, what is deleted. What lies inside is written elsewhere."""
