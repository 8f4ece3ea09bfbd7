"""Checks of the promise on the user's own configuration."""
