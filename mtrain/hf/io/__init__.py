"""Reads and writes the files of Hugging Face folders."""
