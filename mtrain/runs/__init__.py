"""The run folder: what a run leaves behind, and who may write to it."""
