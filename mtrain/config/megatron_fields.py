"""Which fields of megatron-core's TransformerConfig may pass through `model.megatron`.

The names are read from the source of the installed package: importing it would load torch.
"""

import ast
import difflib
import importlib.util
from collections.abc import Collection, Iterator
from functools import cache
from pathlib import Path

_CLASSES = {
    "core/model_parallel_config.py": "ModelParallelConfig",
    "core/transformer/transformer_config.py": "TransformerConfig",
}

TYPED_KNOBS = {
    "num_layers": "model.num_layers",
    "hidden_size": "model.hidden_size",
    "ffn_hidden_size": "model.ffn_hidden_size",
    "num_attention_heads": "model.num_attention_heads",
    "num_query_groups": "model.num_query_groups",
    "kv_channels": "model.head_dim",
    "normalization": "model.norm",
    "layernorm_epsilon": "model.norm_epsilon",
    "gated_linear_unit": "model.activation",
    "activation_func": "model.activation",
    "activation_func_clamp_value": "model.activation",
    "glu_linear_offset": "model.activation",
    "layernorm_zero_centered_gamma": "model.zero_centered_norm",
    "softmax_type": "model.attention_sinks",
    "add_bias_linear": "model.linear_bias",
    "add_qkv_bias": "model.qkv_bias",
    "qk_layernorm": "model.qk_norm",
    "window_size": "model.sliding_window",
    "window_attn_skip_freq": "model.global_attention_every",
    "attention_dropout": "model.attention_dropout",
    "hidden_dropout": "model.hidden_dropout",
    "init_method_std": "model.init_std",
    "embedding_init_method_std": "model.init_std",
    "transformer_impl": "model.backend",
    "num_moe_experts": "model.experts.num_experts",
    "moe_router_topk": "model.experts.top_k",
    "moe_ffn_hidden_size": "model.experts.ffn_hidden_size",
    "moe_shared_expert_intermediate_size": "model.experts.shared_ffn_hidden_size",
    "moe_layer_freq": "model.experts.every",
    "moe_router_score_function": "model.experts.score",
    "moe_router_pre_softmax": "model.experts.pre_softmax",
    "moe_router_num_groups": "model.experts.num_groups",
    "moe_router_group_topk": "model.experts.group_top_k",
    "moe_router_topk_scaling_factor": "model.experts.scaling_factor",
    "moe_router_enable_expert_bias": "model.experts.expert_bias",
    "moe_router_bias_update_rate": "model.experts.bias_update_rate",
    "moe_token_dispatcher_type": "model.experts.dispatcher",
    "moe_grouped_gemm": "model.experts.implementation",
    "moe_use_legacy_grouped_gemm": "model.experts.implementation",
    "moe_router_topk_limited_devices": "model.experts.group_top_k",
    "moe_layer_recompute": "train.recompute",
    "moe_expert_capacity_factor": "model.experts.capacity_factor",
    "moe_z_loss_coeff": "loss.router.z_coefficient",
    "moe_aux_loss_coeff": "loss.router.sequence_balance_coefficient",
    "moe_router_load_balancing_type": "loss.router.sequence_balance_coefficient",
    "mtp_num_layers": "model.mtp_depths",
    "mtp_loss_scaling_factor": "loss.mtp_coefficient",
    "multi_latent_attention": "model.mla",
    "tensor_model_parallel_size": "layout.tp",
    "sequence_parallel": "layout.sp",
    "pipeline_model_parallel_size": "layout.pp",
    "virtual_pipeline_model_parallel_size": "layout.vpp",
    "pipeline_model_parallel_layout": "layout.stage_layers",
    "num_layers_in_first_pipeline_stage": "layout.first_stage_layers",
    "num_layers_in_last_pipeline_stage": "layout.last_stage_layers",
    "account_for_embedding_in_pipeline_split": "layout.first_stage_layers",
    "account_for_loss_in_pipeline_split": "layout.last_stage_layers",
    "context_parallel_size": "layout.cp",
    "cp_comm_type": "layout.cp_comm",
    "expert_model_parallel_size": "layout.ep",
    "expert_tensor_parallel_size": "layout.etp",
    "fp16": "train.precision",
    "bf16": "train.precision",
    "params_dtype": "train.precision",
    "pipeline_dtype": "train.precision",
    "enable_autocast": "train.precision",
    "autocast_dtype": "train.precision",
    "recompute_granularity": "train.recompute",
    "recompute_method": "train.recompute",
    "recompute_num_layers": "train.recompute",
    "recompute_modules": "train.recompute",
}
"""Field of megatron-core -> the knob that sets it."""

OURS = {
    "calculate_per_token_loss": "losses are sums here, divided once",
    "finalize_model_grads_func": "gradients are divided once, after they are summed",
    "grad_scale_func": "the optimizer scales the gradients",
    "no_sync_func": "set with train.overlap_grad_reduce",
    "grad_sync_func": "set with train.overlap_grad_reduce",
    "param_sync_func": "set with train.overlap_param_gather",
    "gradient_accumulation_fusion": "gradients are accumulated by our own finalisation",
    "cross_entropy_loss_fusion": "loss.function computes the loss",
    "cross_entropy_fusion_impl": "loss.function computes the loss",
    "timers": "not readable from a file",
    "init_method": "initial weights are drawn by global parameter name",
    "output_layer_init_method": "initial weights are drawn by global parameter name",
    "embedding_init_method": "initial weights are drawn by global parameter name",
    "perform_initialization": "initial weights are drawn by global parameter name",
    "use_cpu_initialization": "initial weights are drawn by global parameter name",
    "init_model_with_meta_device": "initial weights are drawn by global parameter name",
    "mtp_standalone": "all depths of multi-token prediction stand on the last stage",
    "softmax_scale": "computed from model.head_dim, model.query_scalar and model.rope",
    "variable_seq_lengths": "every sample has data.seq_length tokens",
    "deallocate_pipeline_outputs": "set for the schedules",
}
"""Fields that belong to this program -> why."""

EXPERTS = {
    "moe_router_dtype": "scores are computed in float32 at least",
    "moe_input_jitter_eps": "noise would differ with the layout",
    "moe_enable_routing_replay": "a choice follows from its scores",
    "moe_router_force_load_balancing": "a choice follows from its scores",
    "moe_router_fusion": "the choice of experts is computed by our own router",
    "moe_router_padding_for_fp8": "tokens of an expert are not padded for low precision",
    "moe_router_padding_for_quantization": "tokens of an expert are not padded for low precision",
    "moe_per_layer_logging": "losses of routers are logged as terms, summed over the layers",
    "moe_pad_expert_input_to_capacity": "model.experts.capacity_factor drops and never pads",
    "moe_token_drop_policy": "model.experts.capacity_factor drops the least probable",
    "moe_token_dropping": "nothing in megatron-core reads it; see model.experts.capacity_factor",
    "moe_extended_tp": "nothing in megatron-core reads it; see layout.etp",
    "moe_enable_deepep": "model.experts.dispatcher knows alltoall and allgather",
    "moe_flex_dispatcher_backend": "model.experts.dispatcher knows alltoall and allgather",
    "moe_deepep_num_sms": "model.experts.dispatcher knows alltoall and allgather",
    "moe_hybridep_num_sms": "model.experts.dispatcher knows alltoall and allgather",
    "moe_permute_fusion": "needs kernels that are not proved here",
    "moe_shared_expert_overlap": "shared experts do not run beside the transfer of tokens",
    "moe_shared_expert_gate": "shared experts without a gate are what is built",
    "moe_latent_size": "experts of the hidden size are what is built",
    "moe_apply_probs_on_input": "an expert's output is weighed, not its input",
}
"""Fields of experts that stay at their defaults -> why, or what to use."""

_NOT_BUILT = (
    "moe_",
    "experimental_attention_variant",
    "dsa_",
    "linear_",
    "is_hybrid_model",
    "mamba_",
    "heterogeneous_block_specs",
    "hybrid_context_parallel",
    "hierarchical_context_parallel_sizes",
)
"""How the fields begin of models and schedules that are not built here, and of experts that a new version may bring."""


def broken_rules(given: Collection[str]) -> Iterator[str]:
    """Yields a message for every field that may not pass through, each starting with `megatron.<field>`."""
    if not given:
        return
    known = field_names()
    for name in given:
        if name in TYPED_KNOBS:
            yield f"megatron.{name} is set by {TYPED_KNOBS[name]}; use that key instead"
        elif reason := (OURS | EXPERTS).get(name):
            yield f"megatron.{name} is not free ({reason}); remove it"
        elif name not in known:
            yield f"megatron.{name} is not a field of megatron-core's TransformerConfig; {_nearest(name, known)}"
        elif name.startswith(_NOT_BUILT):
            yield f"megatron.{name} belongs to a kind of layer or schedule that is not built here; remove it"


@cache
def field_names() -> frozenset[str]:
    """The public fields of the installed TransformerConfig, inherited ones included; parsed, not imported.

    Raises:
        ValueError: megatron-core is not installed.
    """
    folder = _package_folder()
    return frozenset(
        name
        for path, class_name in _CLASSES.items()
        for name in _annotated_names(folder / path, class_name)
        if not name.startswith("_")
    )


def _package_folder() -> Path:
    spec = importlib.util.find_spec("megatron")
    for folder in spec.submodule_search_locations or () if spec else ():
        if all((Path(folder) / path).is_file() for path in _CLASSES):
            return Path(folder)
    raise ValueError("megatron cannot be checked, since megatron-core is not installed; install it or remove the key")


def _annotated_names(path: Path, class_name: str) -> Iterator[str]:
    for node in ast.parse(path.read_bytes()).body:
        if isinstance(node, ast.ClassDef) and node.name == class_name:
            for statement in node.body:
                if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                    yield statement.target.id


def _nearest(name: str, known: frozenset[str]) -> str:
    candidates = difflib.get_close_matches(name, sorted(known | TYPED_KNOBS.keys()), n=1)
    if not candidates:
        return "remove it"
    if candidates[0] in TYPED_KNOBS:
        return f"did you mean {TYPED_KNOBS[candidates[0]]}?"
    return f"did you mean megatron.{candidates[0]}?"
