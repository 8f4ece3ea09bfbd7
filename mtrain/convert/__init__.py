"""Conversion of checkpoints to and from Hugging Face: streaming, resumable, and proven at the end."""
