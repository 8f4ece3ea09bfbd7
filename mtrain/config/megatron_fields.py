# ruff: noqa: SIM905 - many names read better as words than as strings
"""Treatment of each field of megatron-core's TransformerConfig that `model.megatron` names.

Only fields that a parity test compares with the oracle may pass (PROVEN); every other field has its reason here. Fields
are read from the source of the installed package, because importing it would load torch.
"""

import ast
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any, NamedTuple

from mtrain.base.ground import source_of
from mtrain.base.spelling import meant


def by_name(table: Mapping[str, str]) -> dict[str, str]:
    """Inverts a table of value -> names, which whitespace separates."""
    return {name: value for value, names in table.items() for name in names.split()}


TYPED_KNOBS = by_name(
    {
        "model.num_layers": "num_layers",
        "model.hidden_size": "hidden_size",
        "model.ffn_hidden_size": "ffn_hidden_size",
        "model.num_attention_heads": "num_attention_heads",
        "model.num_query_groups": "num_query_groups",
        "model.head_dim": "kv_channels",
        "model.norm": "normalization",
        "model.norm_epsilon": "layernorm_epsilon",
        "model.activation": "gated_linear_unit activation_func activation_func_clamp_value glu_linear_offset",
        "model.zero_centered_norm": "layernorm_zero_centered_gamma",
        "model.attention_sinks": "softmax_type",
        "model.linear_bias": "add_bias_linear",
        "model.qkv_bias": "add_qkv_bias",
        "model.qk_norm": "qk_layernorm",
        "model.sliding_window": "window_size",
        "model.global_attention_every": "window_attn_skip_freq",
        "model.attention_gate": "attention_output_gate",
        "model.delta_net.num_key_heads": "linear_num_key_heads",
        "model.delta_net.num_value_heads": "linear_num_value_heads",
        "model.delta_net.key_head_dim": "linear_key_head_dim",
        "model.delta_net.value_head_dim": "linear_value_head_dim",
        "model.delta_net.conv_kernel": "linear_conv_kernel_dim",
        "model.delta_net.full_attention_every": "linear_attention_freq",
        "model.attention_dropout": "attention_dropout",
        "model.hidden_dropout": "hidden_dropout",
        "model.init_std": "init_method_std embedding_init_method_std",
        "model.backend": "transformer_impl",
        "model.experts.num_experts": "num_moe_experts",
        "model.experts.top_k": "moe_router_topk",
        "model.experts.ffn_hidden_size": "moe_ffn_hidden_size",
        "model.experts.shared_ffn_hidden_size": "moe_shared_expert_intermediate_size",
        "model.experts.shared_gate": "moe_shared_expert_gate",
        "model.experts.every": "moe_layer_freq",
        "model.experts.score": "moe_router_score_function",
        "model.experts.pre_softmax": "moe_router_pre_softmax",
        "model.experts.num_groups": "moe_router_num_groups",
        "model.experts.group_top_k": "moe_router_group_topk moe_router_topk_limited_devices",
        "model.experts.scaling_factor": "moe_router_topk_scaling_factor",
        "model.experts.expert_bias": "moe_router_enable_expert_bias",
        "model.experts.bias_update_rate": "moe_router_bias_update_rate",
        "model.experts.dispatcher": "moe_token_dispatcher_type",
        "model.experts.implementation": "moe_grouped_gemm moe_use_legacy_grouped_gemm",
        "train.recompute": """
            moe_layer_recompute recompute_granularity recompute_method recompute_num_layers recompute_modules
        """,
        "model.experts.capacity_factor": "moe_expert_capacity_factor",
        "loss.router.z_coefficient": "moe_z_loss_coeff",
        "loss.router.sequence_balance_coefficient": "moe_aux_loss_coeff moe_router_load_balancing_type",
        "model.mtp_depths": "mtp_num_layers",
        "loss.mtp_coefficient": "mtp_loss_scaling_factor",
        "model.mla": "multi_latent_attention",
        "layout.tp": "tensor_model_parallel_size",
        "layout.sp": "sequence_parallel",
        "layout.pp": "pipeline_model_parallel_size",
        "layout.vpp": "virtual_pipeline_model_parallel_size",
        "layout.stage_layers": "pipeline_model_parallel_layout",
        "layout.first_stage_layers": "num_layers_in_first_pipeline_stage account_for_embedding_in_pipeline_split",
        "layout.last_stage_layers": "num_layers_in_last_pipeline_stage account_for_loss_in_pipeline_split",
        "layout.cp": "context_parallel_size",
        "layout.cp_comm": "cp_comm_type",
        "layout.ep": "expert_model_parallel_size",
        "layout.etp": "expert_tensor_parallel_size",
        "train.precision": "fp16 bf16 params_dtype pipeline_dtype enable_autocast autocast_dtype",
        "train.offload_layers": "cpu_offloading cpu_offloading_num_layers fine_grained_activation_offloading",
    }
)
"""Field of megatron-core -> our key."""

OURS = by_name(
    {
        "losses are sums here, divided once": "calculate_per_token_loss",
        "gradients are divided once, after they are summed": "finalize_model_grads_func",
        "the optimizer scales the gradients": """
            grad_scale_func moe_grad_scale_func mtp_grad_scale_func experimental_attention_variant_loss_scale_func
        """,
        "set with train.overlap_grad_reduce": "no_sync_func grad_sync_func",
        "set with train.overlap_param_gather": "param_sync_func",
        "loss.function computes the loss": "cross_entropy_loss_fusion cross_entropy_fusion_impl",
        "not readable from a file": "timers",
        "initial weights are drawn by global parameter name": """
            init_method output_layer_init_method embedding_init_method perform_initialization use_cpu_initialization
            init_model_with_meta_device
        """,
        "all depths of multi-token prediction stand on the last stage": "mtp_standalone",
        "computed from model.head_dim, model.query_scalar and model.rope": "softmax_scale",
        "every sample has data.seq_length tokens": "variable_seq_lengths",
        "set for the schedules": "deallocate_pipeline_outputs",
    }
)
"""Fields that this program sets -> why."""

EXPERTS = by_name(
    {
        "scores are computed in float32 at least": "moe_router_dtype",
        "noise would differ with the layout": "moe_input_jitter_eps",
        "a choice follows from its scores": """
            moe_enable_routing_replay moe_router_force_load_balancing moe_router_force_biased
        """,
        "the choice of experts is computed by our own router": "moe_router_fusion",
        "tokens of an expert are not padded for low precision": """
            moe_router_padding_for_fp8 moe_router_padding_for_quantization
        """,
        "losses of routers are logged as terms, summed over the layers": "moe_per_layer_logging",
        "model.experts.capacity_factor drops and never pads": "moe_pad_expert_input_to_capacity",
        "model.experts.capacity_factor drops the least probable": "moe_token_drop_policy",
        "nothing in megatron-core reads it; see model.experts.capacity_factor": "moe_token_dropping",
        "nothing in megatron-core reads it; see layout.etp": "moe_extended_tp",
        "model.experts.dispatcher knows alltoall and allgather": """
            moe_enable_deepep moe_flex_dispatcher_backend moe_deepep_num_sms moe_hybridep_num_sms
            moe_flex_dispatcher_num_sms moe_hybridep_num_blocks_permute moe_hybridep_num_blocks_unpermute
            moe_hybridep_num_sms_preprocessing moe_hybridep_pad_uneven_dispatch_inputs moe_ncclep_static_shape
            moe_ncclep_zero_copy
        """,
        "model.experts.capacity_factor drops tokens of an expert, not of a rank": "moe_expert_rank_capacity_factor",
        "model.experts.expert_bias and loss.router balance the experts": "moe_router_quantile_balancing_ema",
        "needs kernels that are not proved here": "moe_permute_fusion_into_hybridep moe_permute_fusion",
        "model.experts.implementation names the products": "moe_single_grouped_weight moe_single_grouped_bias",
        "gate and linear units stand one after the other": """
            moe_mlp_glu_interleave_size moe_shared_expert_glu_interleave_size
        """,
        "shared experts use plain products": "use_grouped_gemm_for_shared_expert",
        "train.offload_layers says what leaves the device": """
            moe_paged_stash moe_paged_stash_page_size moe_paged_stash_buffer_size_factor_cuda
            moe_paged_stash_buffer_size_factor_cpu
        """,
        "shared experts do not overlap with the transfer of tokens": "moe_shared_expert_overlap",
        "experts of the hidden size are what is built": "moe_latent_size",
        "an expert's output is weighed, not its input": "moe_apply_probs_on_input",
    }
)
"""Fields of experts that stay at their defaults -> why, or what to use."""

SILENT = tuple(
    """
    apply_query_key_layer_scaling apply_residual_connection_post_layernorm fp4 fp8 mrope_section qk_clip qk_l2_norm
    rotary_interleaved
    """.split()
)
"""Fields that megatron-core accepts and silently gets wrong, refused in `mtrain/config/known_issues.py`."""

REFUSED = by_name(
    {
        "needs TransformerEngine, whose layers no parity test covers": """
            activation_offload_fraction cpu_offloading_retain_pinned_cpu_buffers delay_offload_until_cuda_graph
            delta_offload_bytes_across_pp_ranks fine_grained_offloading_max_inflight_offloads
            flash_attention_version fused_residual_rmsnorm high_priority_a2a_comm_stream
            overlap_dispatch_backward_with_experts_wgrad use_grouped_gemm_for_dense_mlp
            use_transformer_engine_op_fuser apply_rope_fusion attention_backend batch_invariant_mode
            cpu_offloading_activations cpu_offloading_double_buffering cpu_offloading_weights delay_wgrad_compute
            ep_overlap_early_attn_memory_release fused_single_qkv_rope log_max_attention_logit
            min_offloaded_tensor_size offload_modules overlap_moe_expert_parallel_comm tp_comm_atomic_ag
            tp_comm_atomic_rs tp_comm_bootstrap_backend tp_comm_bulk_dgrad tp_comm_bulk_wgrad tp_comm_overlap
            tp_comm_overlap_ag tp_comm_overlap_disable_fc1 tp_comm_overlap_disable_qkv tp_comm_overlap_rs
            tp_comm_overlap_rs_dgrad tp_comm_split_ag tp_comm_split_rs use_te_activation_func use_te_rng_tracker
        """,
        "belongs to fp8 or fp4, whose scales depend on the layout": """
            fp8_output_proj activation_func_fp8_input_store disable_parameter_transpose_cache first_last_layers_bf16
            fp4_param fp4_quantizer_factory fp4_recipe fp8_amax_compute_algo fp8_amax_history_len
            fp8_dot_product_attention fp8_interval fp8_margin fp8_multi_head_attention fp8_param
            fp8_quantizer_factory fp8_recipe fp8_wgrad num_layers_at_end_in_bf16 num_layers_at_start_in_bf16
            quant_recipe tp_only_amax_red use_kitchen use_kitchen_attention kitchen_attention_backend
        """,
        "needs a GPU to be shown exact, and no parity test covers it": """
            cuda_graph_modules batch_p2p_sync cuda_graph_impl cuda_graph_retain_backward_graph cuda_graph_scope
            cuda_graph_use_single_mempool cuda_graph_warmup_steps disable_bf16_reduced_precision_matmul
            enable_cuda_graph external_cuda_graph use_ring_exchange_p2p
        """,
        "is for inference": """
            inference_cuda_graph_scope inference_disable_triton_nvls_kernels inference_grouped_gemm_backend
            inference_moe_disable_fused_quant_kernels inference_moe_token_dispatcher_type
            moe_pad_experts_for_cuda_graph_inference nccl_all_reduce_for_prefill flash_decode
            inference_fuse_tp_communication inference_rng_tracker inference_sampling_seed mlp_chunks_for_prefill
            symmetric_ar_type use_inference_optimized_layers
        """,
        "is read by layers of megatron-core that are replaced here, so it would have no effect": """
            attention_softmax_in_fp32 masked_softmax_fusion memory_efficient_layer_norm persist_layer_norm
        """,
        "has no effect in megatron-core as it is used here": """
            async_tensor_model_parallel_allreduce barrier_with_L1_time pipeline_model_parallel_comm_backend
            qk_clip_alpha qk_clip_threshold test_mode use_fused_weighted_squared_relu
        """,
        "defers the gradient of the table, which our output layer makes chunk by chunk": """
            defer_embedding_wgrad_compute wgrad_deferral_limit
        """,
        "is no part of train.recompute, which says what is computed again": """
            mlp_chunks_for_training distribute_saved_activations
            num_microbatches_with_partial_activation_checkpoints
        """,
        "writes files outside the run folder, which holds the configuration already": "config_logger_dir",
        "scales weights, rates and logits by the model's width, which nothing here does": """
            mup_attn_scale_power mup_base_head_dim mup_base_hidden_size mup_embedding_mult mup_output_mult
            mup_width_mult use_mup
        """,
        "divides weights along an axis that layout does not have": """
            expert_gtp_weight_remat_size expert_tensor_parallel_num_weight_shards gtp_weight_remat_size
            tensor_parallel_num_weight_shards
        """,
        "changes the names in checkpoints": "hetereogenous_dist_checkpoint",
        "belongs to a kind of layer or schedule that is not built here": """
            dsa_indexer_k_norm_epsilon dsa_indexer_k_norm_fp32 dsa_indexer_rope_interleaved
            dsa_indexer_rotate_activation dsa_indexer_scoring_relu dsa_indexer_skip_topk_offset
            dsa_indexer_topk_freq dsa_kernel_backend mamba_training_ssm_states_dtype mtp_detach_heads
            mtp_hybrid_override_pattern mtp_use_repeated_layer dsa_indexer_head_dim dsa_indexer_loss_coeff
            dsa_indexer_n_heads dsa_indexer_topk dsa_indexer_use_sparse_loss experimental_attention_variant
            heterogeneous_block_specs hierarchical_context_parallel_sizes hybrid_context_parallel is_hybrid_model
            mamba_head_dim mamba_num_groups mamba_num_heads mamba_state_dim max_seqlen_per_dp_cp_rank
            use_mamba_mem_eff_path
        """,
    }
)
"""Fields without a parity test -> why."""


class Proven(NamedTuple):
    """A field that `tests/parity/models/` compares with the oracle, and its legal values."""

    is_legal: Callable[[Any], bool]
    needed: str
    """Legal values in words."""
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
"""Fields that pass; `mtrain/config/known_issues.py` says which go together."""


def broken_rules(given: Mapping[str, Any]) -> Iterator[str]:
    """Yields a message for every field that may not pass, starting with `megatron.<field>`."""
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
"""Marker for a default that is not a plain value, such as a member of an enumeration."""


@cache
def field_defaults() -> dict[str, Any]:
    """Returns the default of every public field, including inherited ones.

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
