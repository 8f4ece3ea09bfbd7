"""Hugging Face's model folders: a declarative table for each family, and strict reading and writing of safetensors."""
