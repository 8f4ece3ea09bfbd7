"""Hugging Face's model folders: a declarative table per family; strict reading and writing of safetensors."""
