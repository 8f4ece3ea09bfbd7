"""Gated delta net: a layer's attention is replaced by a state of fixed size that every token decays and corrects."""
