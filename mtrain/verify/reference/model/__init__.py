"""Transformer of the reference, written from its definition."""
