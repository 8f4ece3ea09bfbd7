"""Training service: HTTP on rank 0, one engine over all ranks."""
