"""Losses that compare whole sequences: pairs of answers, or single good and bad answers."""
