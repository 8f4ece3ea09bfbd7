"""Attention: context parallelism, windows, sinks, latents."""
