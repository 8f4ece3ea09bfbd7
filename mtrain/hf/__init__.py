"""Hugging Face's model folders: a declarative table per family; strict reading and writing of safetensors.

Functions that read raise a DataError where a file is missing, damaged or not supported.
"""
