"""Tokenizers of Hugging Face as transformers 5 builds them from a folder, without transformers."""
