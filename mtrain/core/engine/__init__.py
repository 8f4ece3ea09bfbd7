"""One step: schedule, reduction of loss pairs, final gradients, optimizer."""

import mtrain.core.ranks  # noqa: F401  before megatron-core
