"""Known faults, planted on purpose to prove that a check finds them."""
