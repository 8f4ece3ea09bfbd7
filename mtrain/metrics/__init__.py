"""One record for each step, and the sinks that keep it."""
