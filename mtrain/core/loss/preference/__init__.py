"""Losses of whole sequences: pairs of answers, or single answers that are wanted or unwanted."""
