"""Parts of `Engine` that a run does not have: global batches, results, saves, export of weights."""
