"""What a check found, for readers: printed, and as a page."""
