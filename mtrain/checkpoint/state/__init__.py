"""Saves and loads the state of the ranks: sharded parameters, checkpoints, imports."""

import mtrain.core.ranks  # noqa: F401  before megatron-core
