"""Training runs: building, the loop, evaluation, saving, resuming."""
