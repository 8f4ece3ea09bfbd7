"""External trackers: W&B, MLflow and Trackio get a run's numbers from a thread that training never waits for."""
