"""One training step: its loss, batches, ranks, layers, engine and state. Imports only base, config and arch."""
