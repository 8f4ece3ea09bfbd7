"""The planned cost of adapters is what is built: parameters on every rank, and arithmetic by hand."""

from __future__ import annotations

from typing import Any

import pytest

from mtrain import arch
from mtrain.arch.adapters import adapter_parameters_on_rank, num_adapter_parameters
from mtrain.arch.layout import Layout
from mtrain.arch.parameters import padded_vocab_size
from mtrain.config import Config
from mtrain.verify.reference.model.adapters import all_shapes, is_trained
from tests.config.samples import config

EXPERTS = {"num_experts": 4, "top_k": 2, "ffn_hidden_size": 16, "shared_ffn_hidden_size": 16, "first_dense_layers": 1}
ADAPTERS: list[dict[str, Any]] = [
    {"rank": 3, "targets": ["qkv", "proj", "fc1", "fc2", "embedding", "output"]},
    {"kind": "dora", "rank": 3, "targets": ["q_proj", "fc1", "fc2"]},
    {"rank": 3, "targets": ["k_proj", "fc2", "experts"]},
    {"kind": "dora", "rank": 3, "targets": ["qkv", "proj"]},
    {
        "rank": 3,
        "targets": ["qkv", "fc1", "experts", "embedding"],
        "rank_pattern": {"qkv": 5, "k_proj": 1, "experts": 2},
    },
]
LATENT = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 10}


def adapted(adapter: dict[str, Any], **changes: Any) -> Config:
    experts = {"model__experts": EXPERTS} if "experts" in adapter["targets"] else {}
    latent = {"model__mla": LATENT, "model__num_query_groups": None} if adapter["targets"] == ["qkv", "proj"] else {}
    return config(adapter=adapter, **experts, **latent, **changes)


@pytest.mark.parametrize("adapter", ADAPTERS, ids=["tables", "dora", "experts", "latents", "patterns"])
def test_parameters_are_those_of_the_definition_and_lie_somewhere(adapter: dict[str, Any]) -> None:
    user = adapted(adapter, model__vocab_multiple=8)  # without padding
    assert user.adapter is not None
    sizes = {name: shape for name, shape in all_shapes(user).items() if "_adapter." in name}
    total = sum(shape[0] * (shape[1] if len(shape) > 1 else 1) for shape in sizes.values())
    assert num_adapter_parameters(user.model, user.adapter) == total
    assert (
        sum(adapter_parameters_on_rank(user.model, user.adapter, Layout(pp=2), rank).total for rank in (0, 1)) == total
    )
    divided = adapter_parameters_on_rank(user.model, user.adapter, Layout(tp=2), 0).total
    assert total / 2 < divided < total


NET = {"num_key_heads": 2, "num_value_heads": 4, "key_head_dim": 16, "value_head_dim": 8}
MAMBA = {"num_heads": 4, "head_dim": 8, "num_groups": 2, "state_dim": 8}
GLOBAL = {"head_dim": 32, "num_query_groups": 2}
WITH_NORMS: dict[str, dict[str, Any]] = {
    "layernorm": {"model__norm": "layernorm"},
    "heads": {"model__qk_norm": True, "model__sandwich_norm": True},
    "full width": {"model__qk_norm": True, "model__qk_norm_width": "full", "model__post_norm": True},
    "delta net": {"model__delta_net": NET},
    "mamba": {
        "model__mamba": MAMBA,
        "model__layer_pattern": "M-*-M-*E",
        "model__experts": EXPERTS | {"first_dense_layers": 0},
    },
    "latents": {"model__mla": LATENT, "model__num_query_groups": None},
    "ahead": {"model__mtp_depths": 1, "model__experts": EXPERTS},
    "global": {
        "model__global_attention": GLOBAL,
        "model__global_attention_every": 2,
        "model__sliding_window": 8,
        "model__qk_norm": True,
        "model__rope__local_base": 1e4,
    },
}


@pytest.mark.parametrize("name", WITH_NORMS)
def test_norms_are_those_that_the_reference_trains(name: str) -> None:
    changes = WITH_NORMS[name]
    user, bare = (
        config(adapter={"rank": 3, "targets": ["qkv"], "modules_to_save": saved}, **changes) for saved in (["norm"], [])
    )
    assert user.adapter is not None
    assert bare.adapter is not None
    norms = {
        each: shape
        for each, shape in all_shapes(user).items()
        if is_trained(each, user.adapter) and not is_trained(each, bare.adapter)
    }
    assert norms
    assert all(len(shape) == 1 for shape in norms.values())
    total = sum(shape[0] for shape in norms.values())
    assert num_adapter_parameters(user.model, user.adapter) - num_adapter_parameters(bare.model, bare.adapter) == total
    found = [
        [adapter_parameters_on_rank(each.model, each.adapter, Layout(pp=2), rank).total for rank in (0, 1)]
        for each in (user, bare)
        if each.adapter is not None
    ]
    assert sum(found[0]) - sum(found[1]) == total
    narrow, layout = num_adapter_parameters(user.model, user.adapter), Layout()
    assert arch.memory_per_rank(user, layout, 0).gradients_bytes == 4 * narrow


def test_a_head_is_counted_with_what_learns() -> None:
    """The head adds its gradient, moments and third product, and is not among the frozen weights."""
    adapter = {"rank": 1, "targets": ["q_proj"]}
    user, layout = (
        adapted(adapter, model__num_labels=3, loss__function="classification", train__precision="fp32"),
        Layout(),
    )
    without = adapted(adapter, train__precision="fp32")
    head, output = 3 * 64, 64 * user.model.vocab_size
    found, before = (arch.memory_per_rank(each, layout, 0) for each in (user, without))
    assert found.gradients_bytes - before.gradients_bytes == 4 * head
    assert found.optimizer_bytes - before.optimizer_bytes == 2 * 4 * head
    assert found.weights_bytes - before.weights_bytes == 4 * (head - padded_vocab_size(without.model, 1) * 64)
    assert arch.run_flops_per_token(user) - arch.run_flops_per_token(without) == 6 * head - 4 * output
    assert user.adapter is not None
    on_stages = [adapter_parameters_on_rank(user.model, user.adapter, Layout(pp=2), rank).total for rank in (0, 1)]
    assert sum(on_stages) == num_adapter_parameters(user.model, user.adapter)
    assert on_stages[1] - on_stages[0] == head


def test_a_frozen_model_has_weights_alone_and_two_thirds_of_the_arithmetic() -> None:
    user = adapted({"rank": 1, "targets": ["q_proj"]})
    whole, layout = user.model_copy(update={"adapter": None}), Layout()
    adapters, everything = (arch.memory_per_rank(each, layout, 0) for each in (user, whole))
    elements = 8 * (64 + 64)  # layers, columns and rows of q_proj
    assert adapters.gradients_bytes == 4 * elements
    assert adapters.optimizer_bytes == 3 * 4 * elements
    assert adapters.weights_bytes == everything.weights_bytes + 2 * elements
    model = user.model
    matrices = 8 * (64 * (64 + 2 * 32) + 64 * 64 + 3 * 64 * 128) + 64 * model.vocab_size
    expected = arch.flops_per_token(model, 64) - 2 * matrices + 6 * elements
    assert arch.run_flops_per_token(user) == expected
