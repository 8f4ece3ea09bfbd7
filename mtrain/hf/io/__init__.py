"""Hugging Face folders as bytes and tensors."""
