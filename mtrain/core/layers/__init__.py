"""This rank's part of the model, from megatron-core's layers and from ours where theirs are wrong."""

import mtrain.core.ranks  # noqa: F401  before megatron-core
