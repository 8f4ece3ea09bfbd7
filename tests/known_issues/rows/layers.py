"""Faults in how the model is built, drawn and passed between stages."""

from __future__ import annotations

from mtrain.config import known_issues
from tests.known_issues.rows.row import KnownIssue, Place, breaks, has_field, issue_test, spec_test

_LAYERS = "tensor_parallel/layers.py"
_DOT_PRODUCT = "transformer/dot_product_attention.py"

ROWS = (
    KnownIssue(
        "initial weights depend on the pipeline",
        "Each stage draws its weights from the start of the same sequence of random numbers, so a layer's weights "
        "depend on pp.",
        (Place(_LAYERS, "_initialize_affine_weight_cpu", "init_method(master_weight)"),),
        "pp > 1",
        lambda config, layout: layout.pp > 1,
        "fixed",
        "A weight follows from the seed, its name and its place in the whole tensor.",
        ("mtrain/core/layers/init_weights.py",),
        (spec_test("initial_weights_depend_on_the_pipeline"), issue_test("initial_weights_depend_on_no_layout_here")),
    ),
    KnownIssue(
        "initial weights depend on tp on a GPU",
        "On a GPU each tensor-parallel rank draws its own part, so the whole weight depends on tp.",
        (Place(_LAYERS, "_initialize_affine_weight_gpu", "with get_cuda_rng_tracker().fork():"),),
        "tp > 1 on GPUs",
        lambda config, layout: layout.tp > 1,
        "fixed",
        "As above; the code for GPUs is shown on CPU ranks.",
        ("mtrain/core/layers/init_weights.py",),
        (
            issue_test("initial_weights_depend_on_tp_on_a_gpu"),
            issue_test("initial_weights_depend_on_no_layout_here"),
        ),
    ),
    KnownIssue(
        "weights that are not initialised are not marked",
        "Without perform_initialization weights are not marked as split over tp, and the gradient norm leaves those of "
        "tensor-parallel rank > 0 out.",
        (
            Place(_LAYERS, "ColumnParallelLinear.__init__", "if config.perform_initialization:"),
            Place(
                _LAYERS,
                "param_is_not_tensor_parallel_duplicate",
                'if hasattr(param, "tensor_model_parallel") and param.tensor_model_parallel:',
            ),
        ),
        "tp > 1 and perform_initialization=False",
        lambda config, layout: layout.tp > 1,
        "fixed",
        "It stays on with initialisers that do nothing; the field is not free.",
        ("mtrain/core/layers/transformer_config.py", "mtrain/config/megatron_fields.py"),
        (spec_test("weights_without_their_initialisation_miss_in_the_norm"),),
        gone_in="0.19.2",
    ),
    KnownIssue(
        "batched transfers at pp = 2",
        "With virtual stages a stage exchanges with both neighbours at once; at pp = 2 they are one rank, and batched "
        "transfers pair activations with gradients.",
        (
            Place(
                "pipeline_parallel/p2p_communication.py",
                "_batched_p2p_ops",
                "reqs = torch.distributed.batch_isend_irecv(ops)",
            ),
        ),
        "vpp > 1 and pp = 2",
        lambda config, layout: layout.vpp > 1 and layout.pp == 2,
        "fixed",
        "Transfers are not batched where vpp > 1; model.megatron.batch_p2p_comm=true is refused there.",
        ("mtrain/core/layers/transformer_config.py", "mtrain/config/known_issues.py"),
        (
            spec_test("batched_transfers_pair_activations_with_gradients_at_pp_2"),
            "tests/config/test_known_issues.py::test_a_field_that_lets_a_fault_in_is_refused",
        ),
    ),
    KnownIssue(
        "outputs freed while they are sent",
        "With virtual stages whose transfers overlap, deallocate_pipeline_outputs frees an activation after its "
        "transfer was started; gloo reads it later, and the next stage gets other numbers.",
        (
            Place(
                "pipeline_parallel/schedules.py",
                "deallocate_output_tensor",
                "out.data = torch.empty((1,), device=out.device, dtype=out.dtype)",
            ),
        ),
        "vpp > 1 on CPUs",
        lambda config, layout: layout.vpp > 1,
        "fixed",
        "It is on only where a CUDA stream keeps the order; the field is not free.",
        ("mtrain/core/layers/transformer_config.py", "mtrain/config/megatron_fields.py"),
        (
            spec_test("activations_are_freed_while_they_are_being_sent"),
            "tests/core/model/test_transformer_config.py::test_outputs_are_kept_while_gloo_may_be_sending_them",
        ),
        gone_in="0.19.2",
    ),
    KnownIssue(
        "sums of tensors with gaps",
        "Of a tensor that is not contiguous, such as the gradient of a part of a concatenation, a copy is summed over "
        "tp, and the tensor itself is handed on, not summed.",
        (
            Place(
                "tensor_parallel/mappings.py",
                "_reduce",
                "torch.distributed.all_reduce(input_.contiguous(), group=group)",
            ),
        ),
        "tp > 1, and a gradient that is a view: adapter.targets with output, without sequence parallelism",
        lambda config, layout: layout.tp > 1 and config.adapter is not None and "output" in config.adapter.parts,
        "fixed",
        "The gradient that an adapter of the output layer hands to megatron-core is made contiguous.",
        ("mtrain/core/layers/adapters/linear.py",),
        (
            issue_test("sums_of_tensors_with_gaps_are_lost"),
            "tests/verify/parity/test_adapters.py::test_lora_of_everything_is_exact_on_all_axes",
        ),
        gone_in="0.19.2",
    ),
    KnownIssue(
        "norms without sequence parallelism",
        "The wrapper around torch's norms refuses sequence parallelism and does not mark its weights, whose gradients "
        "would not be summed over tp.",
        (
            Place(
                "transformer/torch_norm.py",
                "WrappedTorchNorm.__new__",
                'assert not config.sequence_parallel, f"sequence parallel not supported by torch LayerNorm"',
            ),
            Place(
                "distributed/finalize_model_grads.py",
                "_allreduce_non_tensor_model_parallel_grads",
                'elif (config.sequence_parallel and getattr(param, "sequence_parallel", False)) or (',
            ),
        ),
        "layout.sp=true",
        lambda config, layout: layout.sp,
        "fixed",
        "Norms are our own and marked.",
        ("mtrain/core/layers/norm.py",),
        (issue_test("norms_are_marked_for_sequence_parallelism"),),
    ),
    KnownIssue(
        "attention without context parallelism or packing",
        "Without TransformerEngine attention refuses context parallelism and packed rows.",
        (
            Place(_DOT_PRODUCT, "DotProductAttention.__init__", "self.config.context_parallel_size == 1"),
            Place(_DOT_PRODUCT, "DotProductAttention.forward", "assert packed_seq_params is None, ("),
        ),
        "cp > 1, or data.isolate_documents",
        lambda config, layout: layout.cp > 1 or config.data.isolate_documents,
        "fixed",
        "Core attention is our own, and keeps documents apart on every layout.",
        ("mtrain/core/layers/attention/core_attention.py",),
        (
            issue_test("attention_keeps_documents_apart_where_theirs_refuses"),
            "tests/parity/layouts/test_options.py::test_documents_that_cross_every_border_of_chunks",
        ),
    ),
    KnownIssue(
        "documents and TransformerEngine",
        "TransformerEngine's attention passes over a mask other than its causal one, so attention would cross the "
        "documents of a row.",
        (
            Place(
                "extensions/transformer_engine.py",
                "TEDotProductAttention.forward",
                "core_attn_out = super().forward(query, key, value, attention_mask, **_fa_kwargs)",
            ),
        ),
        "model.backend=te and data.isolate_documents",
        lambda config, layout: config.model.backend == "te" and config.data.isolate_documents,
        "fixed",
        "Its attention gets the ends of documents (cu_seqlens), with a certificate of `mtrain verify backend` alone; "
        "under cp > 1 it is refused. The fault itself needs a GPU to be shown.",
        (
            "mtrain/core/layers/transformer_engine.py",
            "mtrain/config/known_issues.py",
            "mtrain/core/layers/layer_spec.py",
        ),
        (
            "tests/core/transformer_engine/test_spec.py::test_layers_of_transformer_engine_have_the_parameters_of_ours",
            "tests/core/transformer_engine/test_backend.py::test_documents_are_taken_by_name_with_a_certificate_alone",
            "tests/config/test_known_issues.py::"
            "test_transformer_engine_is_refused_for_documents_under_context_parallelism",
        ),
    ),
    KnownIssue(
        "llama3 rope with fixed constants",
        "llama3 scaling takes its factor, but has 1, 4 and 8192 for the bands and the original length written in.",
        (
            Place(
                "models/common/embeddings/rotary_pos_embedding.py",
                "RotaryEmbedding._apply_scaling",
                "original_max_position_embeddings=8192,",
            ),
        ),
        "model.rope.scaling=llama3 with other constants",
        lambda config, layout: config.model.rope.scaling == "llama3",
        "fixed",
        "All of them are read from model.rope and agree with transformers bit for bit.",
        ("mtrain/core/layers/attention/rotary.py",),
        (issue_test("llama3_scaling_reads_its_constants"),),
    ),
    KnownIssue(
        "recomputed norms without TransformerEngine",
        "Selective recomputation of norms takes the absence of fp8 for fp8 and ends in a NameError.",
        (
            Place("tensor_parallel/random.py", "CheckpointWithoutOutput.__init__", "self.fp8 = fp8 is not None"),
            Place(
                "tensor_parallel/random.py",
                "CheckpointWithoutOutputFunction.forward",
                "fp8 = FP8GlobalStateManager.is_fp8_enabled()",
            ),
        ),
        "train.recompute=selective with those modules",
        lambda config, layout: config.train.recompute == "selective",
        "fixed",
        "train.recompute_modules has no norms to choose; the fields are not free.",
        ("mtrain/core/layers/transformer_config.py", "mtrain/config/megatron_fields.py"),
        (issue_test("recomputed_norms_need_transformer_engine"),),
    ),
    KnownIssue(
        "saved activations shared out by other ranks' groups",
        "Recomputation that shares out what it saves takes the global tensor-parallel group, where the rest of a layer "
        "(the case that was reported is a depth) uses the one that it was given: if they differ, an activation is put "
        "together from parts of several replicas.",
        (
            Place(
                "tensor_parallel/random.py",
                "CheckpointFunction.forward",
                "split_tensor_into_1d_equal_chunks(args[0].data, new_buffer=True)",
            ),
        ),
        "distribute_saved_activations, where process groups are given",
        has_field("distribute_saved_activations"),
        "refused",
        "The field is refused: train.recompute saves whole activations.",
        ("mtrain/config/megatron_fields.py",),
        (issue_test("shared_out_activations_mix_replicas"),),
        ({"distribute_saved_activations": True},),
        findings=(4,),
    ),
    KnownIssue(
        "attention sinks are not marked",
        "Learnable attention sinks are not marked as split over tp: the gradient norm leaves those of rank > 0 out.",
        (Place(_DOT_PRODUCT, "DotProductAttention.__init__", '"softmax_offset",'),),
        "model.attention_sinks",
        lambda config, layout: config.model.attention_sinks,
        "fixed",
        "Attention and its sinks are our own; they are marked.",
        ("mtrain/core/layers/attention/core_attention.py",),
        (
            issue_test("attention_sinks_miss_in_the_norm"),
            "tests/parity/models/test_families.py::test_families_keep_the_promise",
        ),
        findings=(8,),
    ),
    KnownIssue(
        "float32 residuals between stages",
        "A float32 residual stream is handed on as float32, but the next stage receives it into pipeline_dtype.",
        (
            Place(
                "models/common/embeddings/language_model_embedding.py",
                "LanguageModelEmbedding.forward",
                "embeddings = embeddings.float()",
            ),
            Place(
                "pipeline_parallel/p2p_communication.py", "P2PCommunicator._communicate", "dtype=config.pipeline_dtype,"
            ),
        ),
        "fp32_residual_connection in half precision",
        breaks(known_issues.RESIDUAL),
        "refused",
        "The field is refused where train.precision is not fp32.",
        ("mtrain/config/known_issues.py",),
        (issue_test("float32_residuals_do_not_fit_the_next_stage"),),
        ({"fp32_residual_connection": True},),
        gone_in="0.19.2",
    ),
    KnownIssue(
        "fields that nothing reads",
        "Some fields are accepted and then read by no layer, so the model is another one than was asked for.",
        (
            Place(
                "transformer/transformer_config.py",
                "TransformerConfig",
                "apply_residual_connection_post_layernorm: bool = False",
            ),
            Place("optimizer/qk_clip.py", "clip_qk", "def clip_qk(model, log_max_only=False) -> float:"),
        ),
        "apply_residual_connection_post_layernorm, or qk_clip without a caller of clip_qk",
        breaks(known_issues.UNREAD),
        "refused",
        "They are refused.",
        ("mtrain/config/known_issues.py",),
        (issue_test("fields_that_nothing_reads_are_refused"),),
        ({"apply_residual_connection_post_layernorm": True}, {"qk_clip": True}),
    ),
    KnownIssue(
        "fields of replaced layers",
        "Fields of norms, attention and rope take effect in megatron-core's own layers only.",
        (Place(_DOT_PRODUCT, "DotProductAttention.__init__", "if self.config.apply_query_key_layer_scaling:"),),
        "a field that a replaced layer would have read",
        breaks(known_issues.REPLACED),
        "refused",
        "They are refused, since norms, attention and rope are our own.",
        ("mtrain/config/known_issues.py",),
        (issue_test("fields_of_replaced_layers_are_refused"),),
        tuple({field: True} for field in known_issues.REPLACED.fields),
    ),
    KnownIssue(
        "fp8 and fp4 without TransformerEngine",
        "Without TransformerEngine fp8 and fp4 are passed over without a word; with it, their scales depend on the "
        "layout.",
        (Place("fp8_utils.py", "get_fp8_context", "return nullcontext()"),),
        "fp8 or fp4",
        breaks(known_issues.LOW_PRECISION),
        "refused",
        "They are refused; train.precision names what is computed in.",
        ("mtrain/config/known_issues.py",),
        (issue_test("fp8_is_passed_over_without_transformer_engine"),),
        ({"fp8": "hybrid"}, {"fp4": "e2m1"}),
    ),
    KnownIssue(
        "dropout",
        "Which numbers dropout draws depends on tp, sp, cp, pp, dp and the micro-batch size.",
        (
            Place(
                _DOT_PRODUCT,
                "DotProductAttention.__init__",
                "# Dropout. Note that for a single iteration, this layer will generate",
            ),
            Place(
                "tensor_parallel/random.py",
                "model_parallel_cuda_manual_seed",
                "tensor_model_parallel_seed = offset + tp_rank",
            ),
        ),
        "model.hidden_dropout or model.attention_dropout above 0",
        lambda config, layout: known_issues.DROPOUT.applies(config),
        "noted",
        "Allowed; the log says that the run repeats on its own layout and micro-batch size only, and every record says "
        "that it depends on the layout.",
        ("mtrain/config/known_issues.py",),
        (issue_test("dropout_depends_on_the_layout_and_is_noted"),),
    ),
)
