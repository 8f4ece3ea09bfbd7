"""A run: what is built in which order, the loop, evaluation, saving, resuming."""
