"""Sums and gradient of the objective, computed from the output of the last pipeline stage."""
