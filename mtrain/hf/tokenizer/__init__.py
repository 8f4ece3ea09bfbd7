"""Hugging Face tokenizers as transformers 5 builds them from a folder, without transformers."""
