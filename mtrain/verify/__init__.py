"""The promise, checked on the user's own configuration."""
