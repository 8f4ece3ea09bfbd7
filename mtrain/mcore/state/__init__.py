"""State to and from disk: sharded parameters, checkpoints, imports."""
