"""Options of memory and overlap that change no bit of a run with images, or only where weights are gathered."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.parity.cases import Case, case
from tests.parity.image_models import Kind
from tests.parity.image_ranks import train_both, train_by_place
from tests.parity.images import initial
from tests.parity.models.test_images import (
    PROJECTOR_ALONE,
    RECOMPUTED,
    TOWER_ALONE,
    TRAINED,
    assert_exact,
    config_of,
    measured,
    reference,
    steps,
)
from tests.parity.ranks import Arrays
from tests.pool import Pool


def test_weights_are_gathered_while_a_frozen_tower_computes(pool: Pool) -> None:
    """The second step, with one image, computes with weights that are gathered during its forward pass."""
    each = case(4, num_layers=2, tp=2, sp=True, dp=2)
    assert_exact(pool, each, vision={}, train__overlap_param_gather=True, train__overlap_grad_reduce=True)


@pytest.mark.parametrize("vision", [TRAINED, PROJECTOR_ALONE], ids=["all", "projector"])
def test_moments_of_a_tower_on_the_host_change_no_bit(pool: Pool, vision: dict[str, bool]) -> None:
    each = case(4, num_layers=2, pp=2, dp=2)
    on_device = config_of(each, "dense", vision)
    on_host = config_of(each, "dense", vision, train__offload_optimizer=True)
    ranks = pool.run(train_by_place, each.resolved(on_host), [on_device, on_host], initial("dense"), steps())
    device, host = ranks[0]
    measured(host, reference("dense", tuple(vision.items())), on_host).assert_below()
    assert_same_bits(host.parameters, device.parameters)


SAME_BITS: list[tuple[Case, Kind, dict[str, bool], dict[str, Any]]] = [
    (case(4, num_layers=2, tp=2, sp=True), "dense", TRAINED, {}),
    (case(4, num_layers=3, pp=2, first_stage_layers=2, dp=2), "deepstack", TOWER_ALONE, {"layout__shard": "weights"}),
    (case(4, num_layers=2, cp=2), "gemma3", TRAINED, {}),
    (case(4, num_layers=2, pp=2), "mistral3", TRAINED, {}),
]


@pytest.mark.parametrize(
    ("each", "kind", "vision", "changes"),
    SAME_BITS,
    ids=[f"{kind}-{'-'.join(each.layout) or 'one process'}" for each, kind, _, _ in SAME_BITS],
)
def test_recomputed_layers_of_both_models_change_no_bit(
    pool: Pool, each: Case, kind: Kind, vision: dict[str, bool], changes: dict[str, Any]
) -> None:
    again = config_of(each, kind, vision, **RECOMPUTED | changes)
    once = again.model_copy(update={"train": config_of(each, kind, vision).train})
    recomputed, kept = pool.run(train_both, each.resolved(again), [again, once], initial(kind), steps(kind))[0]
    measured(recomputed, reference(kind, tuple(vision.items())), again).assert_below()
    for found, expected in zip(recomputed.steps, kept.steps, strict=True):
        assert found._replace(gradients=None) == expected._replace(gradients=None)
        assert_same_bits(found.gradients, expected.gradients)
    assert_same_bits(recomputed.parameters, kept.parameters)


def assert_same_bits(found: Arrays | None, expected: Arrays | None) -> None:
    assert found is not None
    assert expected is not None
    assert found.keys() == expected.keys()
    assert [name for name, value in expected.items() if not np.array_equal(found[name], value)] == []
