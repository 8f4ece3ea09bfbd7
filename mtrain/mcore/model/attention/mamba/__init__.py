"""Mamba-2: a layer whose state of fixed size every token decays and adds to."""
