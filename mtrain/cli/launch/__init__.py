"""`mtrain launch`: starts the ranks of a run, here or elsewhere."""
