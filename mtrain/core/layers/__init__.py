"""This rank's part of the model, built from megatron-core's layers and from ours where theirs do not suffice."""

import mtrain.core.ranks  # noqa: F401  before megatron-core
