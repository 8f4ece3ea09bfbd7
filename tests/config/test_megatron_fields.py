"""What may pass through model.megatron."""

import dataclasses
from typing import Any, get_args

import pytest
from pydantic import ValidationError

from mtrain.config import Config, megatron_fields
from tests.config.samples import config


def test_the_parsed_names_are_those_of_the_installed_class(
    transformer_config_fields: frozenset[str],
) -> None:
    assert megatron_fields.field_names() == transformer_config_fields


@pytest.fixture(scope="module")
def transformer_config_fields() -> frozenset[str]:
    from megatron.core.transformer import TransformerConfig

    return frozenset(field.name for field in dataclasses.fields(TransformerConfig) if not field.name.startswith("_"))


def test_every_refused_field_exists(transformer_config_fields: frozenset[str]) -> None:
    refused = (megatron_fields.TYPED_KNOBS, megatron_fields.OURS, megatron_fields.EXPERTS)
    assert set().union(*refused) <= transformer_config_fields
    assert sum(map(len, refused)) == len(set().union(*refused)), "a field has two answers"


def test_every_field_of_experts_and_depths_is_answered_by_name(transformer_config_fields: frozenset[str]) -> None:
    answered = megatron_fields.TYPED_KNOBS | megatron_fields.OURS | megatron_fields.EXPERTS
    assert {field for field in transformer_config_fields if field.startswith(("moe_", "mtp_"))} <= answered.keys()


def test_every_typed_knob_exists() -> None:
    for key in megatron_fields.TYPED_KNOBS.values():
        *sections, name = key.split(".")
        kind: Any = Config
        for section in sections:
            kind = kind.model_fields[section].annotation
            kind = next((each for each in get_args(kind) if each is not type(None)), kind)
        assert name in kind.model_fields, key


def test_free_fields_pass() -> None:
    given = {"deterministic_mode": True, "apply_rope_fusion": False, "microbatch_group_size_per_vp_stage": 4}
    assert config(model__megatron=given).model.megatron == given


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ("num_layers", "megatron.num_layers is set by model.num_layers; use that key instead"),
        ("tensor_model_parallel_size", "megatron.tensor_model_parallel_size is set by layout.tp"),
        ("sequence_parallel", "megatron.sequence_parallel is set by layout.sp"),
        ("bf16", "megatron.bf16 is set by train.precision"),
        ("calculate_per_token_loss", "megatron.calculate_per_token_loss is not free"),
        ("gradient_accumulation_fusion", "megatron.gradient_accumulation_fusion is not free"),
        ("finalize_model_grads_func", "megatron.finalize_model_grads_func is not free"),
        ("moe_router_topk", "megatron.moe_router_topk is set by model.experts.top_k"),
        ("moe_input_jitter_eps", "megatron.moe_input_jitter_eps is not free (noise would differ with the layout)"),
        ("moe_layer_recompute", "megatron.moe_layer_recompute is set by train.recompute"),
        ("mamba_num_heads", "megatron.mamba_num_heads belongs to a kind of layer or schedule that is not built here"),
        ("deterministic_mod", "TransformerConfig; did you mean megatron.deterministic_mode?"),
        ("sequence_paralel", "TransformerConfig; did you mean layout.sp?"),
        ("zzzzzz", "megatron.zzzzzz is not a field of megatron-core's TransformerConfig; remove it"),
        ("_cpu_offloading_context", "is not a field of megatron-core's TransformerConfig"),
    ],
)
def test_other_fields_are_refused(field: str, message: str) -> None:
    with pytest.raises(ValidationError) as error:
        config(model__megatron={field: 1})
    assert message in str(error.value)
