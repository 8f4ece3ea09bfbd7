"""What `tools/bench/gpu.py` measures on one GPU."""
