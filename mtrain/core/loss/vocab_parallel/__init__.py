"""Losses of logits with a vocabulary split over tensor-parallel ranks."""
