"""Known faults, planted on purpose: a check is trusted once it has found them."""
