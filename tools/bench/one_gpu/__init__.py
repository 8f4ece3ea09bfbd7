"""Measurements of `tools/bench/gpu.py` on one GPU."""
