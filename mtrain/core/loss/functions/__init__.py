"""Losses of tokens, and their lookup by name."""
