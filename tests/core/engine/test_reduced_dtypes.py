"""Gradients are added up over ranks in float32, losses, denominators and norms in float64, whatever the model is in."""

from typing import Any

import pytest

from tests.core.engine.reduced_ranks import reduced
from tests.parity.batches import padded_steps
from tests.parity.cases import Case, case
from tests.parity.models.test_balance import SIGMOID
from tests.pool import Pool

WIDE = {"torch.float32", "torch.float64", "torch.int32", "torch.int64"}
TERMS = {
    "loss__side_terms": {"z": {"function": "z_loss", "coefficient": 0.1, "aggregation": "seq-mean-token-sum"}},
    "model__tied_embeddings": True,
    "model__mtp_depths": 1,
}


@pytest.mark.parametrize("precision", ["bf16", "fp16", pytest.param("fp32", marks=pytest.mark.nightly)])
@pytest.mark.parametrize(
    ("changes", "one"),
    [
        (SIGMOID | TERMS, case(4, num_layers=2, tp=2, sp=True, ep=2)),
        (TERMS | {"train__distributed_optimizer": False}, case(4, num_layers=2, pp=2, dp=2)),
        # ranks of cp add up with those of dp
        pytest.param(SIGMOID | TERMS, case(4, num_layers=2, tp=2, sp=True, cp=2, ep=2), marks=pytest.mark.nightly),
    ],
    ids=["tp2-ep2", "pp2-dp2", "tp2-cp2"],
)
def test_nothing_but_activations_is_added_up_in_half(
    pool: Pool, changes: dict[str, Any], one: Case, precision: str
) -> None:
    config = one.config(**changes, train__precision=precision)
    for found in pool.run(reduced, one.resolved(config), config, padded_steps()[0]):
        summed = {each for each in found if each.ndim < 3}
        assert {each.dtype for each in summed} <= WIDE, summed
        # ranks on CPUs swap losses, denominators and the norm as short messages
        assert {each.dtype for each in summed if each.kind == "send"} == {"torch.float64"}, summed
        assert any(each.dtype == "torch.float32" and each.kind != "send" for each in summed), "gradients"
