"""Treatment of each field of megatron-core's TransformerConfig that `model.megatron` names.

Only fields that a parity test compares with the oracle may pass (PROVEN). Every other field has its reason here. The
fields are read from the source of the installed package, since importing it would load torch.
"""

import ast
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any, NamedTuple

from mtrain.base.ground import source_of
from mtrain.base.spelling import meant

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
    "attention_output_gate": "model.attention_gate",
    "linear_num_key_heads": "model.delta_net.num_key_heads",
    "linear_num_value_heads": "model.delta_net.num_value_heads",
    "linear_key_head_dim": "model.delta_net.key_head_dim",
    "linear_value_head_dim": "model.delta_net.value_head_dim",
    "linear_conv_kernel_dim": "model.delta_net.conv_kernel",
    "linear_attention_freq": "model.delta_net.full_attention_every",
    "attention_dropout": "model.attention_dropout",
    "hidden_dropout": "model.hidden_dropout",
    "init_method_std": "model.init_std",
    "embedding_init_method_std": "model.init_std",
    "transformer_impl": "model.backend",
    "num_moe_experts": "model.experts.num_experts",
    "moe_router_topk": "model.experts.top_k",
    "moe_ffn_hidden_size": "model.experts.ffn_hidden_size",
    "moe_shared_expert_intermediate_size": "model.experts.shared_ffn_hidden_size",
    "moe_shared_expert_gate": "model.experts.shared_gate",
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
    "cpu_offloading": "train.offload_layers",
    "cpu_offloading_num_layers": "train.offload_layers",
    "fine_grained_activation_offloading": "train.offload_layers",
}
"""Field of megatron-core -> the key that sets it."""

OURS = {
    "calculate_per_token_loss": "losses are sums here, divided once",
    "finalize_model_grads_func": "gradients are divided once, after they are summed",
    "grad_scale_func": "the optimizer scales the gradients",
    "moe_grad_scale_func": "the optimizer scales the gradients",
    "mtp_grad_scale_func": "the optimizer scales the gradients",
    "experimental_attention_variant_loss_scale_func": "the optimizer scales the gradients",
    "no_sync_func": "set with train.overlap_grad_reduce",
    "grad_sync_func": "set with train.overlap_grad_reduce",
    "param_sync_func": "set with train.overlap_param_gather",
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
    "moe_flex_dispatcher_num_sms": "model.experts.dispatcher knows alltoall and allgather",
    "moe_hybridep_num_blocks_permute": "model.experts.dispatcher knows alltoall and allgather",
    "moe_hybridep_num_blocks_unpermute": "model.experts.dispatcher knows alltoall and allgather",
    "moe_hybridep_num_sms_preprocessing": "model.experts.dispatcher knows alltoall and allgather",
    "moe_hybridep_pad_uneven_dispatch_inputs": "model.experts.dispatcher knows alltoall and allgather",
    "moe_ncclep_static_shape": "model.experts.dispatcher knows alltoall and allgather",
    "moe_ncclep_zero_copy": "model.experts.dispatcher knows alltoall and allgather",
    "moe_expert_rank_capacity_factor": "model.experts.capacity_factor drops tokens of an expert, not of a rank",
    "moe_router_force_biased": "a choice follows from its scores",
    "moe_router_quantile_balancing_ema": "model.experts.expert_bias and loss.router balance the experts",
    "moe_permute_fusion_into_hybridep": "needs kernels that are not proved here",
    "moe_single_grouped_weight": "model.experts.implementation names the products",
    "moe_single_grouped_bias": "model.experts.implementation names the products",
    "moe_mlp_glu_interleave_size": "gate and linear units stand one after the other",
    "moe_shared_expert_glu_interleave_size": "gate and linear units stand one after the other",
    "use_grouped_gemm_for_shared_expert": "shared experts use plain products",
    "moe_paged_stash": "train.offload_layers says what leaves the device",
    "moe_paged_stash_page_size": "train.offload_layers says what leaves the device",
    "moe_paged_stash_buffer_size_factor_cuda": "train.offload_layers says what leaves the device",
    "moe_paged_stash_buffer_size_factor_cpu": "train.offload_layers says what leaves the device",
    "moe_permute_fusion": "needs kernels that are not proved here",
    "moe_shared_expert_overlap": "shared experts do not overlap with the transfer of tokens",
    "moe_latent_size": "experts of the hidden size are what is built",
    "moe_apply_probs_on_input": "an expert's output is weighed, not its input",
}
"""Fields of experts that stay at their defaults -> why, or what to use."""

SILENT = (
    "apply_query_key_layer_scaling",
    "apply_residual_connection_post_layernorm",
    "fp4",
    "fp8",
    "mrope_section",
    "qk_clip",
    "qk_l2_norm",
    "rotary_interleaved",
)
"""Fields that megatron-core takes and silently gets wrong, refused in `mtrain/config/known_issues.py`."""

_REFUSED_FOR = {
    "needs TransformerEngine, whose layers no parity test covers": (
        "activation_offload_fraction",
        "cpu_offloading_retain_pinned_cpu_buffers",
        "delay_offload_until_cuda_graph",
        "delta_offload_bytes_across_pp_ranks",
        "fine_grained_offloading_max_inflight_offloads",
        "flash_attention_version",
        "fused_residual_rmsnorm",
        "high_priority_a2a_comm_stream",
        "overlap_dispatch_backward_with_experts_wgrad",
        "use_grouped_gemm_for_dense_mlp",
        "use_transformer_engine_op_fuser",
        "apply_rope_fusion",
        "attention_backend",
        "batch_invariant_mode",
        "cpu_offloading_activations",
        "cpu_offloading_double_buffering",
        "cpu_offloading_weights",
        "delay_wgrad_compute",
        "ep_overlap_early_attn_memory_release",
        "fused_single_qkv_rope",
        "log_max_attention_logit",
        "min_offloaded_tensor_size",
        "offload_modules",
        "overlap_moe_expert_parallel_comm",
        "tp_comm_atomic_ag",
        "tp_comm_atomic_rs",
        "tp_comm_bootstrap_backend",
        "tp_comm_bulk_dgrad",
        "tp_comm_bulk_wgrad",
        "tp_comm_overlap",
        "tp_comm_overlap_ag",
        "tp_comm_overlap_disable_fc1",
        "tp_comm_overlap_disable_qkv",
        "tp_comm_overlap_rs",
        "tp_comm_overlap_rs_dgrad",
        "tp_comm_split_ag",
        "tp_comm_split_rs",
        "use_te_activation_func",
        "use_te_rng_tracker",
    ),
    "belongs to fp8 or fp4, whose scales depend on the layout": (
        "fp8_output_proj",
        "activation_func_fp8_input_store",
        "disable_parameter_transpose_cache",
        "first_last_layers_bf16",
        "fp4_param",
        "fp4_quantizer_factory",
        "fp4_recipe",
        "fp8_amax_compute_algo",
        "fp8_amax_history_len",
        "fp8_dot_product_attention",
        "fp8_interval",
        "fp8_margin",
        "fp8_multi_head_attention",
        "fp8_param",
        "fp8_quantizer_factory",
        "fp8_recipe",
        "fp8_wgrad",
        "num_layers_at_end_in_bf16",
        "num_layers_at_start_in_bf16",
        "quant_recipe",
        "tp_only_amax_red",
        "use_kitchen",
        "use_kitchen_attention",
        "kitchen_attention_backend",
    ),
    "needs a GPU to be shown exact, and no parity test covers it": (
        "cuda_graph_modules",
        "batch_p2p_sync",
        "cuda_graph_impl",
        "cuda_graph_retain_backward_graph",
        "cuda_graph_scope",
        "cuda_graph_use_single_mempool",
        "cuda_graph_warmup_steps",
        "disable_bf16_reduced_precision_matmul",
        "enable_cuda_graph",
        "external_cuda_graph",
        "use_ring_exchange_p2p",
    ),
    "is for inference": (
        "inference_cuda_graph_scope",
        "inference_disable_triton_nvls_kernels",
        "inference_grouped_gemm_backend",
        "inference_moe_disable_fused_quant_kernels",
        "inference_moe_token_dispatcher_type",
        "moe_pad_experts_for_cuda_graph_inference",
        "nccl_all_reduce_for_prefill",
        "flash_decode",
        "inference_fuse_tp_communication",
        "inference_rng_tracker",
        "inference_sampling_seed",
        "mlp_chunks_for_prefill",
        "symmetric_ar_type",
        "use_inference_optimized_layers",
    ),
    "is read by layers of megatron-core that are replaced here, so it would have no effect": (
        "attention_softmax_in_fp32",
        "masked_softmax_fusion",
        "memory_efficient_layer_norm",
        "persist_layer_norm",
    ),
    "has no effect in megatron-core as it is used here": (
        "async_tensor_model_parallel_allreduce",
        "barrier_with_L1_time",
        "pipeline_model_parallel_comm_backend",
        "qk_clip_alpha",
        "qk_clip_threshold",
        "test_mode",
        "use_fused_weighted_squared_relu",
    ),
    "defers the gradient of the table, which our output layer makes chunk by chunk": (
        "defer_embedding_wgrad_compute",
        "wgrad_deferral_limit",
    ),
    "is no part of train.recompute, which says what is computed again": (
        "mlp_chunks_for_training",
        "distribute_saved_activations",
        "num_microbatches_with_partial_activation_checkpoints",
    ),
    "writes files outside the run folder, which holds the configuration already": ("config_logger_dir",),
    "scales weights, rates and logits by the model's width, which nothing here does": (
        "mup_attn_scale_power",
        "mup_base_head_dim",
        "mup_base_hidden_size",
        "mup_embedding_mult",
        "mup_output_mult",
        "mup_width_mult",
        "use_mup",
    ),
    "divides weights along an axis that layout does not have": (
        "expert_gtp_weight_remat_size",
        "expert_tensor_parallel_num_weight_shards",
        "gtp_weight_remat_size",
        "tensor_parallel_num_weight_shards",
    ),
    "changes the names in checkpoints": ("hetereogenous_dist_checkpoint",),
    "belongs to a kind of layer or schedule that is not built here": (
        "dsa_indexer_k_norm_epsilon",
        "dsa_indexer_k_norm_fp32",
        "dsa_indexer_rope_interleaved",
        "dsa_indexer_rotate_activation",
        "dsa_indexer_scoring_relu",
        "dsa_indexer_skip_topk_offset",
        "dsa_indexer_topk_freq",
        "dsa_kernel_backend",
        "mamba_training_ssm_states_dtype",
        "mtp_detach_heads",
        "mtp_hybrid_override_pattern",
        "mtp_use_repeated_layer",
        "dsa_indexer_head_dim",
        "dsa_indexer_loss_coeff",
        "dsa_indexer_n_heads",
        "dsa_indexer_topk",
        "dsa_indexer_use_sparse_loss",
        "experimental_attention_variant",
        "heterogeneous_block_specs",
        "hierarchical_context_parallel_sizes",
        "hybrid_context_parallel",
        "is_hybrid_model",
        "mamba_head_dim",
        "mamba_num_groups",
        "mamba_num_heads",
        "mamba_state_dim",
        "max_seqlen_per_dp_cp_rank",
        "use_mamba_mem_eff_path",
    ),
}

REFUSED = {name: reason for reason, names in _REFUSED_FOR.items() for name in names}
"""Fields that no parity test covers -> why."""


class Proven(NamedTuple):
    """A field that `tests/parity/models/` runs against the oracle, and the values it may have."""

    is_legal: Callable[[Any], bool]
    needed: str
    """Description of legal values, in words."""
    changes_the_function: bool = False
    """Whether the same weights mean another model with the field."""


def _is_count(value: object) -> bool:
    return type(value) is int and 0 < value <= _MOST


def _is_pattern(value: object) -> bool:
    return _is_count(value) or (isinstance(value, list) and {0, 1} >= set(map(_bit, value)))


def _bit(value: object) -> int:
    return value if type(value) is int else -1


_MOST = 2**31 - 1
_SWITCH = Proven(lambda value: isinstance(value, bool), "true or false")
PROVEN = {
    "batch_p2p_comm": _SWITCH,
    "bias_activation_fusion": _SWITCH,
    "bias_dropout_fusion": _SWITCH,
    "clone_scatter_output_in_embedding": _SWITCH,
    "deterministic_mode": _SWITCH,
    "fp32_residual_connection": _SWITCH,
    "gradient_accumulation_fusion": _SWITCH,
    "microbatch_group_size_per_vp_stage": Proven(_is_count, "a number above 0"),
    "no_rope_freq": Proven(_is_pattern, "a number above 0, or a list of 0 and 1", changes_the_function=True),
    "overlap_p2p_comm": _SWITCH,
    "overlap_p2p_comm_warmup_flush": _SWITCH,
}
"""The fields that pass; which of them go together is in `mtrain/config/known_issues.py`."""


def broken_rules(given: Mapping[str, Any]) -> Iterator[str]:
    """Yields a message for every field that may not pass through, each starting with `megatron.<field>`."""
    for name, value in given.items():
        if name in TYPED_KNOBS:
            yield f"megatron.{name} is set by {TYPED_KNOBS[name]}; use that key instead"
        elif reason := (OURS | EXPERTS).get(name):
            yield f"megatron.{name} cannot be set ({reason}); remove it"
        elif name in PROVEN:
            if not PROVEN[name].is_legal(value):
                yield f"megatron.{name}: {PROVEN[name].needed} is needed, but {value!r} was given; change it"
        elif name in REFUSED:
            if not is_default(name, value):
                yield f"megatron.{name} {REFUSED[name]}; remove it"
        elif name not in SILENT:
            yield f"megatron.{name} is not a field of megatron-core's TransformerConfig; {_nearest(name)}"


def is_default(name: str, value: Any) -> bool:
    """Says whether megatron-core would do the same without the field."""
    default = field_defaults().get(name, UNREADABLE)
    return type(value) is type(default) and bool(value == default)


def _nearest(name: str) -> str:
    near = meant(name, field_defaults())
    return "remove it" if near is None else f"did you mean {TYPED_KNOBS.get(near, f'megatron.{near}')}?"


_CLASSES = {
    "megatron.core.model_parallel_config": "ModelParallelConfig",
    "megatron.core.transformer.transformer_config": "TransformerConfig",
}

UNREADABLE = object()
"""Marker for a default that is no plain value, such as a member of an enumeration."""


@cache
def field_defaults() -> dict[str, Any]:
    """Returns the default of every public field, inherited ones included.

    Raises:
        ValueError: megatron-core is not installed.
    """
    return {
        name: default
        for module, class_name in _CLASSES.items()
        for name, default in _annotated(_source(module), class_name)
        if not name.startswith("_")
    }


def _source(module: str) -> str:
    source = source_of(module)
    if source is None:
        raise ValueError(
            "megatron cannot be checked, since megatron-core is not installed; install it or remove the key"
        )
    return source


def _annotated(source: str, class_name: str) -> Iterator[tuple[str, Any]]:
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef) and node.name == class_name:
            for statement in node.body:
                if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                    yield statement.target.id, _plain(statement.value)


def _plain(default: ast.expr | None) -> Any:
    if isinstance(default, ast.Call):  # field(default=...)
        default = next((keyword.value for keyword in default.keywords if keyword.arg == "default"), None)
    try:
        return UNREADABLE if default is None else ast.literal_eval(default)
    except ValueError:
        return UNREADABLE
