"""One training step."""

import mtrain.core.ranks  # noqa: F401  before megatron-core
