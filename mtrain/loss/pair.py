"""Name that `mtrain.core.loss.pair` had up to version 0.2; import from `mtrain` instead."""

from mtrain.core.loss.pair import *  # noqa: F403
