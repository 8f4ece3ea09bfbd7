"""Attention with context parallelism, windows, sinks and latents, and layers that replace it by a recurrent state."""
