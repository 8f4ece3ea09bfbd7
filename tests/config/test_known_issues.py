"""Options that would let a silent fault of megatron-core in are refused; faults that cannot be fixed are reported."""

from typing import Any

import pytest
from pydantic import ValidationError

from mtrain.config import known_issues
from tests.config.samples import config

HALF_PIPELINE = {"layout": {"pp": 2, "vpp": 2}}
FUSED = "gradient_accumulation_fusion"

REFUSED: list[tuple[str, Any, dict[str, Any], str]] = [
    ("rotary_interleaved", True, {}, "is read by layers of megatron-core that our own replace"),
    ("apply_query_key_layer_scaling", True, {}, "is read by layers of megatron-core that our own replace"),
    ("qk_l2_norm", True, {}, "is read by layers of megatron-core that our own replace"),
    ("mrope_section", [1, 2, 3], {}, "is read by layers of megatron-core that our own replace"),
    ("qk_clip", True, {}, "has no effect"),
    ("apply_residual_connection_post_layernorm", True, {}, "has no effect"),
    ("fp8", "hybrid", {}, "silently ignored"),
    ("fp4", "e2m1", {}, "choose train.precision"),
    ("fp32_residual_connection", True, {}, "which pipeline stages receive as train.precision"),
    ("batch_p2p_comm", True, HALF_PIPELINE, "pairs activations with gradients"),
    ("batch_p2p_comm", True, {"layout": {"pp": 4, "vpp": 2}}, "set model.megatron.overlap_p2p_comm=false as well"),
    ("overlap_p2p_comm", True, {"layout": {"pp": 2}}, "needs an interleaved schedule"),
    ("overlap_p2p_comm_warmup_flush", True, {"layout": {"pp": 2}}, "needs layout.vpp > 1"),
    ("bias_activation_fusion", True, {"model__activation": "gelu"}, "approximates activations other than swiglu"),
    ("no_rope_freq", 2, {"model__mtp_depths": 1}, "undefined for model.mtp_depths"),
    ("no_rope_freq", 3, {}, "must divide model.num_layers"),
    ("no_rope_freq", [0, 1], {}, "list a 0 or 1 for each of them"),
    (FUSED, True, {"train__compile": "layers"}, "cannot be combined with train.compile=layers, whose graphs hide"),
    (FUSED, True, {"train__offload_layers": 2}, "cannot be combined with train.offload_layers, which hides a weight"),
    (FUSED, True, {"model__backend": "te"}, "which is tested only with our layers"),
]

ALLOWED: list[tuple[str, Any, dict[str, Any]]] = [
    ("rotary_interleaved", False, {}),
    ("qk_clip", False, {}),
    ("fp8", None, {}),
    ("fp32_residual_connection", True, {"train__precision": "fp32"}),
    ("batch_p2p_comm", False, HALF_PIPELINE),
    ("overlap_p2p_comm", True, HALF_PIPELINE),
    ("overlap_p2p_comm", False, {}),
    ("overlap_p2p_comm_warmup_flush", True, HALF_PIPELINE),
    ("bias_activation_fusion", True, {}),
    ("no_rope_freq", 4, {}),
    (FUSED, True, {}),
    (FUSED, False, {"train__compile": "layers", "train__offload_layers": None}),
    ("batch_p2p_comm", True, {"layout": {"pp": 2}}),
]


@pytest.mark.parametrize(("field", "value", "others", "words"), REFUSED, ids=[row[0] for row in REFUSED])
def test_a_field_that_lets_a_fault_in_is_refused(field: str, value: Any, others: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError) as error:
        config(model__megatron={field: value}, **others)
    shown = str(value).lower() if isinstance(value, bool) else value
    lines = [line for line in str(error.value).splitlines() if f"model.megatron.{field}={shown}" in line]
    (line,) = [line for line in lines if words in line]
    assert ";" in line, "the message must say what to change"


def test_batched_transfers_pass_where_nothing_overlaps() -> None:
    fields = {"batch_p2p_comm": True, "overlap_p2p_comm": False}
    assert config(model__megatron=fields, layout={"pp": 4, "vpp": 2}).model.megatron == fields


@pytest.mark.parametrize(("field", "value", "others"), ALLOWED, ids=str)
def test_a_field_that_lets_no_fault_in_passes(field: str, value: Any, others: dict[str, Any]) -> None:
    assert config(model__megatron={field: value}, **others).model.megatron == {field: value}


@pytest.mark.parametrize(
    ("expected", "changes"),
    [
        (True, {}),
        (True, {"train__compile": "regions", "train__recompute": "full"}),
        (False, {"train__compile": "layers"}),
        (False, {"train__offload_layers": 2}),
        (False, {"model__megatron": {FUSED: False}}),
    ],
    ids=str,
)
def test_weight_gradients_are_fused_unless_a_feature_hides_them(expected: bool, changes: dict[str, Any]) -> None:
    assert config(**changes).fuses_weight_gradients is expected


def test_every_refusal_is_tested() -> None:
    reasons = [
        (field, refusal.reason + refusal.remedy) for refusal in known_issues.REFUSALS for field in refusal.fields
    ]
    assert [field for field, text in reasons if not any(row[0] == field and row[3] in text for row in REFUSED)] == []


def test_transformer_engine_is_refused_for_documents_under_context_parallelism() -> None:
    documents = {"data__isolate_documents": True, "data__kind": "indexed", "data__train": [{"path": "x"}]}
    with pytest.raises(ValidationError, match=r"model\.backend=te cuts every document of a row separately under"):
        config(model__backend="te", layout={"cp": 2}, **documents)
    config(model__backend="te", **documents)


EXPERTS = {"num_experts": 4, "top_k": 2, "ffn_hidden_size": 32}
ALLOW = {"allow_layout_dependent": True}
NOTED: list[tuple[known_issues.Note, dict[str, Any], dict[str, Any]]] = [
    (known_issues.DROPOUT, {"model__hidden_dropout": 0.1}, {"model__hidden_dropout": 0.0}),
    (known_issues.DROPOUT, {"model__attention_dropout": 0.1}, {"model__attention_dropout": 0.0}),
    (known_issues.FP8, {"train__fp8": "hybrid"}, {"train__fp8": "hybrid", "model__backend": "torch"}),
    (known_issues.CLIPPING, {"optimizer__clip_grad": 1e-4}, {"optimizer__clip_grad": 1e-3}),
    (known_issues.CLIPPING, {"optimizer__clip_grad": 1e-4}, {"optimizer__clip_grad": 0.0}),
    (
        known_issues.LAYOUT_DEPENDENT,
        {"model__experts": EXPERTS, "loss": {"router": {"global_balance_coefficient": 0.1}, **ALLOW}},
        {"model__experts": EXPERTS, "loss": {"router": {"sequence_balance_coefficient": 0.1}, **ALLOW}},
    ),
    (
        known_issues.LAYOUT_DEPENDENT,
        {"model__experts": {**EXPERTS, "capacity_factor": 1.0}, "loss": ALLOW},
        {"model__experts": EXPERTS, "loss": ALLOW},
    ),
    (known_issues.OWN_LOSS, {"loss__function": "my:loss", "layout__cp": 2}, {"loss__function": "my:loss"}),
    (known_issues.OWN_LOSS, {"loss__side_terms": {"own": {"function": "my:loss"}}, "layout__cp": 2}, {"layout__cp": 2}),
]


@pytest.mark.parametrize(("note", "given", "other"), NOTED)
def test_what_cannot_be_fixed_is_noted(note: known_issues.Note, given: dict[str, Any], other: dict[str, Any]) -> None:
    assert known_issues.notes(config(**given)) == [note.text]
    assert known_issues.notes(config(**other)) == []
    is_dependent = note in (known_issues.LAYOUT_DEPENDENT, known_issues.DROPOUT, known_issues.FP8)
    assert config(**given).is_layout_dependent == is_dependent
    assert not config(**other).is_layout_dependent
