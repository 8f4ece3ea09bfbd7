"""Every rule: broken it is reported under its dotted key, kept it is silent."""

from typing import Any

import pytest

from mtrain.base.errors import ConfigError
from mtrain.config.load import load_config
from tests.config.samples import INDEXED, config, content
from tests.config.yaml_files import write


def messages(tmp_path: Any, **changes: Any) -> list[str]:
    with pytest.raises(ConfigError) as error:
        load_config([write(tmp_path / "config.yaml", content(**changes))], [])
    return str(error.value).splitlines()


LATENT: dict[str, Any] = {
    "model__mla": {"kv_lora_rank": 8, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 8},
}
EXPERTS = {"num_experts": 4, "top_k": 2, "ffn_hidden_size": 8}
PACKED: dict[str, Any] = {"data__isolate_documents": True, "data__packing": {}}

BROKEN: list[tuple[dict[str, Any], str]] = [
    ({"layout__sp": True}, "layout.sp=true needs tp > 1, but tp=1"),
    ({"layout__vpp": 2}, "layout.vpp=2 needs pp > 1"),
    ({"layout__first_stage_layers": 2}, "layout.first_stage_layers divides the layers over pipeline stages, but pp=1"),
    (
        {"layout": {"pp": 2, "first_stage_layers": 2, "stage_layers": [2, 6]}},
        "layout.stage_layers names the layers of every stage, but first_stage_layers or last_stage_layers is given",
    ),
    ({"layout": {"pp": 2, "stage_layers": [2, 3, 3]}}, "layout.stage_layers=[2, 3, 3] needs 2 numbers above 0"),
    ({"layout": {"pp": 2, "stage_layers": [8, 0]}}, "layout.stage_layers=[8, 0] needs 2 numbers above 0"),
    ({"layout__ep": 2}, "layout.ep=2 and layout.etp=1 need model.experts"),
    ({"layout__etp": 2}, "layout.ep=1 and layout.etp=2 need model.experts"),
    (
        {"layout__etp": 2, "model__experts": EXPERTS, "model__linear_bias": True},
        "layout.etp=2 cannot divide experts with biases",
    ),
    (
        {"model__experts": {**EXPERTS, "shared_ffn_hidden_size": 8}, "model__linear_bias": True},
        "model.experts.shared_ffn_hidden_size=8 and model.linear_bias=true",
    ),
    (
        {"model__rope": {"local_base": 100.0}},
        "model.rope.local_base=100.0 has no effect without a window",
    ),
    (
        {"model__post_norm": True, "model__sandwich_norm": True},
        "model.post_norm=true leaves norms out that sandwich_norm=true asks for; turn one of them off",
    ),
    ({"model__qk_norm_width": "full"}, "model.qk_norm_width=full has no effect without a norm; set qk_norm=true"),
    (
        {"model__qk_norm": True, "model__qk_norm_width": "full", "model__norm": "layernorm"},
        "model.qk_norm_width=full needs norm=rmsnorm, but norm=layernorm; change one of them",
    ),
    (
        {"data": {**INDEXED, "packing": {}}},
        "data.packing puts samples of different length into rows, but kind=indexed cuts running text into full rows",
    ),
    ({"data__packing": {}}, "data.packing keeps the samples of a row apart, but isolate_documents=false; set it to"),
    ({"train__tokens_per_micro_batch": 64}, "train.tokens_per_micro_batch=64 is the width of packed rows, but"),
    (
        {**PACKED, "train__tokens_per_micro_batch": 63},
        "train.tokens_per_micro_batch=63 must be at least data.seq_length=64",
    ),
    (
        {**PACKED, "train__tokens_per_micro_batch": 128, "train__micro_batch_size": 2},
        "train.tokens_per_micro_batch=128 makes one row a microbatch, but train.micro_batch_size=2",
    ),
    (
        {**PACKED, "train__tokens_per_micro_batch": 130, "layout__cp": 2},
        "train.tokens_per_micro_batch=130 must be a multiple of 4 = 2 x layout.cp",
    ),
    (
        {**PACKED, "model__backend": "te"},
        "model.backend=te lets attention cross the documents of a row, but data.packing puts several into one",
    ),
    (
        {"model__backend": "te", "train__precision": "fp32"},
        "model.backend=te is not enough for train.precision=fp32: its products of float32 are made in TF32",
    ),
    (
        {"model__backend": "te", "layout": {"tp": 2, "cp": 4, "cp_comm": "ulysses"}},
        "model.backend=te is not enough for layout.cp_comm=ulysses: it exchanges whole key/value heads, but 2 of them",
    ),
    (
        {"model__backend": "te", "train__compile": "layers"},
        "model.backend=te is not enough for train.compile=layers, which compiles our layers alone",
    ),
    (
        {"model__backend": "te", "train__offload_layers": 2},
        "model.backend=te is not enough for train.offload_layers=2, which moves what our layers keep alone",
    ),
    (
        {"train__compile": "layers", "train__offload_layers": 2},
        "train.compile=layers does not go with train.offload_layers, as graphs hide what a layer keeps",
    ),
    (
        {"optimizer__kind": "muon", "train__offload_optimizer": True},
        "train.offload_optimizer=true moves AdamW's moments, but under optimizer.kind=muon matrices have a momentum",
    ),
    (
        {"train__fp8": "hybrid", "train__offload_layers": 2},
        "train.fp8=hybrid needs TransformerEngine's layers, which train.offload_layers=2 leaves out; remove one of the",
    ),
    (
        {"model__hidden_dropout": 0.1, "train__compile": "layers"},
        "train.compile=layers does not go with model.hidden_dropout, as a compiled layer draws other numbers",
    ),
    (
        {
            "train__overlap_grad_reduce": True,
            "train__overlap_param_gather": True,
            "train__distributed_optimizer": True,
            "train__compile": "layers",
        },
        "train.compile=layers does not go with train.overlap_param_gather=true, which waits for parameters inside of",
    ),
    (
        {"layout": {"cp": 2, "cp_comm": "ring"}, "model__sliding_window": 8},
        "layout.cp_comm=ring does not know windows that end within a hop (model.sliding_window)",
    ),
    (
        {"layout": {"cp": 2, "cp_comm": "ring"}, "data__isolate_documents": True},
        "layout.cp_comm=ring does not know documents that end within a hop (data.isolate_documents)",
    ),
    (
        {"layout": {"cp": 2, "cp_comm": "ring"}, "model__attention_sinks": True},
        "layout.cp_comm=ring does not know a sink, which every hop would count (model.attention_sinks)",
    ),
    (
        {"layout": {"cp": 2, "cp_comm": "ring"}, "model__attention_dropout": 0.1},
        "layout.cp_comm=ring does not know dropout (model.attention_dropout)",
    ),
    ({"train__fp8_recipe": "mxfp8"}, "train.fp8_recipe=mxfp8 scales products in fp8, but train.fp8 is not set"),
    (
        {"train__fp8": "hybrid", "train__fp8_recipe": "delayed"},
        "train.fp8_recipe=delayed scales by the largest elements of earlier steps, which checkpoints do not hold",
    ),
    ({"train__fp8": "hybrid", "train__device": "cpu"}, "train.fp8=hybrid needs a GPU, but train.device=cpu"),
    (
        {"train__fp8": "hybrid", "model__backend": "torch"},
        "train.fp8=hybrid needs TransformerEngine's layers, but model.backend=torch",
    ),
    (
        {"train__fp8": "e4m3", "train__precision": "fp16"},
        "train.fp8=e4m3 keeps everything but products in bf16, but train.precision=fp16",
    ),
    (
        {"train__fp8": "e4m3", "train__compile": "layers"},
        "train.fp8=e4m3 needs TransformerEngine's layers, which train.compile=layers leaves out",
    ),
    (
        {"train__fp8": "e4m3", "model__ffn_hidden_size": 72},
        "train.fp8=e4m3 needs model.ffn_hidden_size / layout.tp=72 to",
    ),
    (
        {"train__fp8": "e4m3", "train__fp8_recipe": "blockwise", "data__seq_length": 64},
        "train.fp8=e4m3 needs a multiple of 128 tokens in a rank's microbatch",
    ),
    ({"data__kind": "indexed"}, "data.train is empty, but kind=indexed reads from files"),
    (
        {"data": {**INDEXED, "split": [0.9, 0.1, 0], "valid": [{"path": "v"}]}},
        "data.split already divides the train sources, but valid or test are given",
    ),
    ({"data": {**INDEXED, "split": [0.9, 0.2, 0]}}, "data.split=[0.9, 0.2, 0.0] needs three shares"),
    ({"data": {**INDEXED, "split": [1.1, -0.1, 0]}}, "data.split=[1.1, -0.1, 0.0] needs three shares"),
    ({"data": {**INDEXED, "split": [0, 0.5, 0.5]}}, "data.split=[0.0, 0.5, 0.5] needs three shares"),
    ({"data": {"kind": "sft", "seq_length": 64, "train": [{"path": "t"}]}}, "data.tokenizer is not given"),
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
        "data.isolate_documents: this is no key of data.kind=sft, but of indexed and mock",
    ),
    ({"model__mtp_depths": 1, "loss__denominator": "measured"}, "model.mtp_depths=1 adds terms that are scaled before"),
    ({"model__mtp_depths": 64}, "model.mtp_depths=64 must be below data.seq_length=64"),
    ({"loss__side_terms": {"mtp_2": {}}}, "loss.side_terms.mtp_2 takes the name of a depth of multi-token prediction"),
    ({"loss__options": {"label_smoothing": 1}}, "loss.options.label_smoothing=1 must be a number from 0 to below 1"),
    ({"loss__options": {"label_smoothing": "a lot"}}, "loss.options.label_smoothing='a lot' must be a number"),
    (
        {"loss__side_terms": {"kl": {"function": "distillation", "options": {"temperature": 0}}}},
        "loss.side_terms.kl.options.temperature=0 must be a number above 0",
    ),
    (
        {"loss__side_terms": {"kl": {"function": "distillation", "options": {"direction": "up"}}}},
        "loss.side_terms.kl.options.direction='up' must be forward or reverse",
    ),
    ({"loss__function": "mtrain.loss"}, "loss.function='mtrain.loss' is not known; choose next_token"),
    ({"loss__function": "a.b:c.d"}, "loss.function='a.b:c.d' is not known; choose next_token"),
    ({"loss__aggregation": "token-sum-norm"}, "loss.norm_length is not given, but aggregation=token-sum-norm"),
    (
        {"loss__aggregation": "seq-mean-token-sum-norm"},
        "loss.norm_length is not given, but aggregation=seq-mean-token-sum-norm",
    ),
    ({"loss__norm_length": 7}, "loss.norm_length=7 is not used by aggregation=token-mean"),
    (
        {"loss__aggregation": "seq-mean-token-power"},
        "loss.length_power is not given, but aggregation=seq-mean-token-power divides by the length to that power",
    ),
    ({"loss__length_power": 0.5}, "loss.length_power=0.5 is not used by aggregation=token-mean"),
    (
        {"loss__side_terms": {"z": {"aggregation": "token-sum-norm"}}},
        "loss.side_terms.z.norm_length is not given",
    ),
    (
        {"loss__side_terms": {"z": {}}, "loss__denominator": "measured"},
        "loss.denominator=measured is known only after the forward pass",
    ),
    ({"loss__side_terms": {"main": {}}}, "loss.side_terms.main takes the name of the main term"),
    (
        {"train__overlap_param_gather": True},
        "train.overlap_param_gather=true needs distributed_optimizer and overlap_grad_reduce, but "
        "overlap_grad_reduce is false",
    ),
    (
        {"train__overlap_param_gather": True, "train__distributed_optimizer": False},
        "train.overlap_param_gather=true needs distributed_optimizer and overlap_grad_reduce, but "
        "distributed_optimizer and overlap_grad_reduce are false",
    ),
    ({"optimizer__min_lr": 1.0}, "optimizer.min_lr=1.0 must not be above lr=0.001"),
    (
        {"optimizer__warmup_steps": 4, "optimizer__decay_steps": 4},
        "optimizer.decay_steps=4 is the step at which min_lr",
    ),
    ({"optimizer__warmup_steps": 10}, "optimizer.warmup_steps=10 must be below train.num_steps=10"),
    (
        {"optimizer": {"lr": 1, "schedule": "wsd", "warmup_steps": 6, "decay_steps": 5}},
        "optimizer.warmup_steps=6 and optimizer.decay_steps=5 do not fit",
    ),
    ({"model__rope__factor": 2}, "model.rope.factor=2.0 has no effect with scaling=none"),
    (
        {"model__rope": {"scaling": "llama3", "low_freq_factor": 4}},
        "model.rope.low_freq_factor=4.0 must be below high_freq_factor=4.0",
    ),
    ({"model__rope": {"scaling": "yarn", "beta_slow": 32}}, "model.rope.beta_slow=32.0 must be below beta_fast=32.0"),
    ({"model__hidden_size": 68}, "model.hidden_size=68 is not a multiple of num_attention_heads=8"),
    ({"model__head_dim": 7}, "model.head_dim=7 must be even"),
    ({"model__num_query_groups": 3}, "model.num_query_groups=3 must divide num_attention_heads=8"),
    (
        {"model__rope": {"scaling": "yarn", "factor": 4, "mscale": 1}},
        "model.rope.mscale=1.0 and mscale_all_dim=None have no settled meaning with scaling=yarn; set both",
    ),
    ({"model__rope": {"mscale": 1, "mscale_all_dim": 1}}, "model.rope.mscale=1.0 and mscale_all_dim=1.0 have no"),
    ({"model__rope__interleaved": True}, "model.rope.interleaved=true needs model.mla"),
    (LATENT, "model.num_query_groups=4 does not go with model.mla (keys and values of all heads come from one latent)"),
    (LATENT | {"model__qk_norm": True}, "model.qk_norm=true does not go with model.mla (its latents are normalised"),
    (LATENT | {"model__sliding_window": 7}, "model.sliding_window=7 does not go with model.mla (it sees the whole"),
    ({"model__mla": LATENT["model__mla"] | {"qk_rope_head_dim": 3}}, "model.mla.qk_rope_head_dim=3 must be even"),
    ({"model__global_attention_every": 2}, "model.global_attention_every=2 has no effect without a window"),
    (
        {"valid__at_end": True, "data": {"seq_length": 64, "train": [{"path": "t"}]}},
        "valid asks for validation, but there are no samples for it",
    ),
    (
        {"valid__at_end": True, "data": {"seq_length": 64, "train": [{"path": "t"}], "split": [0.9, 0, 0.1]}},
        "valid asks for validation, but there are no samples for it",
    ),
    ({"layout__tp": 16}, "model.num_attention_heads=8 must be a multiple of layout.tp=16"),
    ({"layout__tp": 8}, "model.num_query_groups=4 must be a multiple of layout.tp=8"),
    ({"layout__tp": 4, "model__ffn_hidden_size": 130}, "model.ffn_hidden_size=130 must be a multiple of layout.tp=4"),
    (
        {"layout": {"tp": 4, "cp": 4, "cp_comm": "ulysses"}},
        "model.num_attention_heads=8 must be a multiple of layout.tp=4 x layout.cp=4 for layout.cp_comm=ulysses",
    ),
    ({"layout__pp": 3}, "model.num_layers=8 must be a multiple of the layout.pp=3 x layout.vpp=1 stages"),
    ({"layout": {"pp": 2, "vpp": 3}}, "model.num_layers=8 must be a multiple of the layout.pp=2 x layout.vpp=3 stages"),
    ({"layout": {"pp": 2, "stage_layers": [4, 5]}}, "layout.stage_layers=[4, 5] adds up to 9, but model.num_layers=8"),
    ({"layout": {"pp": 3, "first_stage_layers": 3}}, "layout.first_stage_layers=3 and layout.last_stage_layers=None"),
    ({"layout": {"pp": 2, "first_stage_layers": 3, "last_stage_layers": 4}}, "layout.first_stage_layers=3 and layout"),
    ({"layout": {"pp": 2, "first_stage_layers": 8}}, "layout.first_stage_layers=8 and layout.last_stage_layers=None"),
    ({"layout__cp": 2, "data__seq_length": 66}, "data.seq_length=66 must be a multiple of 4 = 2 x layout.cp"),
    (
        {"layout": {"tp": 4, "sp": True}, "data__seq_length": 66},
        "data.seq_length=66 must be a multiple of 4 = layout.tp (layout.sp=true)",
    ),
    (
        {"layout": {"tp": 4, "sp": True, "cp": 2}, "data__seq_length": 72},
        "data.seq_length=72 must be a multiple of 16 = 2 x layout.cp x layout.tp (layout.sp=true)",
    ),
]

EXPERTS = {"num_experts": 4, "top_k": 2, "ffn_hidden_size": 32}
BROKEN += [
    (
        {"model__experts": EXPERTS, "loss__router": {"microbatch_balance_coefficient": 0.1}},
        "loss.router.microbatch_balance_coefficient is set, but its effect depends on the layout by definition",
    ),
    (
        {"model__experts": EXPERTS, "loss": {"router": {"z_coefficient": 0.1}, "denominator": "measured"}},
        "loss.denominator=measured is known only after the forward pass, but side terms are scaled before the backward "
        "pass (router_z)",
    ),
    ({"loss__router": {"z_coefficient": 0.1}}, "loss.router.z_coefficient is set, but the model has no experts"),
    ({"model__experts": EXPERTS | {"top_k": 5}}, "model.experts.top_k=5 must not be above num_experts=4"),
    (
        {"model__experts": EXPERTS | {"num_groups": 2}},
        "model.experts.num_groups=2 needs group_top_k, which is not given",
    ),
    ({"model__experts": EXPERTS | {"group_top_k": 1}}, "model.experts.group_top_k=1 needs num_groups"),
    ({"model__experts": EXPERTS | {"group_score_top_k": 2}}, "model.experts.group_score_top_k=2 needs num_groups"),
    (
        {"model__experts": EXPERTS | {"num_groups": 4, "group_top_k": 2, "group_score_top_k": 2}},
        "model.experts.group_score_top_k=2 experts cannot rank a group of 1",
    ),
    (
        {"model__experts": EXPERTS | {"num_groups": 2, "group_top_k": 2, "top_k": 3}},
        "model.experts.group_top_k=2 must divide top_k=3 where group_score_top_k is not given",
    ),
    ({"model__experts": EXPERTS | {"top_k": 1}}, "model.experts.top_k=1 with a softmax over the chosen experts"),
    ({"model__experts": EXPERTS, "layout__ep": 3}, "model.experts.num_experts=4 must be a multiple of layout.ep=3"),
    (
        {"model__experts": EXPERTS, "layout__etp": 3},
        "model.experts.ffn_hidden_size=32 must be a multiple of layout.etp",
    ),
    ({"model__experts": EXPERTS, "layout__tp": 2}, "model.experts with layout.tp=2 needs layout.sp=true"),
    (
        {"model__experts": EXPERTS | {"first_dense_layers": 8}},
        "model.experts.first_dense_layers=8 leaves no layer of model.num_layers=8 for experts",
    ),
    (
        {"model__experts": EXPERTS | {"capacity_factor": 1.0}},
        "model.experts.capacity_factor is set, but its effect depends on the layout by definition",
    ),
    ({"loss__side_terms": {"router_z": {}}}, "loss.side_terms.router_z takes a name of the losses of routers"),
]


@pytest.mark.parametrize(("changes", "start"), BROKEN, ids=[start.partition(" ")[0] for _, start in BROKEN])
def test_a_broken_rule_is_named(tmp_path: Any, changes: dict[str, Any], start: str) -> None:
    found = [message for message in messages(tmp_path, **changes) if message.startswith(start)]
    assert len(found) == 1
    assert ";" in found[0], "the message must say what to change"


KEPT: list[dict[str, Any]] = [
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
