"""Every part of a layer has a description and modules."""

from __future__ import annotations

from mtrain.mcore.model.layer_parts import MODULES
from mtrain.plan.features import LAYER_PARTS


def test_every_part_that_is_described_is_built() -> None:
    assert [type(part) for part in LAYER_PARTS] == list(MODULES)
