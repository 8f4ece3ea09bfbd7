"""Search for the layout of a run: legal layouts, their memory, and the time of a step by a stated model."""
