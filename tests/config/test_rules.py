"""Every rule: broken it is reported under its dotted key, kept it is silent."""

from typing import Any

import pytest

from mtrain.base.errors import ConfigError
from mtrain.hf.configuration import load_config
from tests.config.samples import INDEXED, config, content
from tests.config.yaml_files import write
from tests.messages import check_message


def messages(tmp_path: Any, **changes: Any) -> list[str]:
    with pytest.raises(ConfigError) as error:
        load_config([write(tmp_path / "config.yaml", content(**changes))], [])
    return str(error.value).splitlines()


LATENT: dict[str, Any] = {
    "model__mla": {"kv_lora_rank": 8, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 8},
}
WIDE = {"head_dim": 16, "num_query_groups": 2}
GLOBAL: dict[str, Any] = {
    "model__sliding_window": 7,
    "model__global_attention_every": 2,
    "model__global_attention": WIDE,
    "model__rope": {"local_base": 100.0},
}
EXPERTS = {"num_experts": 4, "top_k": 2, "ffn_hidden_size": 8}
OWN_FP8: dict[str, Any] = {"train__fp8": "e4m3", "model__backend": "torch"}
DELTA_NET: dict[str, Any] = {
    "model__delta_net": {"num_key_heads": 4, "num_value_heads": 8, "key_head_dim": 8, "value_head_dim": 8},
}
MAMBA: dict[str, Any] = {
    "model__num_layers": 4,
    "model__layer_pattern": "M*-M",
    "model__mamba": {"num_heads": 8, "head_dim": 4, "num_groups": 2, "state_dim": 8},
}
RECORDS: dict[str, Any] = {"kind": "sft", "seq_length": 64, "train": [{"path": "t"}], "tokenizer": "t"}
PACKED: dict[str, Any] = {"data__isolate_documents": True, "data__packing": {}}

TEMPERED = {"scaling": "yarn", "factor": 4.0, "attention_temperature": 0.1}
BROKEN: list[tuple[dict[str, Any], str]] = [
    ({"layout__sp": True}, "layout.sp=true"),
    ({"layout__vpp": 2}, "layout.vpp=2"),
    ({"layout__first_stage_layers": 2}, "layout.first_stage_layers"),
    (
        {"layout": {"pp": 2, "first_stage_layers": 2, "stage_layers": [2, 6]}},
        "layout.stage_layers",
    ),
    ({"layout": {"pp": 2, "stage_layers": [2, 3, 3]}}, "layout.stage_layers=[2,"),
    ({"layout": {"pp": 2, "stage_layers": [8, 0]}}, "layout.stage_layers=[8,"),
    ({"layout__ep": 2}, "layout.ep=2"),
    ({"layout__etp": 2}, "layout.ep=1"),
    (
        {"layout__etp": 2, "model__experts": EXPERTS, "model__linear_bias": True},
        "layout.etp=2",
    ),
    (
        {"model__experts": {**EXPERTS, "shared_ffn_hidden_size": 8}, "model__linear_bias": True},
        "model.experts.shared_ffn_hidden_size=8",
    ),
    ({"model__experts": {**EXPERTS, "shared_gate": True}}, "model.experts.shared_gate=true"),
    ({"model__experts": {**EXPERTS, "branch_norms": True}}, "model.experts.branch_norms=true"),
    (
        {"model__experts": {**EXPERTS, "branch_norms": True, "shared_gate": True, "shared_ffn_hidden_size": 16}},
        "model.experts.shared_gate=true",
    ),
    (
        {"model__rope": {"local_base": 100.0}},
        "model.rope.local_base=100.0",
    ),
    (
        {"model__post_norm": True, "model__sandwich_norm": True},
        "model.post_norm=true",
    ),
    ({"model__qk_norm_width": "full"}, "model.qk_norm_width=full"),
    (
        {"model__qk_norm": True, "model__qk_norm_width": "full", "model__norm": "layernorm"},
        "model.qk_norm_width=full",
    ),
    (
        {"data": {**INDEXED, "packing": {}}},
        "data.packing",
    ),
    ({"data__packing": {}}, "data.packing"),
    ({"train__tokens_per_micro_batch": 64}, "train.tokens_per_micro_batch=64"),
    (
        {**PACKED, "train__tokens_per_micro_batch": 63},
        "train.tokens_per_micro_batch=63",
    ),
    (
        {**PACKED, "train__tokens_per_micro_batch": 128, "train__micro_batch_size": 2},
        "train.tokens_per_micro_batch=128",
    ),
    (
        {**PACKED, "train__tokens_per_micro_batch": 130, "layout__cp": 2},
        "train.tokens_per_micro_batch=130",
    ),
    (
        {**PACKED, "model__backend": "te", "layout": {"cp": 2}},
        "model.backend=te",
    ),
    (
        {"model__backend": "te", "train__precision": "fp32"},
        "model.backend=te",
    ),
    (
        {"model__backend": "te", "layout": {"tp": 2, "cp": 4, "cp_comm": "ulysses"}},
        "model.backend=te",
    ),
    (
        {"model__backend": "te", "train__compile": "layers"},
        "model.backend=te",
    ),
    (
        {"model__backend": "te", "train__offload_layers": 2},
        "model.backend=te",
    ),
    (
        {"train__compile": "layers", "train__offload_layers": 2},
        "train.compile=layers",
    ),
    (
        {"train__deterministic": True, "train__compile": "layers"},
        "train.deterministic=true",
    ),
    (
        {"train__deterministic": True, "model__megatron": {"deterministic_mode": False}},
        "train.deterministic=true",
    ),
    (
        {"optimizer__kind": "muon", "train__offload_optimizer": True},
        "train.offload_optimizer=true",
    ),
    (
        {"train__fp8": "hybrid", "train__offload_layers": 2},
        "train.fp8=hybrid",
    ),
    (
        {"model__hidden_dropout": 0.1, "train__compile": "layers"},
        "train.compile=layers",
    ),
    (
        {
            "train__overlap_grad_reduce": True,
            "train__overlap_param_gather": True,
            "train__distributed_optimizer": True,
            "train__compile": "layers",
        },
        "train.compile=layers",
    ),
    (
        {"layout": {"cp": 2, "cp_comm": "ring"}, "model__sliding_window": 8},
        "layout.cp_comm=ring",
    ),
    (
        {"layout": {"cp": 2, "cp_comm": "ring"}, "data__isolate_documents": True},
        "layout.cp_comm=ring",
    ),
    (
        {"layout": {"cp": 2, "cp_comm": "ring"}, "model__attention_sinks": True},
        "layout.cp_comm=ring",
    ),
    (
        {"layout": {"cp": 2, "cp_comm": "ring"}, "model__attention_dropout": 0.1},
        "layout.cp_comm=ring",
    ),
    (
        {"model__experts": {**EXPERTS, "implementation": "te"}, "model__backend": "torch"},
        "model.experts.implementation=te",
    ),
    (
        {"train__fp8": "e4m3", "model__experts": {**EXPERTS, "implementation": "te", "ffn_hidden_size": 24}},
        "train.fp8=e4m3",
    ),
    (
        {"train__fp8": "e4m3", **LATENT, "model__num_query_groups": None},
        "train.fp8=e4m3",
    ),
    ({"train__fp8_recipe": "mxfp8"}, "train.fp8_recipe=mxfp8"),
    (
        {"train__fp8": "hybrid", "train__fp8_recipe": "delayed"},
        "train.fp8_recipe=delayed",
    ),
    ({"train__fp8": "hybrid", "train__device": "cpu"}, "train.fp8=hybrid"),
    ({"train__fp8": "hybrid", "train__fp8_recipe": "rowwise"}, "train.fp8_recipe=rowwise"),
    ({**OWN_FP8, "train__fp8_recipe": "tensorwise"}, "train.fp8_recipe=tensorwise"),
    ({**OWN_FP8, "train__fp8_recipe": "mxfp8"}, "train.fp8_recipe=mxfp8"),
    ({**OWN_FP8, "train__fp8_recipe": "blockwise", "model__ffn_hidden_size": 192}, "train.fp8=e4m3"),
    ({**OWN_FP8, "model__ffn_hidden_size": 72}, "train.fp8=e4m3"),
    ({**OWN_FP8, "train__precision": "fp16"}, "train.fp8=e4m3"),
    ({**OWN_FP8, "train__compile": "layers"}, "train.fp8=e4m3"),
    ({**OWN_FP8, "adapter": {"rank": 4}}, "train.fp8=e4m3"),
    ({**OWN_FP8, **DELTA_NET}, "train.fp8=e4m3"),
    ({**OWN_FP8, **MAMBA}, "train.fp8=e4m3"),
    ({**OWN_FP8, **GLOBAL}, "train.fp8=e4m3"),
    (
        {"train__fp8": "e4m3", "train__precision": "fp16"},
        "train.fp8=e4m3",
    ),
    (
        {"train__fp8": "e4m3", "train__compile": "layers"},
        "train.fp8=e4m3",
    ),
    (
        {"train__fp8": "e4m3", "model__ffn_hidden_size": 72},
        "train.fp8=e4m3",
    ),
    (
        {"train__fp8": "e4m3", "train__fp8_recipe": "blockwise", "data__seq_length": 64},
        "train.fp8=e4m3",
    ),
    ({"data__kind": "indexed"}, "data.train"),
    (
        {"data": {**INDEXED, "split": [0.9, 0.1, 0], "valid": [{"path": "v"}]}},
        "data.split",
    ),
    ({"data": {**INDEXED, "split": [0.9, 0.2, 0]}}, "data.split=[0.9,"),
    ({"data": {**INDEXED, "split": [1.1, -0.1, 0]}}, "data.split=[1.1,"),
    ({"data": {**INDEXED, "split": [0, 0.5, 0.5]}}, "data.split=[0.0,"),
    ({"data": {"kind": "sft", "seq_length": 64, "train": [{"path": "t"}]}}, "data.tokenizer"),
    ({"train__num_epochs": 2}, "train.num_epochs=2"),
    ({"train": {"global_batch_size": 8}}, "train.num_steps:"),
    ({"optimizer__warmup_ratio": 0.1, "optimizer__warmup_steps": 1}, "optimizer.warmup_ratio=0.1"),
    ({"data": {**RECORDS, "columns": {"a": "prompt", "b": "prompt"}}}, "data.columns"),
    ({"data": {**RECORDS, "chat_template_kwargs": {"tools": []}}}, "data.chat_template_kwargs"),
    (
        {
            "data": {
                "kind": "sft",
                "seq_length": 64,
                "train": [{"path": "t"}],
                "tokenizer": "m",
                "isolate_documents": 1,
            }
        },
        "data.isolate_documents:",
    ),
    ({"model__mtp_depths": 1, "loss__denominator": "measured"}, "model.mtp_depths=1"),
    ({"model__mtp_depths": 64}, "model.mtp_depths=64"),
    ({"loss__side_terms": {"mtp_2": {}}}, "loss.side_terms.mtp_2"),
    ({"loss__options": {"label_smoothing": 1}}, "loss.options.label_smoothing=1"),
    ({"loss__options": {"label_smoothing": "a lot"}}, "loss.options.label_smoothing='a"),
    (
        {"loss__side_terms": {"kl": {"function": "distillation", "options": {"temperature": 0}}}},
        "loss.side_terms.kl.options.temperature=0",
    ),
    (
        {"loss__side_terms": {"kl": {"function": "distillation", "options": {"direction": "up"}}}},
        "loss.side_terms.kl.options.direction='up'",
    ),
    ({"loss__function": "mtrain.loss"}, "loss.function='mtrain.loss'"),
    ({"loss__function": "a.b:c.d"}, "loss.function='a.b:c.d'"),
    ({"loss__aggregation": "token-sum-norm"}, "loss.norm_length"),
    (
        {"loss__aggregation": "seq-mean-token-sum-norm"},
        "loss.norm_length",
    ),
    ({"loss__norm_length": 7}, "loss.norm_length=7"),
    (
        {"loss__aggregation": "seq-mean-token-power"},
        "loss.length_power",
    ),
    ({"loss__length_power": 0.5}, "loss.length_power=0.5"),
    (
        {"loss__side_terms": {"z": {"aggregation": "token-sum-norm"}}},
        "loss.side_terms.z.norm_length",
    ),
    (
        {"loss__side_terms": {"z": {}}, "loss__denominator": "measured"},
        "loss.denominator=measured",
    ),
    ({"loss__side_terms": {"main": {}}}, "loss.side_terms.main"),
    (
        {"train__overlap_param_gather": True},
        "train.overlap_param_gather=true",
    ),
    (
        {"train__overlap_param_gather": True, "train__distributed_optimizer": False},
        "train.overlap_param_gather=true",
    ),
    ({"optimizer__min_lr": 1.0}, "optimizer.min_lr=1.0"),
    (
        {"optimizer__warmup_steps": 4, "optimizer__decay_steps": 4},
        "optimizer.decay_steps=4",
    ),
    ({"optimizer__warmup_steps": 10}, "optimizer.warmup_steps=10"),
    (
        {"optimizer": {"lr": 1, "schedule": "wsd", "warmup_steps": 6, "decay_steps": 5}},
        "optimizer.warmup_steps=6",
    ),
    ({"model__rope__factor": 2}, "model.rope.factor=2.0"),
    (
        {"model__rope": {"scaling": "llama3", "low_freq_factor": 4}},
        "model.rope.low_freq_factor=4.0",
    ),
    ({"model__rope": {"scaling": "yarn", "beta_slow": 33}}, "model.rope.beta_slow=33.0"),
    ({"model__hidden_size": 68}, "model.hidden_size=68"),
    ({"model__head_dim": 7}, "model.head_dim=7"),
    ({"model__num_query_groups": 3}, "model.num_query_groups=3"),
    (
        {"model__rope": {"scaling": "yarn", "factor": 4, "mscale": 1}},
        "model.rope.mscale=1.0",
    ),
    ({"model__rope": {"mscale": 1, "mscale_all_dim": 1}}, "model.rope.mscale=1.0"),
    ({"model__rope__interleaved": True}, "model.rope.interleaved=true"),
    ({"model__rope__partial": 0.2}, "model.rope.partial=0.2"),
    (
        {
            "model__rope": {"partial": 0.5, "scaling": "yarn", "factor": 4, "local_base": 100.0},
            "model__sliding_window": 4,
            "model__global_attention_every": 2,
        },
        "model.rope.partial=0.5",
    ),
    ({"model__rope__partial": 0.5, **LATENT}, "model.rope.partial=0.5"),
    ({"model__rope__attention_temperature": 0.1}, "model.rope.attention_temperature=0.1"),
    ({"model__rope": TEMPERED | {"local_base": 100.0}}, "model.rope.attention_temperature=0.1"),
    ({"model__rope": TEMPERED, **LATENT}, "model.rope.attention_temperature=0.1"),
    ({"model__rope": TEMPERED, "model__qk_norm": True, "model__qk_norm_width": "full"}, "model.qk_norm_width=full"),
    (LATENT, "model.num_query_groups=4"),
    (LATENT | {"model__qk_norm": True}, "model.qk_norm=true"),
    (LATENT | {"model__sliding_window": 7}, "model.sliding_window=7"),
    ({"model__mla": LATENT["model__mla"] | {"qk_rope_head_dim": 3}}, "model.mla.qk_rope_head_dim=3"),
    ({"model__global_attention_every": 2}, "model.global_attention_every=2"),
    ({"model__delta_net": DELTA_NET["model__delta_net"] | {"num_key_heads": 3}}, "model.delta_net.num_key_heads=3"),
    ({"adapter": {"targets": ["in_proj", "out_proj"]}}, "adapter.targets=in_proj,"),
    ({"adapter": {"targets": ["in_proj_zxbcdt"]}, **DELTA_NET}, "adapter.targets=in_proj_zxbcdt"),
    (MAMBA | {"model__mamba": MAMBA["model__mamba"] | {"num_groups": 3}}, "model.mamba.num_groups=3"),
    (MAMBA | {"model__layer_pattern": None}, "model.mamba"),
    (MAMBA | {"model__layer_pattern": "M*-X"}, "model.layer_pattern=M*-X"),
    (MAMBA | {"model__layer_pattern": "M*-"}, "model.layer_pattern=M*-"),
    (MAMBA | {"model__layer_pattern": "M*-E"}, "model.layer_pattern=M*-E"),
    (MAMBA | {"model__layer_pattern": "-*-*"}, "model.layer_pattern=-*-*"),
    (
        MAMBA | {"model__layer_pattern": "M*-E", "model__experts": EXPERTS | {"every": 2}},
        "model.layer_pattern=M*-E",
    ),
    (MAMBA | {"model__mtp_depths": 1}, "model.layer_pattern=M*-M"),
    (MAMBA | {"layout": {"tp": 4, "sp": True}}, "model.mamba.num_groups=2"),
    (DELTA_NET | {"model__sliding_window": 7}, "model.delta_net"),
    (DELTA_NET | LATENT | {"model__num_query_groups": None}, "model.delta_net"),
    (DELTA_NET | {"model__mtp_depths": 1, "model__num_layers": 6}, "model.mtp_depths=1"),
    (LATENT | {"model__num_query_groups": None, "model__attention_gate": True}, "model.attention_gate=true"),
    ({"model__layer_scalar": True}, "model.layer_scalar=true"),
    ({"model__value_norm": True, "model__norm": "layernorm"}, "model.value_norm=true"),
    ({"model__value_norm": True, "model__qk_norm": True, "model__qk_norm_width": "full"}, "model.value_norm=true"),
    ({"model__global_attention": WIDE}, "model.global_attention"),
    (GLOBAL | {"model__rope": {}}, "model.global_attention"),
    (
        GLOBAL | {"model__global_attention": {**WIDE, "num_query_groups": 3}},
        "model.global_attention.num_query_groups=3",
    ),
    (GLOBAL | {"model__global_attention": {**WIDE, "head_dim": 7}}, "model.global_attention.head_dim=7"),
    (GLOBAL | {"model__attention_sinks": True}, "model.attention_sinks=true"),
    (GLOBAL | {"model__mtp_depths": 1}, "model.mtp_depths=1"),
    (
        {"model__attention_gate": True, "model__qk_norm": True, "model__qk_norm_width": "full"},
        "model.attention_gate=true",
    ),
    (
        {"valid__at_end": True, "data": {"seq_length": 64, "train": [{"path": "t"}]}},
        "valid",
    ),
    (
        {"valid__at_end": True, "data": {"seq_length": 64, "train": [{"path": "t"}], "split": [0.9, 0, 0.1]}},
        "valid",
    ),
    ({"layout__tp": 16}, "model.num_attention_heads=8"),
    ({"layout__tp": 8}, "model.num_query_groups=4"),
    (DELTA_NET | {"layout__tp": 8, "model__num_query_groups": 8}, "model.delta_net.num_key_heads=4"),
    ({"layout__tp": 4, "model__ffn_hidden_size": 130}, "model.ffn_hidden_size=130"),
    (
        {"layout": {"tp": 4, "cp": 4, "cp_comm": "ulysses"}},
        "model.num_attention_heads=8",
    ),
    ({"layout__pp": 3}, "model.num_layers=8"),
    ({"layout": {"pp": 2, "vpp": 3}}, "model.num_layers=8"),
    ({"layout": {"pp": 2, "stage_layers": [4, 5]}}, "layout.stage_layers=[4,"),
    ({"layout": {"pp": 3, "first_stage_layers": 3}}, "layout.first_stage_layers=3"),
    ({"layout": {"pp": 2, "first_stage_layers": 3, "last_stage_layers": 4}}, "layout.first_stage_layers=3"),
    ({"layout": {"pp": 2, "first_stage_layers": 8}}, "layout.first_stage_layers=8"),
    ({"layout__cp": 2, "data__seq_length": 66}, "data.seq_length=66"),
    (
        {"layout": {"tp": 4, "sp": True}, "data__seq_length": 66},
        "data.seq_length=66",
    ),
    (
        {"layout": {"tp": 4, "sp": True, "cp": 2}, "data__seq_length": 72},
        "data.seq_length=72",
    ),
]

EXPERTS = {"num_experts": 4, "top_k": 2, "ffn_hidden_size": 32}
BROKEN += [
    (
        {"model__experts": EXPERTS, "loss__router": {"microbatch_balance_coefficient": 0.1}},
        "loss.router.microbatch_balance_coefficient",
    ),
    (
        {"model__experts": EXPERTS, "loss": {"router": {"z_coefficient": 0.1}, "denominator": "measured"}},
        "loss.denominator=measured",
    ),
    ({"loss__router": {"z_coefficient": 0.1}}, "loss.router.z_coefficient"),
    ({"model__experts": EXPERTS | {"top_k": 5}}, "model.experts.top_k=5"),
    (
        {"model__experts": EXPERTS | {"num_groups": 2}},
        "model.experts.num_groups=2",
    ),
    ({"model__experts": EXPERTS | {"group_top_k": 1}}, "model.experts.group_top_k=1"),
    ({"model__experts": EXPERTS | {"group_score_top_k": 2}}, "model.experts.group_score_top_k=2"),
    (
        {"model__experts": EXPERTS | {"num_groups": 4, "group_top_k": 2, "group_score_top_k": 2}},
        "model.experts.group_score_top_k=2",
    ),
    (
        {"model__experts": EXPERTS | {"num_groups": 2, "group_top_k": 2, "top_k": 3}},
        "model.experts.group_top_k=2",
    ),
    ({"model__experts": EXPERTS | {"top_k": 1}}, "model.experts.top_k=1"),
    ({"model__experts": EXPERTS, "layout__ep": 3}, "model.experts.num_experts=4"),
    (
        {"model__experts": EXPERTS, "layout__etp": 3},
        "model.experts.ffn_hidden_size=32",
    ),
    ({"model__experts": EXPERTS, "layout__tp": 2}, "model.experts"),
    (
        {"model__experts": EXPERTS | {"first_dense_layers": 8}},
        "model.experts.first_dense_layers=8",
    ),
    (
        {"model__experts": EXPERTS | {"capacity_factor": 1.0}},
        "model.experts.capacity_factor",
    ),
    ({"loss__side_terms": {"router_z": {}}}, "loss.side_terms.router_z"),
]


@pytest.mark.parametrize(("changes", "fact"), BROKEN, ids=[fact for _, fact in BROKEN])
def test_a_broken_rule_is_named(tmp_path: Any, changes: dict[str, Any], fact: str) -> None:
    found = [message for message in messages(tmp_path, **changes) if message.startswith(f"{fact} ")]
    assert found
    for message in found:
        check_message(message)
        assert ";" in message, "the message must say what to change"


KEPT: list[dict[str, Any]] = [
    {"layout__shard": "weights"},
    {"layout": {"tp": 4, "sp": True, "cp": 8, "pp": 2, "vpp": 2}},
    {"layout": {"tp": 2, "cp": 4, "cp_comm": "ulysses"}},
    {"layout": {"tp": 2, "cp": 4, "cp_comm": "ring"}},
    {"layout": {"pp": 2, "stage_layers": [3, 5]}},
    {"layout": {"pp": 2, "first_stage_layers": 3, "last_stage_layers": 5}},
    {"layout": {"pp": 2, "last_stage_layers": 5}},
    {"layout": {"pp": 3, "vpp": 2, "first_stage_layers": 2, "last_stage_layers": 2}},
    {"loss": {"aggregation": "token-sum-norm", "norm_length": 64}},
    {"loss": {"side_terms": {"z": {"function": "my_losses:z_loss", "options": {"a": 1}, "coefficient": 0.1}}}},
    {"loss__denominator": "measured"},
    {"train": {"global_batch_size": 16, "num_steps": 10, "overlap_grad_reduce": True, "overlap_param_gather": True}},
    {"optimizer": {"lr": 1, "schedule": "wsd", "warmup_steps": 6, "decay_steps": 4}},
    {"optimizer": {"lr": 1, "min_lr": 1, "warmup_steps": 9}},
    {"data": {"seq_length": 64, "train": [{"path": "t"}], "split": [0.9, 0.1, 0]}, "valid__at_start": True},
    {"data": {"seq_length": 64, "train": [{"path": "t"}], "valid": [{"path": "v"}]}, "valid__interval_steps": 3},
    {"model__rope": {"scaling": "yarn", "factor": 4}, "model__sliding_window": 9, "model__global_attention_every": 2},
]


@pytest.mark.parametrize("changes", KEPT, ids=str)
def test_a_legal_configuration_passes(changes: dict[str, Any]) -> None:
    parsed = config(**changes)
    assert parsed == config(**changes)
    assert parsed != config()


def test_all_broken_rules_of_all_sections_are_reported_at_once(tmp_path: Any) -> None:
    found = messages(
        tmp_path, layout={"sp": True, "vpp": 2}, optimizer={"lr": 1e-3, "min_lr": 1}, train__num_steps=-1, model__tp=2
    )
    starts = ["layout.sp=true", "layout.vpp=2", "optimizer.min_lr=1.0", "train.num_steps: ", "model.tp: "]
    assert sorted(found) == sorted(line for start in starts for line in found if line.startswith(start))
    assert len(found) == len(starts)


def test_all_broken_rules_across_sections_are_reported_at_once(tmp_path: Any) -> None:
    found = messages(tmp_path, layout={"tp": 16, "pp": 3, "cp": 5}, optimizer__warmup_steps=99)
    keys = ["optimizer.warmup_steps", "model.num_attention_heads", "model.num_query_groups", "model.num_layers"]
    assert [line.partition("=")[0] for line in found] == [*keys, "data.seq_length"]


@pytest.mark.parametrize("value", [0, -5, True, False, "off", "12", 1.5, None, [64]], ids=repr)
def test_chunks_are_auto_whole_or_a_number(tmp_path: Any, value: object) -> None:
    (message,) = messages(tmp_path, loss__chunk_tokens=value)
    assert message.startswith("loss.chunk_tokens: ")
    assert "was given" in message
    assert "change it" in message
