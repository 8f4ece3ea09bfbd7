"""External trackers: a thread that training never waits for sends a run's numbers to W&B, MLflow and Trackio."""
