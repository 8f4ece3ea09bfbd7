"""Loss functions of tokens, and their look-up by name."""
