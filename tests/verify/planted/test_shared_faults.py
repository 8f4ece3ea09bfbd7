"""Every fault that all layouts share is found, on one process with one microbatch too."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from mtrain.config import Config
from mtrain.data.formats.megatron_indexed import writing_corpus
from mtrain.verify.core.ranks import Pool
from mtrain.verify.core.result import KINDS
from mtrain.verify.core.shrink import BATCH_SIZE
from mtrain.verify.core.weights import EMBEDDING, OUTPUT
from tests.verify.parity.checks import NUM_SAMPLES, check, expert_config, rich_config
from tests.verify.planted.shared_faults import SHARED_PLANTS

FINAL_NORM = "decoder.final_layernorm.weight"
FIRST_NORM = "layer 0 input_layernorm"
ATTENTION = "layer 0 self_attention.core_attention"
MAIN_WEIGHTS, Z_WEIGHTS = "weights of main", "weights of z"


class Case(NamedTuple):
    """The quantities that reveal a fault."""

    kind: str
    name: str
    module: str | None = None
    changes: dict[str, Any] = {}  # noqa: RUF012 (only read)
    of_experts: bool = False

    def config(self) -> Config:
        return (expert_config if self.of_experts else rich_config)(**self.changes)


SCHEDULE = {"optimizer__schedule": "cosine", "optimizer__warmup_steps": 5, "train__num_steps": 50}
PACKED: dict[str, Any] = {"data__packing": {}}
TEMPERED: dict[str, Any] = {
    "model__rope": {"scaling": "yarn", "factor": 4.0, "original_max_positions": 8, "attention_temperature": 0.3}
}
CASES = {
    "last-token-masked": Case("samples", MAIN_WEIGHTS),
    "masked-tokens-counted": Case("samples", MAIN_WEIGHTS),
    "token-weights-squared": Case("samples", MAIN_WEIGHTS),
    "sample-weights-ignored": Case("samples", MAIN_WEIGHTS),
    "padding-counted": Case("samples", MAIN_WEIGHTS),
    "padding-by-token-id": Case("samples", MAIN_WEIGHTS),
    "attention-ends-at-pad-id": Case("samples", "documents", changes={"data__isolate_documents": True}),
    "pad-id-hidden-from-routers": Case("samples", "padding", of_experts=True),
    "labels-shifted-twice": Case("samples", "labels"),
    "extras-not-shifted": Case("samples", "extra advantages", changes={"loss__function": "ppo"}),
    "datum-weights-shifted": Case("samples", MAIN_WEIGHTS),
    "datum-extras-shifted": Case("samples", "extra advantages", changes={"loss__function": "ppo"}),
    "record-weights-shifted": Case("samples", MAIN_WEIGHTS),
    "record-extras-shifted": Case("samples", "extra advantages", changes={"loss__function": "ppo"}),
    "sample-read-twice": Case("samples", "tokens"),
    "positions-not-restarted": Case("samples", "positions"),
    "row-counted-as-sequence": Case("samples", Z_WEIGHTS, changes=PACKED),
    "label-of-the-next-sample": Case("samples", "labels", changes=PACKED),
    "router-balance-by-row": Case(
        "denominator", "router_sequence_balance", changes={**PACKED, "data__isolate_documents": True}, of_experts=True
    ),
    "tokens-ahead-across-documents": Case("samples", "weights of mtp_1", changes={"model__mtp_depths": 1}),
    "sequence-mean-plus-one": Case("samples", Z_WEIGHTS),
    "square-root-left-out": Case("samples", MAIN_WEIGHTS, changes={"loss__aggregation": "seq-mean-token-sqrt"}),
    "norm-length-off": Case(
        "samples", MAIN_WEIGHTS, changes={"loss__aggregation": "token-sum-norm", "loss__norm_length": 24}
    ),
    "empty-sequences-confused": Case("denominator", "z"),
    "side-terms-divided-by-main": Case("gradient", FINAL_NORM),
    "smoothing-with-padding": Case("loss", "main", changes={"loss__options": {"label_smoothing": 0.1}}),
    "chunk-gradient-dropped": Case(
        "gradient", OUTPUT, changes={"loss__chunk_tokens": 40, "model__tied_embeddings": False}
    ),
    "window-off-by-one": Case("loss", "main", ATTENTION, {"model__sliding_window": 16}),
    "rope-base-off": Case("loss", "main", ATTENTION),
    "rotary-of-whole-heads": Case("loss", "main", ATTENTION, {"model__rope__partial": 0.5}),
    "queries-of-one-temperature": Case("loss", "main", ATTENTION, TEMPERED),
    "softmax-scale-off": Case("loss", "main", ATTENTION),
    "norm-epsilon-off": Case("loss", "main", FIRST_NORM),
    "router-losses-times-top-k": Case("loss", "router_sequence_balance", of_experts=True),
    "loads-of-the-next-layer": Case("update", "decoder.layers.1.mlp.router.expert_bias", of_experts=True),
    "expert-scaling-ignored": Case(
        "loss", "main", "layer 1 mlp", {"model__experts__scaling_factor": 2.5}, of_experts=True
    ),
    "bias-correction-missing": Case("update", EMBEDDING),
    "decay-not-times-rate": Case("update", EMBEDDING),
    "rate-one-step-late": Case("lr", "lr", changes=SCHEDULE),
    "warmup-off-by-one": Case("lr", "lr", changes=SCHEDULE),
}


FROM_THE_SECOND = ("token-weights-squared", "sample-weights-ignored", "rate-one-step-late", "warmup-off-by-one")
"""Faults that the first step does not show: its weights are no fractions, its rate is that of the one before."""
BY_NIGHT = (
    "token-weights-squared",
    "datum-weights-shifted",
    "record-extras-shifted",
    "label-of-the-next-sample",
    "softmax-scale-off",
    "rate-one-step-late",
)
"""Faults that the day finds by the same quantity under another name, on samples and steps of their kind."""


@pytest.fixture
def corpus(tmp_path: Path) -> dict[str, Any]:
    """Writes documents of a few tokens; returns the section that names them."""
    prefix, rng = str(tmp_path / "corpus"), np.random.default_rng(0)
    with writing_corpus(prefix, vocab_size=64) as writer:
        for length in rng.integers(2, 40, 200):
            writer.add(rng.integers(0, 64, length).astype(np.int64))
    return {"data__kind": "indexed", "data__train": [{"path": prefix}], "model__vocab_size": 64}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.nightly] if name in BY_NIGHT else []) for name in CASES]
)
def test_what_every_layout_shares_is_found(pool: Pool, name: str, corpus: dict[str, Any]) -> None:
    case = CASES[name]
    user = rich_config(**corpus) if name == "sample-read-twice" else case.config()
    # one process with one microbatch; rows of test_inject.py show what other layouts report of shared faults
    num_steps = 2 if name in FROM_THE_SECOND else 1
    report = check(pool, user, f"mbs{BATCH_SIZE}", name, num_steps=num_steps, batch_size=BATCH_SIZE)
    assert len(report.layouts) == 1
    assert not any(layout.passed for layout in report.layouts)
    assert all(layout.error is None for layout in report.layouts)
    found = report.diagnosis
    assert found is not None
    assert (found.axis, found.kind, found.name, found.module) == ("every layout", case.kind, case.name, case.module)
    worst = report.layouts[0].worst(*KINDS)
    assert worst is not None
    assert worst.excess > 5, "rounding is far from it"
    assert "even one process with one microbatch: the layout is not at fault" in found.lines[0]


@pytest.mark.parametrize("name", ["document-boundary-crossed", "positions-not-restarted"])
def test_faults_of_documents_show_between_packed_samples(pool: Pool, name: str) -> None:
    report = check(pool, rich_config(**PACKED), f"mbs{NUM_SAMPLES}", name, num_steps=1)
    assert not any(layout.passed for layout in report.layouts)


def test_every_shared_fault_has_a_plant_and_a_case() -> None:
    assert SHARED_PLANTS.keys() == CASES.keys()
    by_day = {CASES[name][:3] for name in CASES if name not in BY_NIGHT}
    assert {CASES[name][:3] for name in BY_NIGHT} <= by_day
