"""The memory estimate, compared with what ranks allocate; recomputation must change memory and no number."""

from __future__ import annotations

from typing import Any

import pytest

from mtrain import arch
from mtrain.arch.layout import Layout
from mtrain.base.errors import ConfigError
from mtrain.config import Config
from mtrain.hf.configuration import load_config
from tests.config.samples import config
from tests.fault_table import Notice
from tests.messages import refuses
from tests.paths import CONFIGS
from tests.plan.memory_ranks import Measured, measured
from tests.pool import Pool

FULL = "train.recompute=full"
SELECTIVE = "train.recompute=selective"
APART = "model.megatron={gradient_accumulation_fusion: false}"
RECOMPUTED: tuple[tuple[str, ...], ...] = (
    (FULL,),
    (FULL, "train.recompute_layers=2"),
    ("train.recompute=none",),
    (SELECTIVE,),
    (SELECTIVE, "train.recompute_modules=[core_attn, mlp]"),
    ("train.recompute=none", APART),
    ("train.recompute=none", "train.offload_layers=3"),
)
SMALL = (
    "model.num_layers=4",
    "model.hidden_size=256",
    "model.ffn_hidden_size=896",
    "model.num_attention_heads=8",
    "model.num_query_groups=2",
    "model.vocab_size=8016",
    "train.device=cpu",
    "train.compile=none",  # allocations of compiled code are not seen, but those while it is compiled are
    "train.global_batch_size=1",
)
"""Llama 3.1 8B at a sixteenth of its width and an eighth of its layers, on random rows: every position is text."""
MOCK = (
    "data.kind=mock",
    "data.tokenizer=null",
    "data.seq_length=2048",
    "data.packing=null",
    "optimizer.warmup_steps=0",
)


def long_rows(*changes: str) -> Config:
    """Returns the configuration of 128k tokens, made small; its layout is given separately."""
    parts = [CONFIGS / "model" / "llama3_8b.yaml", CONFIGS / "run" / "finetune_128k.yaml"]
    return load_config(parts, [*SMALL, *MOCK, *changes])


def assert_estimated(found: list[Measured], config: Config, layout: Layout) -> None:
    """Checks the total within 10 % on the rank that needs most, and what follows from parameters to the byte."""
    estimate = arch.memory_per_rank(config, layout, 0)
    states = (estimate.weights_bytes, estimate.gradients_bytes, estimate.optimizer_bytes)
    assert {(each.weights_bytes, each.gradients_bytes, each.optimizer_bytes) for each in found} == {states}
    worst = max(each.forward_backward_bytes for each in found)
    assert estimate.activations_bytes == pytest.approx(worst, rel=0.15)
    update = max(each.update_bytes for each in found)
    assert update <= estimate.update_bytes
    assert estimate.total_bytes == pytest.approx(sum(states) + max(worst, update), rel=0.1)
    assert estimate.host_bytes == pytest.approx(max(each.host_bytes for each in found), rel=0.1)


@pytest.mark.parametrize(
    ("layout", "precision", "seq_length"),
    [
        pytest.param(Layout(cp=8), "bf16", 2048, marks=pytest.mark.nightly),
        pytest.param(Layout(cp=2), "fp32", 2048, marks=pytest.mark.nightly),  # a minute
        pytest.param(Layout(tp=2, sp=True), "bf16", 2048, marks=pytest.mark.nightly),  # processors are slow in bf16
        pytest.param(Layout(cp=4, cp_comm="ring"), "bf16", 2048, marks=pytest.mark.nightly),
        pytest.param(Layout(tp=2, sp=True), "fp32", 512, marks=pytest.mark.nightly),  # with tensors that move
        (Layout(tp=2, sp=True), "fp32", 256),  # some tensors are too small to move
    ],
    ids=str,
)
@pytest.mark.nightly  # by day test_memory_of_families.py, with and without recomputation, and logits in chunks, below
def test_the_estimate_is_what_ranks_allocate_and_recomputation_changes_no_bit(
    layout: Layout, precision: str, seq_length: int, pool: Pool
) -> None:
    keys = [f"layout.tp={layout.tp}", f"layout.sp={str(layout.sp).lower()}", f"layout.cp={layout.cp}"]
    keys += [f"layout.cp_comm={layout.cp_comm}", f"data.seq_length={seq_length}"]
    keys += ["model.vocab_size=2000"] if seq_length == 256 else []
    configs = [long_rows(*keys, f"train.precision={precision}", *changes) for changes in RECOMPUTED]
    ranks = pool.run(measured, layout, configs)
    for number, each in enumerate(configs):
        assert_estimated([rank[number] for rank in ranks], each, layout)
    for rank in ranks:
        *fused, apart, moved = (each.gradients for each in rank)
        assert all(each == fused[0] for each in fused)
        assert moved == apart  # layers that move fuse no weight gradients, which rounds otherwise
    full, part, nothing, _, modules, _, moved = (each.forward_backward_bytes for each in ranks[0])
    assert full < part < nothing
    assert full < modules < nothing
    assert moved < nothing


@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16", marks=pytest.mark.nightly)])
def test_the_estimate_of_logits_in_chunks_is_what_a_rank_allocates(pool: Pool, precision: str) -> None:
    """Logits dominate here: a wide vocabulary, and layers that keep only their input."""
    wide = ("model.vocab_size=8000", "model.num_layers=1", "data.seq_length=512", "loss.chunk_tokens=200", FULL)
    given = long_rows(f"train.precision={precision}", "layout.cp=1", "layout.tp=1", *wide)
    ((found,),) = pool.run(measured, Layout(), [given])
    assert_estimated([found], given, Layout())


EXPERTS = {"num_experts": 4, "top_k": 2, "ffn_hidden_size": 48, "shared_ffn_hidden_size": 32, "first_dense_layers": 1}
LATENT = {"kv_lora_rank": 8, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 8}


def of_experts(*modules: str) -> Config:
    keys: dict[str, Any] = {"model__num_query_groups": None, "model__mla": LATENT}
    keys["model__experts"] = EXPERTS | {"shared_gate": True}
    keys |= {"model__num_layers": 2, "train__precision": "fp32", "train__global_batch_size": 2, "layout__ep": 2}
    keys |= {"loss__router": {"sequence_balance_coefficient": 0.01, "z_coefficient": 0.01}}
    if modules:
        keys |= {"train__recompute": "selective", "train__recompute_modules": list(modules)}
    return config(**keys)


@pytest.mark.nightly  # by day experts and latents of test_memory_of_families.py, recomputed in tests/parity/models
def test_recomputed_experts_and_latents_change_no_bit(pool: Pool) -> None:
    chosen = [(), ("mlp",), ("moe",), ("shared_experts", "core_attn")]
    layout = Layout(dp=2, ep=2)
    for rank in pool.run(measured, layout, [of_experts(*modules) for modules in chosen]):
        whole, *others = rank
        assert all(each.gradients == whole.gradients for each in others)
        assert all(each.forward_backward_bytes < whole.forward_backward_bytes for each in others[1:])


BROKEN: list[tuple[dict[str, Any], str]] = [
    ({"train__recompute_modules": ["mlp"]}, "recompute=selective"),
    ({"train__recompute": "full", "train__recompute_modules": ["mlp"]}, "recompute=selective"),
    ({"train__recompute": "selective", "train__recompute_modules": []}, "recompute_modules"),
    ({"train__recompute": "selective", "train__recompute_modules": ["mlp", "mlp"]}, "recompute_modules"),
    ({"train__recompute": "selective", "train__recompute_modules": ["moe"]}, "moe"),
    ({"train__recompute": "selective", "train__recompute_layers": 2}, "recompute_layers=2"),
    (
        {"train__recompute": "full", "train__recompute_layers": 2, "model__experts": EXPERTS},
        "recompute_layers=2",
    ),
    (
        {
            "train__recompute": "selective",
            "train__recompute_modules": ["moe", "shared_experts"],
            "model__experts": EXPERTS,
        },
        "shared_experts",
    ),
    (
        {
            "train__recompute": "selective",
            "train__recompute_modules": ["shared_experts"],
            "model__experts": EXPERTS | {"shared_ffn_hidden_size": 0},
        },
        "model.experts.shared_ffn_hidden_size=0",
    ),
    (
        {
            "train__recompute": "selective",
            "train__recompute_modules": ["mlp"],
            "model__experts": EXPERTS | {"first_dense_layers": 0},
        },
        "mlp",
    ),
]


@pytest.mark.fault(
    "input",
    "recomputation of modules or layers that are not there, or that megatron-core cannot recompute",
    happens="refused by the name of the key",
    exit_code=2,
)
@pytest.mark.parametrize(("changes", "fact"), BROKEN, ids=lambda value: value if isinstance(value, str) else "")
def test_what_cannot_be_recomputed_is_refused(changes: dict[str, Any], fact: str, notice: Notice) -> None:
    with notice, refuses(ValueError, fact):
        config(**changes)
    assert notice.exit_code == ConfigError.exit_code


def test_a_row_of_128k_fits_on_gpus_of_80_gb() -> None:
    names = {"model": "llama3_8b", "layout": "tp4cp8", "run": "finetune_128k"}
    given = load_config([CONFIGS / axis / f"{name}.yaml" for axis, name in names.items()])
    layout = Layout.from_config(given, 32)
    full = arch.memory_per_rank(given, layout, 0).total_bytes
    part = given.model_copy(update={"train": given.train.model_copy(update={"recompute_layers": 24})})
    nothing = given.model_copy(update={"train": given.train.model_copy(update={"recompute": "none"})})
    assert (
        full < arch.memory_per_rank(part, layout, 0).total_bytes < arch.memory_per_rank(nothing, layout, 0).total_bytes
    )
    assert full < 25e9
    assert arch.memory_per_rank(nothing, layout, 0).total_bytes < 70e9
