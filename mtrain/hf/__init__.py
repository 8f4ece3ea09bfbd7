"""Hugging Face model folders: a declarative table per family, and strict reading and writing of safetensors.

Functions that read raise a DataError if a file is missing, damaged or not supported.
"""
