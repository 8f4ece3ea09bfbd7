"""Parity checks on a model with everything that a fault may need."""

from __future__ import annotations

from typing import Any

from mtrain.config import Config
from mtrain.verify.core.ranks import Pool
from mtrain.verify.core.result import ParityReport
from mtrain.verify.parity import Request, verify_parity
from mtrain.verify.planted.inject import FAULTS
from tests.config.samples import config
from tests.verify.planted.ranks import FaultyPool

NUM_SAMPLES = 8
"""Half the samples of users' checks: each kind of mask is among them, and half-sized microbatches are as many."""
Z_LOSS = {"function": "z_loss", "coefficient": 0.01, "aggregation": "seq-mean-token-mean"}


def rich_config(**changes: Any) -> Config:
    """Builds tied tables, isolated documents, two terms of different aggregation, and every axis in the layout."""
    defaults: dict[str, Any] = {
        "model__num_layers": 2,
        "model__tied_embeddings": True,
        "layout__tp": 2,
        "layout__sp": True,
        "layout__pp": 2,
        "layout__cp": 2,
        "data__isolate_documents": True,
        "loss__side_terms": {"z": Z_LOSS},
    }
    return config(**(defaults | changes))


def expert_config(**changes: Any) -> Config:
    """Builds experts of every kind after a dense layer, losses on their routers, moving biases, and a token ahead."""
    experts = {
        "num_experts": 16,
        "top_k": 4,
        "ffn_hidden_size": 64,
        "shared_ffn_hidden_size": 64,
        "first_dense_layers": 1,
        "score": "sigmoid",
        "num_groups": 4,
        "group_top_k": 2,
        "expert_bias": True,
        "bias_update_rate": 0.01,
    }
    defaults: dict[str, Any] = {
        "model__num_layers": 4,
        "model__experts": experts,
        "model__mtp_depths": 1,
        "layout__ep": 4,
        "layout__etp": 2,
        "layout__tp": 2,
        "layout__sp": True,
        "loss__router": {"z_coefficient": 0.01, "sequence_balance_coefficient": 0.1},
        "loss__side_terms": {"z": Z_LOSS},
    }
    return config(**(defaults | changes))


def check(
    pool: Pool,
    user: Config,
    layouts: str | None = None,
    fault: str | None = None,
    num_steps: int = 3,
    batch_size: int = NUM_SAMPLES,
) -> ParityReport:
    """Checks some layouts after one process with one microbatch, and returns the report.

    `fault` is one that `--inject` plants, or one of tests/verify/planted.
    """
    reported: list[str] = []
    shipped = fault if fault in {each.name for each in FAULTS} else None
    ranks: Any = pool if fault == shipped else FaultyPool(pool, str(fault))
    request = Request(layouts, num_steps, 8, shipped, "mtrain verify parity")
    report = verify_parity(user, request, reported.append, ranks, batch_size)
    assert report.injected == shipped
    assert sorted(line.split(":")[0] for line in reported) == sorted(layout.name for layout in report.layouts)
    return report
