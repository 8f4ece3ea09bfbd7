"""Checkpoints to and from Hugging Face: streaming, resumable, each conversion ending with a proof."""
