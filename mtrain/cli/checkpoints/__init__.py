"""Verbs that work on checkpoints, without a model and without ranks."""
