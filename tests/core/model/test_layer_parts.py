"""Every part of a layer has a description and modules."""

from __future__ import annotations

from mtrain.arch.features import LAYER_PARTS
from mtrain.core.layers.layer_parts import MODULES


def test_every_part_that_is_described_is_built() -> None:
    assert [type(part) for part in LAYER_PARTS] == list(MODULES)
