"""Samples, and the batches that ranks read."""
