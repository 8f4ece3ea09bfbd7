"""State to and from disk: sharded parameters, checkpoints, imports."""

import mtrain.core.ranks  # noqa: F401  before megatron-core
