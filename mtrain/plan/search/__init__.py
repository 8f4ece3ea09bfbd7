"""Search for the layout of a run: legal layouts, their memory, and the step time that a cost model predicts."""
