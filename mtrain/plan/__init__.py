"""Search for the layout of a run."""
