"""What can befall a running job, seen in time."""
