"""The parts of a step: schedule, reduction of loss pairs, division of gradients, optimizer."""

import mtrain.core.ranks  # noqa: F401  before megatron-core
