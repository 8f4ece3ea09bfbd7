"""Samples: windows of running text, conversations, preferences."""
