"""Combinations that adapters exclude: every refusal by its message; other programs' names of targets."""

from __future__ import annotations

import json
from typing import Any

import pytest
import yaml

from mtrain.base.errors import ConfigError
from mtrain.config.load import config_yaml
from mtrain.hf.configuration import load_config
from tests.config.samples import config, content
from tests.fault_table import Notice
from tests.messages import refuses

EXPERTS: dict[str, Any] = {"num_experts": 4, "top_k": 2, "ffn_hidden_size": 16}
LATENT = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 10}
MLA: dict[str, Any] = {"model__mla": LATENT, "model__num_query_groups": None}


REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"targets": ["k_proj"]}, MLA, "adapter.targets=k_proj"),
    ({"targets": ["q_proj"]}, MLA, "kv_a_proj"),
    ({"targets": ["q_a_proj"]}, {}, "adapter.targets=q_a_proj"),
    ({"targets": ["qkv"], "dropout": 0.1}, MLA, "adapter.dropout=0.1"),
    ({"targets": ["gate_proj"]}, {"model__activation": "gelu"}, "adapter.targets=gate_proj"),
    ({"targets": ["qkv_proj"]}, MLA, "adapter.targets=qkv_proj"),
    ({"targets": ["in_proj_qkvz"]}, {}, "adapter.targets=in_proj_qkvz"),
    ({"targets": ["gate_up_proj"]}, {"model__activation": "gelu"}, "adapter.targets=gate_up_proj"),
    ({"targets": ["fc1", "gate_up_proj"]}, {}, "targets=gate_up_proj"),
    ({"targets": ["experts"]}, {}, "adapter.targets=experts"),
    (
        {"targets": ["fc1", "down_proj"]},
        {"model__experts": EXPERTS},
        "targets=fc1",
    ),
    (
        {"targets": ["qkv", "output"]},
        {"model__tied_embeddings": True},
        "adapter.targets=output",
    ),
    (
        {"targets": ["embedding"]},
        {"model__tied_embeddings": True, "checkpoint": {"interval_steps": 2, "export_hf_every_steps": 2}},
        "checkpoint.export_hf_every_steps=2",
    ),
    (
        {"targets": ["embedding"]},
        {"model__mtp_depths": 1},
        "adapter.targets=embedding",
    ),
    ({}, {"optimizer__kind": "muon"}, "optimizer.kind=muon"),
    ({}, {"model__backend": "te"}, "model.backend=te"),
    (
        {"base_dtype": "bf16"},
        {"train__precision": "fp16"},
        "adapter.base_dtype=bf16",
    ),
    (
        {"targets": ["experts"]},
        {"model__experts": EXPERTS, "layout__tp": 2, "layout__sp": True, "layout__etp": 2},
        "adapter.targets=experts",
    ),
    (
        {"targets": ["experts"]},
        {"model__experts": EXPERTS | {"score": "sigmoid", "expert_bias": True, "bias_update_rate": 0.1}},
        "model.experts.bias_update_rate=0.1",
    ),
    ({"targets": []}, {}, "targets"),
    ({"targets": ["wings"]}, {}, "adapter.targets"),
    (
        {"kind": "dora", "dropout": 0.1},
        {},
        "dropout=0.1",
    ),
    (
        {"kind": "dora", "targets": ["embedding", "qkv"]},
        {},
        "targets=embedding",
    ),
    (
        {"kind": "dora", "targets": ["experts"]},
        {"model__experts": EXPERTS},
        "targets=experts",
    ),
    ({"modules_to_save": ["router"]}, {}, "adapter.modules_to_save"),
    ({"modules_to_save": ["score"]}, {}, "adapter.modules_to_save=head"),
    ({"modules_to_save": ["lm_head"]}, {"model__tied_embeddings": True}, "adapter.modules_to_save=output"),
    (
        {"modules_to_save": ["lm_head"]},
        {
            "model__num_labels": 1,
            "loss": {"function": "reward_model"},
            "data": {"kind": "sft", "seq_length": 64, "train": [{"path": "pairs.jsonl"}], "tokenizer": "folder"},
        },
        "model.num_labels=1",
    ),
    ({"targets": ["qkv", "embedding"], "modules_to_save": ["embed_tokens"]}, {}, "modules_to_save=embedding"),
    ({"kind": "vera"}, {}, "adapter.kind"),
    ({"rank": 0}, {}, "adapter.rank"),
]


@pytest.mark.fault(
    "input",
    "adapters of what is not there, or together with what they cannot be combined with",
    happens="refused by the names of both keys, and what to change",
    exit_code=2,
)
@pytest.mark.parametrize(("adapter", "changes", "fact"), REFUSED, ids=[words for _, _, words in REFUSED])
def test_what_adapters_cannot_be_combined_with_is_refused(
    adapter: dict[str, Any], changes: dict[str, Any], fact: str, notice: Notice
) -> None:
    given = [f"{section}={json.dumps(value)}" for section, value in content(adapter=adapter, **changes).items()]
    with notice, refuses(ConfigError, fact):
        load_config([], given)
    assert notice.exit_code == 2


@pytest.mark.parametrize(
    "given",
    [
        "adapter.kind=qlora",
        "adapter.base_dtype=nf4",
        "model.load_in_4bit=true",
        "load_in_8bit=true",
        "adapter.quantization_config={bnb_4bit_quant_type: nf4}",
    ],
)
def test_a_base_in_4_bits_is_refused_with_the_nearest_way(given: str) -> None:
    sections = [f"{section}={json.dumps(value)}" for section, value in content(adapter={"rank": 4}).items()]
    with refuses(ConfigError, given.partition("=")[0], "MXFP4", "layout.tp", "layout.shard=weights"):
        load_config([], [*sections, given])


def test_targets_have_the_names_of_other_programs() -> None:
    def parts(*targets: str, **changes: Any) -> frozenset[str]:
        section = config(adapter={"targets": list(targets)}, **changes).adapter
        assert section is not None
        return section.parts

    assert parts("linear_qkv") == parts("qkv") >= {"q_proj", "k_proj", "v_proj"}
    assert parts("o_proj", "linear_fc1", "down_proj") == {"proj", "gate_proj", "up_proj", "fc2"}
    assert parts("kv_a_proj_with_mqa", "linear_q_up_proj", **MLA) == {"kv_a_proj", "q_b_proj"}
    assert parts("embed_tokens", "lm_head") == {"embedding", "output"}
    saved = config(adapter={"modules_to_save": ["model.embed_tokens", "embed_tokens", "lm_head"]}).adapter
    assert saved is not None
    assert saved.modules_to_save == ("embedding", "output")
    saved = config(adapter={"modules_to_save": ["model.norm", "norms"]}).adapter
    assert saved is not None
    assert saved.modules_to_save == ("norms",)


DELTA_NET: dict[str, Any] = {"num_key_heads": 2, "num_value_heads": 4, "key_head_dim": 16, "value_head_dim": 8}
ATTENTION = ("qkv", "proj")
DENSE = (*ATTENTION, "fc1", "fc2")
LINEAR: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "dense": ({}, DENSE),
    "latent": (MLA, DENSE),
    "experts alone": ({"model__experts": EXPERTS}, ATTENTION),
    "shared experts": ({"model__experts": EXPERTS | {"shared_ffn_hidden_size": 16}}, DENSE),
    "delta net": ({"model__delta_net": DELTA_NET}, (*ATTENTION, "in_proj", "out_proj", "fc1", "fc2")),
}
"""Model -> targets of all-linear."""


@pytest.mark.parametrize("name", LINEAR)
def test_all_linear_means_the_layers_that_a_model_has(name: str) -> None:
    """`tests/hf/schema/test_all_linear.py` compares with PEFT."""
    changes, wanted = LINEAR[name]

    def targets(*given: str) -> tuple[str, ...]:
        section = config(adapter={"targets": list(given)}, **changes).adapter
        assert section is not None
        return section.targets

    assert targets("all-linear") == wanted
    alone, left_out = config(adapter={"targets": "all-linear"}, **changes), config(adapter={}, **changes)
    assert alone == left_out
    assert load_config(yaml.safe_load(config_yaml(alone))) == alone, "config.yaml holds the targets themselves"
    assert set(targets("all-linear", "lm_head")) == {*wanted, "output"}
    if name == "dense":
        assert set(targets("all-linear", "qkv_proj")) == {"proj", "fc1", "fc2", "qkv_proj"}
    if name == "delta net":
        joined = targets("in_proj_qkvz", "all-linear")
        assert set(joined) == {*wanted, "in_proj_qkvz", "in_proj_b", "in_proj_a"} - {"in_proj"}
    if name == "shared experts":
        assert set(targets("all-linear", "experts")) == {*wanted, "experts"}


def test_a_pattern_of_all_linear_names_what_the_model_has() -> None:
    assert config(adapter={"rank_pattern": {"down_proj": 2}}).adapter is not None
    with refuses(ConfigError, "rank_pattern=out_proj"):
        load_config(content(adapter={"rank_pattern": {"out_proj": 2}}))
