"""Weights that the ranks of DP x CP divide: the run is that of whole weights, against the oracle."""

from typing import Any

import pytest

from tests.parity.batches import GlobalBatch, documents_steps, three_steps, two_steps
from tests.parity.cases import Case, case, lean
from tests.parity.compare import Row, assert_rows_exact, by_layout
from tests.parity.expert_models import MIXTRAL
from tests.parity.families import DEEPSEEK_ATTENTION as LATENT
from tests.parity.families import GEMMA, GEMMA4, GPT_OSS, HYBRID, MAMBA, MINIMAX, MINISTRAL, OLMO3
from tests.parity.layouts.test_packing import PACKED, steps
from tests.parity.models import test_families
from tests.pool import Pool

WEIGHTS: dict[str, Any] = {"layout__shard": "weights"}
TIED = {"model__tied_embeddings": True}
CHUNKED, WHOLE = {"loss__chunk_tokens": 7}, {"loss__chunk_tokens": "whole"}
FULL, SELECTIVE = {"train__recompute": "full"}, {"train__recompute": "selective"}
GPT2 = {"model__norm": "layernorm", "model__activation": "gelu", "model__linear_bias": True}
QK_NORM = {"model__qk_norm": True, "model__head_dim": 16}
AHEAD = {"model__mtp_depths": 2}
DOCUMENTS = {"data__isolate_documents": True}
DECAYED = {"optimizer__clip_grad": 0.0, "optimizer__decay_norms_and_biases": True}
Z_LOSS = {"loss__side_terms": {"z": {"function": "z_loss", "coefficient": 0.1}}}
MUON = {"optimizer__kind": "muon"}
ROUTED = MIXTRAL | {"loss__router": {"z_coefficient": 0.5, "sequence_balance_coefficient": 2.0}}
SINKS = {key: value for key, value in GPT_OSS.items() if key != "model__experts"}


def row(name: str, changes: dict[str, Any], one: Case, batches: list[GlobalBatch] | None = None) -> Row:
    """Makes a row of divided weights."""
    return Row(name, WEIGHTS | changes, one, three_steps() if batches is None else batches)


DAY = [
    row("chunks, depths", AHEAD | CHUNKED, lean(case(4))),
    row("tied, recomputed, chunks", TIED | FULL | CHUNKED, lean(case(4, dp=2))),
    row("depths, whole logits", AHEAD | WHOLE | DECAYED, lean(case(4, dp=2)), two_steps()),
    row("packed", PACKED | Z_LOSS, case(4, num_layers=2, dp=2), steps()),
    row("tied depths, recomputed", TIED | AHEAD | FULL, lean(case(2, tp=2, sp=True, dp=2))),
    row("ring", QK_NORM | CHUNKED, lean(case(2, cp=2, cp_comm="ring"))),
    row("tied, interleaved", TIED | FULL, lean(case(4, pp=2, vpp=2, dp=2)), two_steps()),
    row("experts", ROUTED | MUON | FULL, lean(case(4, dp=4, ep=2)), two_steps()),
]
NIGHT = [
    row("biases, chunks", GPT2 | CHUNKED, lean(case(2, dp=4))),
    row("norms of heads", QK_NORM | SELECTIVE, lean(case(2, tp=2, sp=True, dp=2))),
    row("a sample a pass", {}, case(dp=2, num_layers=2)),
    row("thirds", TIED | {"train__global_batch_size": 12}, case(2, dp=3), [each[:12] for each in three_steps()]),
    row("documents", DOCUMENTS, lean(case(4, cp=2)), documents_steps()),
    row("documents", DOCUMENTS | FULL, lean(case(4, cp=2, cp_comm="ulysses", dp=2)), documents_steps()),
    row("Muon", MUON, lean(case(4, tp=2, sp=True, dp=2))),
    row("a pipeline", AHEAD | TIED, lean(case(4, pp=2, dp=2))),
    row("experts on all", MIXTRAL, lean(case(4, dp=2))),
    row("", {}, lean(case(4, tp=2, sp=True, cp=2))),
    row("latents", LATENT | CHUNKED, lean(case(4, dp=2))),
    row("Gemma 4", GEMMA4, lean(case(4, dp=2), 4)),
    row("gpt-oss with experts", GPT_OSS, lean(case(4, tp=2, sp=True, dp=2, ep=2), 4)),
    row("MiniMax-M2", MINIMAX, lean(case(4, tp=2, sp=True, dp=2, ep=2))),
    row("tied", TIED, lean(case(4, tp=2, sp=True, cp=2, cp_comm="ring"))),
    *(
        row(name, family, lean(case(4, dp=2), 4), three_steps())
        for name, family in {
            "Gemma 3": GEMMA,
            "OLMo 3": OLMO3,
            "gpt-oss": SINKS,
            "Qwen3-Next": HYBRID,
            "Nemotron-H": MAMBA,
            "Ministral 3": MINISTRAL,
        }.items()
    ),
]
"""Products of what the day has, and families."""
NIGHT += [
    row(each.name, each.changes, each.case, each.batches)
    for each in test_families.ROWS
    if (layout := each.case.layout).get("dp", 1) * layout.get("cp", 1) > 1 and layout.get("etp", 1) == 1
]


@pytest.mark.parametrize("rows", by_layout(DAY, NIGHT))
def test_divided_weights_do_not_change_the_run(pool: Pool, rows: list[Row]) -> None:
    assert_rows_exact(pool, rows)
