"""Shared code of layers with a recurrent state: convolution, states by chunk, context parallelism, generation."""
