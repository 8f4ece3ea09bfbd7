"""Records of steps and validations, and the sinks that keep them."""
