"""Runs on Kubernetes: one manifest, a ConfigMap with the configuration and a JobSet with the ranks."""
