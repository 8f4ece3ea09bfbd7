"""Bytes of one checkpoint: tensors, metadata and training state, written and read without running code from them."""
