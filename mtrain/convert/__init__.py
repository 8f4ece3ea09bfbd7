"""Converts checkpoints to and from Hugging Face folders: streams, can resume, and proves the result."""
