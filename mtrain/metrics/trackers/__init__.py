"""Trackers of others: what W&B, MLflow and Trackio get, by a thread that training never waits for."""
