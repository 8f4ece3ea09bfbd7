"""Runs losses that compare whole sequences: the pass that scores them, and scores of a reference model."""
