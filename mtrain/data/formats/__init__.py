"""File formats of text and tokens, one file each."""
