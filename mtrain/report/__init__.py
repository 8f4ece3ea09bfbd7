"""What a run was: its records, pages and comparisons."""
