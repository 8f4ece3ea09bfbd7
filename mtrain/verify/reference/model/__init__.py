"""The transformer of the reference, written from its definition."""
