"""Every shipped configuration passes, made small, on all layouts derived from its own; so does any drawn one."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from mtrain.base.errors import ConfigError
from mtrain.config import Config
from mtrain.hf.configuration import load_config
from mtrain.verify.core.ranks import Pool
from mtrain.verify.parity import refuse_without_reference
from tests.config.samples import config
from tests.messages import refuses
from tests.paths import CONFIGS
from tests.recipes import NAMES, shipped
from tests.verify.parity.checks import check


@pytest.mark.nightly  # by day its layouts are legal: tests/verify/core/test_any_key.py; families: tests/parity/models
@pytest.mark.parametrize("name", NAMES)
def test_what_is_shipped_passes(name: str, pool: Pool, tmp_path: Path) -> None:
    report = check(pool, shipped(name, tmp_path), num_steps=1)
    assert report.passed, [(layout.name, layout.first_failure(), layout.error) for layout in report.layouts]
    assert len(report.layouts) > 4


def drawn_structure(draw: random.Random) -> Config:
    """Draws what may stand around a layer that keeps no state: norms of every kind, scales, windows, documents."""
    around = draw.choice([{}, {"model__sandwich_norm": True}, {"model__post_norm": True}])
    within = draw.choice([{}, *({"model__qk_norm": True, "model__qk_norm_width": width} for width in ("head", "full"))])
    windows = {"model__sliding_window": 7, "model__global_attention_every": 2, "model__rope": {"local_base": 100.0}}
    return config(
        **(around | within | draw.choice([{}, windows])),
        model__num_layers=draw.choice([2, 4]),
        model__head_dim=draw.choice([8, 16]),
        model__zero_centered_norm=draw.random() < 0.5,
        model__scale_embeddings=draw.random() < 0.5,
        model__tied_embeddings=draw.random() < 0.3,
        model__activation=draw.choice(["swiglu", "geglu_tanh", "gelu"]),
        model__query_scalar=draw.choice([None, 24.0]),
        data__isolate_documents=draw.random() < 0.7,
        train__seed=draw.randrange(2**31),
    )


@pytest.mark.nightly  # by day gains are drawn around 1: tests/verify/core/test_weights.py
@pytest.mark.parametrize("number", range(20))
def test_any_structure_without_states_passes(pool: Pool, number: int) -> None:
    """Rounding in float32 stays within the tolerance of independent errors, whatever weights a copy has."""
    draw = random.Random(number)
    user = drawn_structure(draw)
    report = check(pool, user, draw.choice(["tp2spmbs4", "cp2mbs4", "pp2mbs2", "dp2mbs2"]), num_steps=2)
    assert report.precision == "float32"
    assert report.passed, [(layout.name, layout.first_failure(), layout.error) for layout in report.layouts]


@pytest.mark.parametrize("run", ["preference", "reward_model"])
def test_runs_without_a_second_definition_are_refused_by_name(run: str) -> None:
    user = load_config([CONFIGS / "model" / "llama3.2_1b.yaml", CONFIGS / "run" / f"{run}.yaml"])
    with refuses(ConfigError):
        refuse_without_reference(user)
