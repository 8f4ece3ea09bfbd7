"""Adapters match their definition under every kind of layout, and frozen weights keep their bits."""

from __future__ import annotations

from typing import Any

import pytest

from mtrain.config import Config
from mtrain.verify.core.ranks import Pool
from mtrain.verify.core.result import ParityReport
from tests.verify.parity.checks import check, expert_config, rich_config
from tests.verify.planted.faults import ADAPTER_PLANTS

LORA = {"rank": 8, "alpha": 16.0}
DORA = {"kind": "dora", "rank": 8, "targets": ["q_proj", "v_proj", "proj", "up_proj", "fc2"]}


NUM_STEPS = 1
"""One step, except where hooks of one step reach the next; test_lora_of_everything covers what a step leaves behind."""
LATENT = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 10}


def adapted(adapter: dict[str, Any], **changes: Any) -> Config:
    return rich_config(**({"adapter": adapter} | changes))


def assert_passes(report: ParityReport, *whole: str) -> None:
    """Checks gradients and updates of all tensors; only adapters have any, and those that learn whole."""
    assert report.passed, [(layout.name, layout.first_failure(), layout.error) for layout in report.layouts]
    trained = [name for name in report.tensors if "_adapter." in name or name in whole]
    frozen = [name for name in report.tensors if name not in trained]
    assert {*whole} <= {*trained}
    for layout in report.layouts:
        updates = {each.name: each for each in layout.deviations if each.kind == "update"}
        gradients = {each.name for each in layout.deviations if each.kind == "gradient"}
        assert gradients == set(trained), "nothing frozen has a gradient"
        assert updates.keys() == {*frozen, *trained}
        assert {(updates[name].value, updates[name].tolerance) for name in frozen} == {(0.0, 0.0)}


@pytest.mark.parametrize(
    "layouts",
    [
        "tp2spcp2mbs8,pp2vpp2mbs4",
        pytest.param("tp2mbs8,tp2spmbs8,cp2mbs8,dp2mbs4,tp2sppp2cp2mbs2", marks=pytest.mark.nightly),  # each alone
    ],
)
def test_lora_of_everything_is_exact_on_all_axes(pool: Pool, layouts: str) -> None:
    """Full recomputation needs a gradient at its input, which a frozen table does not give; overlaps need hooks."""
    targets = ["qkv", "proj", "fc1", "fc2", "embedding", "output"]
    train = {
        "train__recompute": "full",
        "train__overlap_grad_reduce": True,
        "train__overlap_param_gather": True,
        "model__tied_embeddings": False,
        "model__qkv_bias": True,
    }
    user = adapted(LORA | {"targets": targets, "scaling": "rslora"}, **train)
    assert_passes(check(pool, user, layouts, num_steps=2))


@pytest.mark.nightly  # tests/core/adapters/test_peft.py and test_peft_training.py have them by day
def test_adapters_of_a_delta_net_are_exact(pool: Pool) -> None:
    net = {"num_key_heads": 2, "num_value_heads": 4, "key_head_dim": 8, "value_head_dim": 8, "full_attention_every": 2}
    changes = {"model__delta_net": net, "model__sliding_window": None, "model__global_attention_every": None}
    user = adapted(LORA | {"targets": ["in_proj", "out_proj", "qkv"]}, **changes)
    assert_passes(check(pool, user, "tp2spcp2mbs4", num_steps=NUM_STEPS))


@pytest.mark.nightly  # tests/core/adapters/test_peft.py has them by day
def test_adapters_of_mamba_are_exact(pool: Pool) -> None:
    """Layers of one sublayer each, with all targets that they have."""
    mamba = {"num_heads": 4, "head_dim": 8, "num_groups": 2, "state_dim": 8}
    changes = {"model__mamba": mamba, "model__layer_pattern": "M*-M", "model__num_layers": 4}
    changes |= {"model__sliding_window": None, "model__global_attention_every": None, "model__activation": "relu2"}
    user = adapted(LORA | {"targets": ["in_proj", "out_proj", "qkv", "up_proj", "fc2"]}, **changes)
    assert_passes(check(pool, user, "tp2spcp2mbs4", num_steps=NUM_STEPS))


def test_an_adapter_of_a_tied_table_is_exact(pool: Pool) -> None:
    """Only the lookup has the adapter: the output layer, a copy on the last stage, keeps the frozen table."""
    user = adapted(LORA | {"targets": ["q_proj", "embedding"]})
    assert user.model.tied_embeddings
    assert_passes(check(pool, user, "pp2mbs4,pp2dp2-weights-mbs2", num_steps=NUM_STEPS))


TABLES = ("embedding.word_embeddings.weight", "output_layer.weight")


@pytest.mark.parametrize(
    ("layouts", "changes"),
    [
        ("pp2vpp2mbs2,pp2vpp2dp2-weights-mbs2", {"train__recompute": "full", "adapter__base_dtype": "bf16"}),
        pytest.param(
            "tp2spcp2mbs4",
            {"train__recompute": "full", "adapter__base_dtype": "bf16"},
            marks=pytest.mark.nightly,  # by day tests/parity/objectives/test_modules_to_save.py: tp divides a table
        ),
        # chunks: below, with an adapter of the output layer
        pytest.param("tp2mbs8", {"loss__chunk_tokens": 20}, marks=pytest.mark.nightly),
        # overlaps with adapters: above
        pytest.param(
            "dp2mbs4",
            {"train__overlap_param_gather": True, "train__overlap_grad_reduce": True},
            marks=pytest.mark.nightly,
        ),
        pytest.param("cp2mbs8,pp2mbs4,tp2spmbs8", {}, marks=pytest.mark.nightly),
    ],
)
def test_tables_that_learn_whole_are_exact(pool: Pool, layouts: str, changes: dict[str, Any]) -> None:
    adapter = LORA | {"targets": ["qkv", "fc2"], "modules_to_save": ["embed_tokens", "lm_head"]}
    adapter |= {name[9:]: value for name, value in changes.items() if name.startswith("adapter__")}
    others = {name: value for name, value in changes.items() if not name.startswith("adapter__")}
    user = adapted(adapter, model__tied_embeddings=False, **others)
    assert_passes(check(pool, user, layouts, num_steps=2), *TABLES)


OTHER_NORMS: dict[str, dict[str, Any]] = {
    "heads": {"model__qk_norm": True, "model__norm": "layernorm", "train__recompute": "full"},
    "full width": {"model__qk_norm": True, "model__qk_norm_width": "full", "adapter__base_dtype": "bf16"},
    "delta net": {
        "model__delta_net": {
            "num_key_heads": 2,
            "num_value_heads": 4,
            "key_head_dim": 8,
            "value_head_dim": 8,
            "full_attention_every": 2,
        },
        "model__sliding_window": None,
        "model__global_attention_every": None,
    },
}


@pytest.mark.parametrize(
    ("name", "layouts"),
    [
        ("full width", "tp2spmbs8,pp2mbs4,tp2spdp2-weights-mbs4"),
        pytest.param("heads", "tp2spcp2mbs4,pp2vpp2mbs2,dp2mbs4", marks=pytest.mark.nightly),
        pytest.param("delta net", "tp2spmbs8,cp2mbs8", marks=pytest.mark.nightly),
    ],
)
def test_norms_that_learn_whole_are_exact(pool: Pool, name: str, layouts: str) -> None:
    changes = OTHER_NORMS[name]
    adapter = LORA | {"targets": ["qkv", "fc2"], "modules_to_save": ["norms"]}
    adapter |= {key[9:]: value for key, value in changes.items() if key.startswith("adapter__")}
    user = adapted(adapter, **{key: value for key, value in changes.items() if not key.startswith("adapter__")})
    report = check(pool, user, layouts, num_steps=2)
    assert_passes(report, *(each for each in report.tensors if "norm" in each))
    assert "decoder.final_layernorm.weight" in report.tensors


@pytest.mark.parametrize(  # the first one by day in tables, above
    "fault", [pytest.param("saved-module-times-tp", marks=pytest.mark.nightly), "sp-norms-not-reduced"]
)
def test_a_wrong_gradient_of_norms_that_learn_whole_is_found(pool: Pool, fault: str) -> None:
    user = adapted(LORA | {"targets": ["qkv"], "modules_to_save": ["norms"]})
    report = check(
        pool, user, "tp2mbs8,tp2spmbs8" if fault == "sp-norms-not-reduced" else "tp2mbs8", fault, num_steps=1
    )
    assert report.diagnosis is not None
    assert (report.diagnosis.axis, report.diagnosis.kind) == ("sp" if "sp-" in fault else "tp", "gradient")
    assert report.diagnosis.name == "decoder.final_layernorm.weight"


@pytest.mark.parametrize(
    "layouts", ["pp2mbs4", pytest.param("tp2spmbs8,cp2mbs8,tp2pp2mbs4", marks=pytest.mark.nightly)]
)
def test_a_tied_table_that_learns_whole_is_exact(pool: Pool, layouts: str) -> None:
    """Both ends of a pipeline have a copy, whose gradients are summed."""
    user = adapted(LORA | {"targets": ["q_proj"], "modules_to_save": ["embedding", "output"]})
    assert user.model.tied_embeddings
    assert_passes(check(pool, user, layouts, num_steps=2), TABLES[0])


@pytest.mark.parametrize("layouts", ["pp2mbs4", pytest.param("tp2spep2mbs4,ep2dp2mbs2", marks=pytest.mark.nightly)])
def test_tables_that_learn_whole_are_exact_with_experts_and_a_depth(pool: Pool, layouts: str) -> None:
    """The frozen depth looks tokens up in a copy of the table, on the last stage, and its logits read the other one."""
    user = expert_config(
        adapter=LORA | {"targets": ["q_proj", "experts"], "modules_to_save": ["embedding", "output"]},
        model__experts__bias_update_rate=0.0,
        layout__etp=1,
    )
    assert user.model.mtp_depths
    own = TABLES[:1] if user.model.tied_embeddings else TABLES
    assert_passes(check(pool, user, layouts, num_steps=NUM_STEPS), *own)


@pytest.mark.parametrize("layouts", ["tp2spmbs4", pytest.param("tp2spdp2mbs4,pp2cp2mbs2", marks=pytest.mark.nightly)])
def test_dora_is_exact_where_rows_lie_on_several_ranks(pool: Pool, layouts: str) -> None:
    user = adapted(DORA, model__qkv_bias=True, train__distributed_optimizer=False)
    assert_passes(check(pool, user, layouts, num_steps=NUM_STEPS))


@pytest.mark.parametrize(
    "layouts", ["tp2spep2mbs4,ep2dp4-weights-mbs2", pytest.param("ep2dp2mbs2,tp2sppp2mbs2", marks=pytest.mark.nightly)]
)
def test_adapters_of_experts_are_exact_before_a_frozen_depth(pool: Pool, layouts: str) -> None:
    """The depth of multi-token prediction has no adapters; its loss reaches the adapters of the layers before it."""
    user = expert_config(
        adapter=LORA | {"targets": ["q_proj", "fc1", "experts", "output"]},
        model__experts__bias_update_rate=0.0,
        layout__etp=1,
    )
    assert_passes(check(pool, user, layouts, num_steps=NUM_STEPS))


@pytest.mark.parametrize("layouts", ["tp2spep2mbs4", pytest.param("pp2cp2mbs2,ep2dp2mbs2", marks=pytest.mark.nightly)])
@pytest.mark.nightly  # tests/core/adapters/test_peft.py has patterns by day
def test_ranks_and_alphas_of_single_targets_are_exact(pool: Pool, layouts: str) -> None:
    user = expert_config(
        adapter=LORA
        | {
            "targets": ["qkv", "proj", "fc1", "experts", "output"],
            "rank_pattern": {"qkv": 2, "k_proj": 3, "up_proj": 1, "experts": 2},
            "alpha_pattern": {"v_proj": 5.0, "experts": 3.0, "output": 4.0},
            "scaling": "rslora",
        },
        model__experts__bias_update_rate=0.0,
        layout__etp=1,
    )
    assert_passes(check(pool, user, layouts, num_steps=NUM_STEPS))


@pytest.mark.parametrize(
    "recompute",
    [
        # full recomputation: above
        pytest.param({"train__recompute": "full", "train__recompute_layers": 1}, marks=pytest.mark.nightly),
        {"train__recompute": "selective", "train__recompute_modules": ["core_attn", "mlp"]},
    ],
    ids=["layers", "modules"],
)
@pytest.mark.parametrize("layouts", ["tp2spmbs4", pytest.param("pp2cp2mbs2", marks=pytest.mark.nightly)])
def test_adapters_are_exact_with_recomputation_and_logits_in_chunks(
    pool: Pool, recompute: dict[str, Any], layouts: str
) -> None:
    """Logits are of weighed tokens alone; the adapter of the output layer is a part of every chunk's product."""
    targets = {"targets": ["qkv", "fc1", "fc2", "output"]}
    chunks = {"model__tied_embeddings": False, "loss__chunk_tokens": 20}
    user = adapted(LORA | targets, **chunks, **recompute)
    assert_passes(check(pool, user, layouts, num_steps=NUM_STEPS))


@pytest.mark.parametrize(
    ("kind", "rank", "layouts"),
    [
        ("dora", 24, "tp2spmbs8,tp2spdp2-weights-mbs4"),
        # a plain projection of queries, adapted as in every other model
        pytest.param("lora", None, "cp2ulyssesmbs8", marks=pytest.mark.nightly),
        pytest.param("lora", 24, "tp2mbs8,tp2spcp2mbs2,pp2mbs4", marks=pytest.mark.nightly),
        pytest.param("dora", 24, "tp2mbs8", marks=pytest.mark.nightly),
        pytest.param("lora", None, "tp2spmbs8", marks=pytest.mark.nightly),
    ],
)
def test_adapters_of_latent_attention_are_exact(pool: Pool, kind: str, rank: int | None, layouts: str) -> None:
    """The adapted projections are the replicated ones down, those up by heads, and one whose product feeds others."""
    mla: dict[str, Any] = {"model__mla": {**LATENT, "q_lora_rank": rank}, "model__num_query_groups": None}
    recompute = {"train__recompute": "selective"} if kind == "dora" else {}
    user = adapted({"kind": kind, "rank": 8, "targets": ["qkv", "proj"]}, **mla, **recompute)
    assert_passes(check(pool, user, layouts, num_steps=NUM_STEPS))


@pytest.mark.parametrize(  # norms and dense matrices under a base in bf16: above
    "kind", [pytest.param("dense", marks=pytest.mark.nightly), "experts"]
)
def test_a_base_in_bf16_is_exact_below_a_run_in_float32(pool: Pool, kind: str) -> None:
    """The comparison is with float64 at the rounded weights, so every product has to widen them."""
    held = LORA | {"base_dtype": "bf16"}
    if kind == "dense":
        targets = {"targets": ["qkv", "fc2", "embedding", "output"]}
        user = adapted(held | targets, model__tied_embeddings=False, train__recompute="full")
        assert_passes(check(pool, user, "tp2spmbs8", num_steps=NUM_STEPS))
        return
    changes = {"model__mla": LATENT, "model__num_query_groups": None, "model__mtp_depths": 0, "layout__etp": 1}
    user = expert_config(
        adapter=held | {"targets": ["proj", "experts"]}, model__experts__bias_update_rate=0.0, **changes
    )
    assert_passes(check(pool, user, "tp2spep2mbs4,ep2dp2-weights-mbs4", num_steps=NUM_STEPS))


EXPECTED: dict[str, tuple[dict[str, Any], str, str, str]] = {
    "adapter-gradient-times-tp": (LORA, "tp2mbs8", "tp", "gradient"),
    "adapter-gradient-not-reduced": (LORA, "tp2mbs8,tp2spmbs8", "sp", "gradient"),
    "adapter-scale-dropped": (LORA, "mbs2", "every layout", "loss"),
    "magnitude-by-tp-rank": (DORA, "tp2mbs8", "tp", "loss"),
    "frozen-weights-decayed": (LORA, "mbs2", "every layout", "update"),
    "saved-module-times-tp": (
        LORA | {"targets": ["qkv"], "modules_to_save": ["embedding"]},
        "tp2mbs8",
        "tp",
        "gradient",
    ),
}
"""Fault -> adapter, layouts, the axis and the kind of quantity that reveal it."""


@pytest.mark.parametrize("fault", EXPECTED)
def test_every_fault_of_adapters_is_found(pool: Pool, fault: str) -> None:
    adapter, layouts, axis, kind = EXPECTED[fault]
    report = check(pool, adapted(adapter), layouts, fault, num_steps=1)
    assert all(layout.error is None for layout in report.layouts)
    assert report.diagnosis is not None
    assert (report.diagnosis.axis, report.diagnosis.kind) == (axis, kind)
    assert report.layouts[0].passed == (axis != "every layout")
    assert ("_adapter." not in str(report.diagnosis.name)) or fault != "saved-module-times-tp"
    assert EXPECTED.keys() == ADAPTER_PLANTS.keys()
