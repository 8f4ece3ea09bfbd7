"""Losses of logits whose vocabulary is split over tensor-parallel ranks."""
