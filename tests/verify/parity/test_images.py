"""Images match their definition under every kind of layout, also packed, and a frozen tower keeps its bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from mtrain.config import Config
from mtrain.verify.core.ranks import Pool
from mtrain.verify.core.worker import run_layout
from tests.config.samples import config
from tests.config.test_vision import VISION
from tests.parity.image_ranks import LayoutWithFault
from tests.verify.parity.checks import check

NET = {"num_key_heads": 4, "num_value_heads": 8, "key_head_dim": 8, "value_head_dim": 8, "full_attention_every": 2}
TRAINED = {"freeze_tower": False, "freeze_projector": False}
PACKED: dict[str, Any] = {"data__isolate_documents": True, "data__packing": {}}


def with_images(vision: dict[str, Any], **changes: Any) -> Config:
    defaults: dict[str, Any] = {"model__num_layers": 2, "model__vision": VISION | vision}
    return config(**(defaults | changes))


@pytest.mark.parametrize(
    ("vision", "changes", "layouts"),
    [
        (
            {"deepstack": (0, 1)},
            {"data__isolate_documents": True, "model__experts": {"num_experts": 4, "top_k": 2, "ffn_hidden_size": 16}},
            "tp2spcp2mbs2,pp2dp2ep2mbs2",
        ),
        ({}, PACKED | {"model__delta_net": NET}, "tp2spcp2mbs1"),
    ],
    ids=["documents, with deeper features and experts", "packed, with delta nets"],
)
def test_images_are_exact(pool: Pool, vision: dict[str, Any], changes: dict[str, Any], layouts: str) -> None:
    report = check(pool, with_images(TRAINED | vision, **changes), layouts, num_steps=3)
    assert report.passed, [(layout.name, layout.first_failure(), layout.error) for layout in report.layouts]
    assert any(name.startswith("vision.blocks.") for name in report.tensors)
    assert "random images" in report.data


class FaultyPool:
    """Pool whose ranks run layouts with a planted fault."""

    def __init__(self, pool: Any, fault: str) -> None:
        self._pool, self._fault, self.device = pool, fault, pool.device

    def run(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> list[Any]:
        """Runs a function like the pool of the suite."""
        own = LayoutWithFault(self._fault) if function is run_layout else function
        found: list[Any] = self._pool.run(own, *arguments, **options)
        return found


@pytest.mark.parametrize("fault", ["positions of one axis", "one rank's features"])
def test_a_planted_fault_is_found(pool: Pool, fault: str) -> None:
    report = check(FaultyPool(pool, fault), with_images(TRAINED), "tp2spcp2mbs2", num_steps=1)  # type: ignore[arg-type]
    assert not report.passed


@pytest.mark.parametrize(
    ("vision", "layouts", "trained"),
    [
        ({"freeze_projector": False}, "tp2spmbs4", ("vision.merger.", "decoder.", "embedding.", "output_layer.")),
        (TRAINED | {"freeze_language_model": True}, "pp2mbs4", ("vision.",)),
    ],
    ids=["tower", "language model"],
)
def test_a_frozen_part_keeps_its_bits(pool: Pool, vision: dict[str, Any], layouts: str, trained: tuple[str]) -> None:
    report = check(pool, with_images(vision), layouts, num_steps=2)
    assert report.passed, [(layout.name, layout.first_failure(), layout.error) for layout in report.layouts]
    frozen = {name for name in report.tensors if not name.startswith(trained)}
    assert frozen
    for layout in report.layouts:
        updates = {each.name: each for each in layout.deviations if each.kind == "update"}
        assert {(updates[name].value, updates[name].tolerance) for name in frozen} == {(0.0, 0.0)}
        assert not frozen & {each.name for each in layout.deviations if each.kind == "gradient"}
