"""Muon on any layout: steps match the exact ones, the state is the same, and its cost is known."""

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

from mtrain import arch
from mtrain.arch.layout import Layout
from mtrain.core.engine.muon import orthogonalized
from tests.config.samples import config
from tests.core.engine.counting import count_steps
from tests.core.engine.muon_ranks import overflow, share
from tests.parity.batches import three_steps
from tests.parity.cases import Case, case
from tests.pool import Pool
from tests.verify.parity.checks import check, expert_config, rich_config

MUON: dict[str, Any] = {"optimizer__kind": "muon"}
AXES = "tp2spcp2mbs16,pp2vpp2mbs4"
PLAIN = {"train__distributed_optimizer": False}
OVERLAPPED = {"train__overlap_grad_reduce": True, "train__overlap_param_gather": True}
UNGATED = {"model__activation": "gelu", "model__linear_bias": True, "model__norm": "layernorm"}
CONSTANTS = {
    "optimizer__nesterov": False,
    "optimizer__momentum": 0.5,
    "optimizer__newton_schulz_steps": 3,
    "optimizer__update_rms": 1.0,
    "optimizer__clip_grad": 0.0,
    "optimizer__decay_norms_and_biases": True,
}
LATENTS = {"q_lora_rank": 24, "kv_lora_rank": 12, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 10}
LATENT = {"model__mla": LATENTS, "model__num_query_groups": None}
NO_QUERY_LATENT = {"model__mla": {**LATENTS, "q_lora_rank": None}, "model__num_query_groups": None}


@pytest.mark.parametrize("shape", [(4, 9), (9, 4), (6, 6), (1, 5)])
@pytest.mark.parametrize("scale", [1.0, 1e-15, 1e15])
def test_singular_values_come_near_one_and_vectors_stay(shape: tuple[int, int], scale: float) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    left, values, right = np.linalg.svd(matrix.double().numpy(), full_matrices=False)
    values = values / np.sqrt((values**2).sum())
    for _ in range(5):
        values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
    assert 0.6 < values.min() <= values.max() < 1.3
    found = orthogonalized(matrix * scale, 5)
    assert found.dtype == torch.float32
    np.testing.assert_allclose(found.numpy(), left @ np.diag(values) @ right, atol=2e-5)


def test_nothing_stays_nothing() -> None:
    assert torch.equal(orthogonalized(torch.zeros(3, 5), 5), torch.zeros(3, 5))


@pytest.mark.parametrize(
    ("changes", "layouts"),
    [
        pytest.param({}, AXES, id="axes"),
        pytest.param(OVERLAPPED, "dp2mbs8", id="overlapped"),
        pytest.param(
            UNGATED | CONSTANTS,
            "tp2mbs16",
            id="ungated, with biases, other constants",
            marks=pytest.mark.nightly,  # constants are those of the run, whatever they are
        ),
        pytest.param(NO_QUERY_LATENT, "dp2mbs8", id="latent attention without a query rank"),
        pytest.param(
            {},
            "tp2mbs16,tp2spmbs16,pp2mbs4,cp2mbs16,dp2mbs8,pp2vpp2dp2mbs2,tp2sppp2cp2mbs2",
            id="each axis alone",
            marks=pytest.mark.nightly,
        ),
        pytest.param(PLAIN, "dp2mbs8,tp2dp2mbs8,tp2spdp2mbs4", id="plain optimizer", marks=pytest.mark.nightly),
        pytest.param(OVERLAPPED, "dp4mbs4,pp2vpp2dp2mbs2", id="overlapped pipeline", marks=pytest.mark.nightly),
        pytest.param(LATENT, "tp2spmbs16,dp2mbs8", id="latent attention", marks=pytest.mark.nightly),
        pytest.param(NO_QUERY_LATENT, "tp2spdp2mbs8", id="no query rank, sp", marks=pytest.mark.nightly),
    ],
)
def test_every_step_is_the_exact_one(pool: Pool, changes: dict[str, Any], layouts: str) -> None:
    # how momenta go on: by day on the row with overlap; neither MLA nor further axes change it
    num_steps = 1 if "model__mla" in changes or layouts == AXES else 2
    report = check(pool, rich_config(**MUON, **changes), layouts, num_steps=num_steps)
    assert report.passed, [(layout.name, layout.first_failure(), layout.error) for layout in report.layouts]
    updates = [each for layout in report.layouts for each in layout.deviations if each.kind == "update"]
    assert 0 < max(each.value / each.tolerance for each in updates) < 0.5, "the bound has room"


@pytest.mark.parametrize(
    ("layouts", "num_steps"),
    [
        ("tp2spdp2ep2etp2mbs8", 1),
        # how momenta go on: the test above; without etp
        pytest.param("tp2spdp2ep2etp2,dp2ep2mbs2,pp2cp2dp2ep4", 2, marks=pytest.mark.nightly),
    ],
)
def test_every_step_of_experts_is_the_exact_one(pool: Pool, layouts: str, num_steps: int) -> None:
    """The model has a depth of multi-token prediction; an expert's matrices lie on few ranks, their owner anywhere."""
    report = check(pool, expert_config(**MUON, model__num_layers=2), layouts, num_steps=num_steps)
    assert report.passed, [(layout.name, layout.first_failure(), layout.error) for layout in report.layouts]


@pytest.mark.parametrize("layout", [Layout(), Layout(tp=2, sp=True, dp=2), Layout(pp=2, dp=2), Layout(cp=4)], ids=str)
def test_the_state_of_matrices_is_divided_as_planned(pool: Pool, layout: Layout) -> None:
    """A matrix has one momentum per element, once over the data-parallel ranks; everything else has both moments."""
    given = config(**MUON, train__precision="fp32", model__qk_norm=True)
    shares = pool.run(share, layout, given)
    replicas = layout.dp * layout.cp
    for pp_rank in range(layout.pp):
        own = [each for rank, each in enumerate(shares) if layout.coordinate(rank).pp == pp_rank]
        held = arch.parameters_on_rank(given.model, layout, pp_rank).total
        matrices = arch.matrices_on_rank(given.model, layout, pp_rank).total
        assert replicas * sum(each.momenta for each in own) == len(own) * matrices
        assert replicas * sum(each.moments for each in own) == len(own) * (held - matrices)
        assert max(each.momenta + each.moments for each in own) < 1.01 * held / replicas + 128, "shared out evenly"
    names = frozenset[str]().union(*(each.names for each in shares))
    assert {name for name in names if "norm" not in name} == {
        "embedding.word_embeddings.weight",
        "output_layer.weight",
    }


def test_an_update_that_overflows_leaves_the_momentum(pool: Pool) -> None:
    given = config(**MUON, train__precision="fp16", train__initial_loss_scale=2.0**60, model__num_layers=1)
    for skipped in pool.run(overflow, Layout(dp=2), given):
        assert skipped == (True, 0.0, False)


@pytest.mark.parametrize(
    "case",  # rounds where a stage is one rank, and several: by dp; divided sequences exchange no more
    [case(4, 2, dp=2), case(8, 2), case(8, 2, tp=2, sp=True), case(8, 2, tp=2, pp=2)],
    ids=str,
)
@pytest.mark.nightly  # a number of the documentation; by day tests/tools/test_traffic.py counts what a step sends
def test_a_step_costs_two_exchanges_a_round_and_no_further_read(pool: Pool, case: Case) -> None:
    """Every rank of a stage owns one tensor per round; a layer has four tensors with matrices."""
    configs = [case.config(**MUON), case.config()]
    layout = case.resolved(configs[0])
    stage = layout.world_size // layout.pp
    rounds = -(-4 * (case.num_layers // layout.pp) // stage)
    for counted in pool.run(count_steps, layout, configs, three_steps()[0]):
        muon, adamw = (steps["ours"] for steps in counted)
        added = Counter[str]()
        for (name, _), count in (muon.collectives - adamw.collectives).items():
            added[name] += count
        assert added == {"alltoall_base_": 2 * rounds}
        assert adamw.collectives - muon.collectives == Counter()
        assert muon.reads - adamw.reads == Counter()
