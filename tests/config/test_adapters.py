"""Combinations that adapters exclude: every refusal by its message; other programs' names of targets."""

from __future__ import annotations

import json
from typing import Any

import pytest

from mtrain.base.errors import ConfigError
from mtrain.config.load import load_config
from tests.config.samples import config, content
from tests.fault_table import Notice

EXPERTS: dict[str, Any] = {"num_experts": 4, "top_k": 2, "ffn_hidden_size": 16}
LATENT = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 10}
MLA: dict[str, Any] = {"model__mla": LATENT, "model__num_query_groups": None}


REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"targets": ["k_proj"]}, MLA, "adapter.targets=k_proj: the attention of this model has no such projection; name"),
    ({"targets": ["q_proj"]}, MLA, "name kv_a_proj, kv_b_proj, q_a_proj, q_b_proj, or qkv for all of them"),
    ({"targets": ["q_a_proj"]}, {}, "adapter.targets=q_a_proj: the attention of this model has no such projection"),
    ({"targets": ["qkv"], "dropout": 0.1}, MLA, "adapter.dropout=0.1 cannot be had with kv_b_proj"),
    ({"targets": ["gate_proj"]}, {"model__activation": "gelu"}, "adapter.targets=gate_proj needs a gate"),
    ({"targets": ["experts"]}, {}, "adapter.targets=experts needs model.experts; remove it"),
    (
        {"targets": ["fc1", "down_proj"]},
        {"model__experts": EXPERTS},
        "targets=fc1, fc2: every layer has experts",
    ),
    (
        {"targets": ["qkv", "output"]},
        {"model__tied_embeddings": True},
        "adapter.targets=output: with model.tied_embeddings=true the output layer has no table of its own; remove it",
    ),
    (
        {"targets": ["embedding"]},
        {"model__tied_embeddings": True, "checkpoint": {"interval_steps": 2, "export_hf_every_steps": 2}},
        "checkpoint.export_hf_every_steps=2 writes merged models, but with adapter.targets=embedding",
    ),
    (
        {"targets": ["embedding"]},
        {"model__mtp_depths": 1},
        "adapter.targets=embedding with model.mtp_depths=1: the depths read the table on the last stage",
    ),
    ({}, {"optimizer__kind": "muon"}, "adapter with optimizer.kind=muon would orthogonalize A and B apart"),
    ({}, {"model__backend": "te"}, "adapter needs the inputs of projections, which model.backend=te fuses"),
    (
        {"base_dtype": "bf16"},
        {"train__precision": "fp16"},
        "adapter.base_dtype=bf16 holds the frozen model",
    ),
    (
        {"targets": ["experts"]},
        {"model__experts": EXPERTS, "layout__tp": 2, "layout__sp": True, "layout__etp": 2},
        "adapter.targets=experts cannot be divided over layout.etp=2",
    ),
    (
        {"targets": ["experts"]},
        {"model__experts": EXPERTS | {"score": "sigmoid", "expert_bias": True, "bias_update_rate": 0.1}},
        "model.experts.bias_update_rate=0.1 moves a part of the frozen model",
    ),
    ({"targets": []}, {}, "targets is empty, so that nothing would learn"),
    ({"targets": ["wings"]}, {}, "adapter.targets"),
    (
        {"kind": "dora", "dropout": 0.1},
        {},
        "dropout=0.1 with kind=dora would have to drop inputs",
    ),
    (
        {"kind": "dora", "targets": ["embedding", "qkv"]},
        {},
        "targets=embedding cannot have kind=dora, for which PEFT has no form (experts)",
    ),
    (
        {"kind": "dora", "targets": ["experts"]},
        {"model__experts": EXPERTS},
        "targets=experts cannot have kind=dora, for which PEFT has no form (experts)",
    ),
    ({"kind": "vera"}, {}, "adapter.kind"),
    ({"rank": 0}, {}, "adapter.rank"),
]


@pytest.mark.fault(
    "input",
    "adapters of what is not there, or together with what they cannot be combined with",
    happens="refused by the names of both keys, and what to change",
    exit_code=2,
)
@pytest.mark.parametrize(("adapter", "changes", "words"), REFUSED, ids=[words for _, _, words in REFUSED])
def test_what_adapters_cannot_be_combined_with_is_refused(
    adapter: dict[str, Any], changes: dict[str, Any], words: str, notice: Notice
) -> None:
    given = [f"{section}={json.dumps(value)}" for section, value in content(adapter=adapter, **changes).items()]
    with notice, pytest.raises(ConfigError) as caught:
        load_config([], given)
    assert words in str(caught.value)
    assert notice.exit_code == 2


def test_targets_have_the_names_of_other_programs() -> None:
    def parts(*targets: str, **changes: Any) -> frozenset[str]:
        section = config(adapter={"targets": list(targets)}, **changes).adapter
        assert section is not None
        return section.parts

    assert parts("linear_qkv") == parts("qkv") >= {"q_proj", "k_proj", "v_proj"}
    assert parts("o_proj", "linear_fc1", "down_proj") == {"proj", "gate_proj", "up_proj", "fc2"}
    assert parts("kv_a_proj_with_mqa", "linear_q_up_proj", **MLA) == {"kv_a_proj", "q_b_proj"}
    assert parts("embed_tokens", "lm_head") == {"embedding", "output"}
