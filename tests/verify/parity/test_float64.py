"""Models that amplify rounding are judged in float64, where a sound layout is exact and a small fault shows."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from torch import Tensor

from mtrain.config import Config
from mtrain.core.engine.finalize import finalize_gradients
from mtrain.core.engine.loss_reduction import GlobalTotals
from mtrain.core.engine.sharded_model import ShardedModel
from mtrain.core.ranks.groups import Groups
from mtrain.core.step import step
from mtrain.data.formats.megatron_indexed import writing_corpus
from mtrain.verify.core.result import LayoutResult
from mtrain.verify.core.worker import Job, Outcome, run_layout
from tests.config.samples import config
from tests.parity.families import GEMMA4_EXPERTS, HYBRID, MAMBA, NEMOTRON
from tests.pool import Pool
from tests.recipes import shipped
from tests.verify.parity.checks import check

EXPERTS: dict[str, Any] = {"model__experts": {"num_experts": 4, "top_k": 2, "ffn_hidden_size": 24}}
FAMILIES: dict[str, dict[str, Any]] = {
    "delta nets": HYBRID,
    "delta nets, experts": HYBRID | EXPERTS,
    "mamba": MAMBA,
    "mamba, experts": NEMOTRON,
    "gemma 4": GEMMA4_EXPERTS,
}
SIZES: dict[str, Any] = {"model__num_layers": 4, "model__vocab_size": 97}
OVERLAPS = ("train__distributed_optimizer", "train__overlap_grad_reduce", "train__overlap_param_gather")
EXACT = 1e-9
"""Far below s u = 2.4e-7, which is tolerated, and far above what float64 rounds."""
PLACES = ("A_log", "dt_bias", "in_proj.weight", "linear_qkv.weight", "out_proj.weight", "router.weight")


def drawn_config(draw: random.Random, family: str, **changes: Any) -> Config:
    """Draws what else a run may have."""
    others: list[dict[str, Any]] = [
        {},
        {"data__isolate_documents": True},
        {"data__packing": {}, "data__isolate_documents": True},
        {"train__recompute": "full"},
        {"adapter": {"rank": 4, "alpha": 8.0}},
        {"adapter": {"rank": 4, "alpha": 8.0, "kind": "dora"}},
        {"adapter": {"rank": 4, "alpha": 8.0, "base_dtype": "bf16"}},
        {"model__megatron": FAMILIES[family].get("model__megatron", {}) | {"gradient_accumulation_fusion": False}},
        dict.fromkeys(OVERLAPS, True),
        dict.fromkeys(OVERLAPS, False),
        {"loss__side_terms": {"z": {"function": "z_loss", "coefficient": 0.01, "aggregation": "seq-mean-token-mean"}}},
        {"loss__aggregation": "seq-mean-token-mean", "loss__chunk_tokens": 16},
    ]
    chosen = draw.sample(others, 2)
    merged = {key: value for each in chosen for key, value in each.items()}
    return config(**(SIZES | FAMILIES[family] | merged | {"train__seed": draw.randrange(2**31)} | changes))


def layouts_of(user: Config) -> list[str]:
    """Lists layouts that the model and the data allow."""
    found = ["tp2spmbs4", "cp2mbs4", "cp2ulyssesmbs8", "pp2mbs2", "dp2mbs2", "tp2spcp2mbs4"]
    return [*found, "dp2ep2mbs2", "tp2spep2mbs4"] if user.model.experts is not None else found


@pytest.mark.parametrize(
    "number", [*range(2), *(pytest.param(number, marks=pytest.mark.nightly) for number in range(2, 40))]
)
def test_what_is_sound_passes_whatever_is_drawn(pool: Pool, number: int) -> None:
    draw = random.Random(number)
    user = drawn_config(draw, list(FAMILIES)[number % len(FAMILIES)])
    report = check(pool, user, draw.choice(layouts_of(user)), num_steps=2)
    assert report.passed, [(layout.name, layout.first_failure(), layout.error) for layout in report.layouts]
    assert report.precision == "float64"
    for layout in report.layouts:
        judged = [each for each in layout.deviations if each.kind in ("loss", "gradient")]
        assert max(each.value for each in judged) < EXACT
        in_float32 = {each.name for each in layout.deviations if each.kind == "rounding"}
        assert in_float32 == {f"loss {each.name}" if each.kind == "loss" else each.name for each in judged}
        assert any(each.value > EXACT for each in layout.deviations if each.kind == "rounding"), "the run is in float32"


@pytest.mark.nightly  # by day the rule of such documents: tests/core/model/attention/test_delta_rule.py
@pytest.mark.parametrize("family", ["delta nets", "mamba"])
def test_documents_of_a_few_tokens_pass(pool: Pool, tmp_path: Path, family: str) -> None:
    """The output of a document's first token is brought to a length from any number around 0."""
    prefix, rng = str(tmp_path / "corpus"), np.random.default_rng(0)
    with writing_corpus(prefix, vocab_size=64) as writer:
        for length in rng.integers(1, 6, 2000):
            writer.add(rng.integers(0, 64, length).astype(np.int64))
    data = {"data__kind": "indexed", "data__train": [{"path": prefix}], "data__isolate_documents": True}
    user = config(**(SIZES | FAMILIES[family] | data | {"model__vocab_size": 64}))
    report = check(pool, user, "cp2mbs4", num_steps=1)
    assert report.passed, [(layout.name, layout.first_failure(), layout.error) for layout in report.layouts]
    judged = [each for layout in report.layouts for each in layout.deviations if each.kind == "gradient"]
    assert max(each.value for each in judged) < EXACT


def short_layout(groups: Groups, job: Job, place: str, share: float) -> Outcome:
    """Runs a layout whose gradient of one parameter lacks a share, in every precision."""

    def short(sharded: ShardedModel, *others: Any) -> GlobalTotals:
        totals = finalize_gradients(sharded, *others)
        named = (each for chunk in sharded.chunks for each in chunk.named_parameters())
        of_place: set[Tensor] = {parameter for name, parameter in named if name.endswith(place)}
        for parameter, gradient in sharded.local_gradients():
            if parameter in of_place:
                gradient.mul_(1 - share)
        return totals

    with patch.object(step, "finalize_gradients", short):
        return run_layout(groups, job)


class _ShortPool:
    """Pool whose layouts have gradients that are a little short."""

    def __init__(self, pool: Pool, place: str, share: float) -> None:
        self._pool, self._fault, self.device = pool, (place, share), pool.device

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Runs a function like the pool of the suite."""
        if function is run_layout:
            return self._pool.run(short_layout, *arguments, *self._fault)
        return self._pool.run(function, *arguments)


def short_by(layout: LayoutResult) -> dict[str, float]:
    """Returns the gradients that are beyond their tolerance, by name."""
    return {each.name: each.value for each in layout.deviations if each.kind == "gradient" and not each.passed}


@pytest.mark.parametrize(
    ("family", "place", "share"),
    [
        pytest.param("model qwen3_next_80b_a3b", "A_log", 3e-4, marks=pytest.mark.nightly),  # by day in a smaller model
        ("delta nets", "A_log", 1e-6),
        *(  # other places of the same sums
            pytest.param(*each, marks=pytest.mark.nightly)
            for each in (("mamba", "dt_bias", 3e-6), ("delta nets", "in_proj.weight", 3e-6))
        ),
        *(
            pytest.param(family, place, share, marks=pytest.mark.nightly)
            for family in FAMILIES
            for place in PLACES
            for share in (3e-4, 1e-6)
            if (family, place, share) != ("delta nets", "A_log", 1e-6)  # by day
        ),
    ],
)
def test_a_gradient_that_is_a_little_short_is_found(
    pool: Pool, tmp_path: Path, family: str, place: str, share: float
) -> None:
    draw = random.Random(f"{family} {place}")
    user = drawn_config(draw, family, adapter=None) if family in FAMILIES else shipped(family, tmp_path)
    faulty: Any = _ShortPool(pool, place, share)
    report = check(faulty, user, draw.choice(layouts_of(user)), num_steps=1)
    names = [name for name in report.tensors if name.endswith(place)]
    for layout in report.layouts:
        found = short_by(layout)
        assert sorted(found) == sorted(names)
        assert all(value == pytest.approx(share, rel=1e-2) for value in found.values())
    assert (report.diagnosis is None) == (not names)


def test_only_the_run_in_float32_has_the_rounding(pool: Pool) -> None:
    """Rounding in float32 alone is no fault of a layout: it is reported, and has a limit of its own."""
    report = check(pool, config(**(SIZES | HYBRID)), "dp2mbs2", num_steps=1)
    limit = report.tolerance("rounding")
    worst = max(layout.worst("rounding").value for layout in report.layouts)  # type: ignore[union-attr]
    assert report.tolerance("gradient").value < worst < limit.value
    beyond = [replace(each, value=2 * limit.value) for each in report.layouts[0].deviations if each.kind == "rounding"]
    assert not replace(report.layouts[0], deviations=tuple(beyond)).passed
