"""Conversion of checkpoints to and from Hugging Face: streaming, resumable, and each one ends with a proof."""
