"""Offloading: memory that a GPU does not need for a while, kept on the host."""
