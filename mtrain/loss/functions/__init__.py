"""The token losses, and how one is found by its name."""
