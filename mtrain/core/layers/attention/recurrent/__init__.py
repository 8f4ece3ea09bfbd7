"""What layers with a state of fixed size share: a short convolution, states by chunk, parts of rows, generation."""
