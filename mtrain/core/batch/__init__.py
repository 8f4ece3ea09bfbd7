"""Samples and the batches that a rank reads of them."""
