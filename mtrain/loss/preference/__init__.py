"""Losses that compare whole sequences: pairs of answers, or answers that are wanted or not."""
