"""Verbs that prepare text for training."""
