"""Faults in what is divided by what, and in the loss itself."""

from __future__ import annotations

from mtrain.arch import padded_vocab_size
from tests.known_issues.rows.row import KnownIssue, Place, always, has_field, issue_test, spec_test

_SCHEDULES = "pipeline_parallel/schedules.py"
_CROSS_ENTROPY = "tensor_parallel/cross_entropy.py"

ROWS = (
    KnownIssue(
        "mean of means",
        "By default each microbatch is divided by its own tokens, then by the number of microbatches and ranks: the "
        "gradient depends on how the batch is split, while the logged loss does not show it.",
        (Place(_SCHEDULES, "forward_step_calc_loss", "output_tensor /= num_microbatches"),),
        "more than one microbatch or data-parallel rank, and masks",
        lambda config, layout: config.train.global_batch_size > config.train.micro_batch_size,
        "fixed",
        "Sums travel through the schedule and the gradient is divided once, by the sum of the denominators.",
        ("mtrain/core/layers/transformer_config.py", "mtrain/core/engine/finalize.py"),
        (spec_test("the_default_is_a_mean_of_means"),),
    ),
    KnownIssue(
        "two-part loss closures",
        "A closure that returns (loss, report) has its loss multiplied by cp / microbatches, in per-token mode too.",
        (Place(_SCHEDULES, "forward_step_calc_loss", "output_tensor *= cp_group_size"),),
        "always, with that form of closure",
        always,
        "fixed",
        "The three-part form is used, which per-token mode leaves alone.",
        ("mtrain/core/engine/schedule.py",),
        (
            issue_test("a_two_part_closure_is_scaled"),
            "tests/parity/layouts/test_layouts.py::test_the_layout_does_not_change_the_run",
        ),
    ),
    KnownIssue(
        "token counts in int32",
        "Token counts are added up in int32: a fractional count raises, and above 2^31 the sum wraps to a negative "
        "number, by which nothing is divided.",
        (
            Place(
                _SCHEDULES,
                "forward_backward_no_pipelining",
                'total_num_tokens = torch.zeros([], dtype=torch.int, device="cuda")',
            ),
            Place(
                _SCHEDULES,
                "forward_backward_pipelining_with_interleaving",
                'total_num_tokens = torch.zeros([], dtype=torch.int, device="cuda")',
            ),
            Place(
                _SCHEDULES,
                "forward_backward_pipelining_without_interleaving",
                'total_num_tokens = torch.zeros([], dtype=torch.int, device="cuda")',
            ),
        ),
        "weights that are not whole numbers, or more than 2^31 tokens a step",
        always,
        "fixed",
        "Denominators are float64 and never pass through megatron-core's count.",
        ("mtrain/core/engine/loss_reduction.py",),
        (issue_test("token_counts_overflow_and_denominators_do_not"),),
    ),
    KnownIssue(
        "reports that share memory with the loss",
        "The loss is divided in place, so a report that is a view of it is divided as well.",
        (
            Place(_SCHEDULES, "forward_step_calc_loss", "output_tensor /= torch.clamp(num_tokens, min=1)"),
            Place(_SCHEDULES, "forward_step_calc_loss", "output_tensor *= cp_group_size"),
        ),
        "always, with a report that is not cloned",
        always,
        "fixed",
        "Numbers for the log are copied into float64 sums before megatron-core gets the loss; the report is empty.",
        ("mtrain/core/engine/loss_reduction.py", "mtrain/core/engine/schedule.py"),
        (issue_test("a_report_that_shares_memory_changes_and_our_sums_do_not"),),
    ),
    KnownIssue(
        "counts below one",
        "The count of a microbatch is raised to at least 1, so weights that add up to less shrink the loss.",
        (Place(_SCHEDULES, "forward_step_calc_loss", "output_tensor /= torch.clamp(num_tokens, min=1)"),),
        "weights that add up to less than 1",
        always,
        "fixed",
        "Nothing is clamped and no epsilon is added: the division is by the denominator itself.",
        ("mtrain/core/engine/finalize.py",),
        (issue_test("small_weights_are_divided_by_their_own_sum"),),
    ),
    KnownIssue(
        "batches without loss tokens",
        "With 0 tokens gradients are not scaled at all: what other terms left there is applied raw.",
        (
            Place("distributed/finalize_model_grads.py", "finalize_model_grads", "if num_tokens > 0:", "0.16.1"),
            Place(
                "distributed/finalize_model_grads.py",
                "finalize_model_grads",
                "safe_num_tokens = torch.clamp(num_tokens, min=1)",
                "0.19.2",
            ),
        ),
        "a global batch whose tokens are all masked",
        always,
        "fixed",
        "Gradients become exactly 0, the update is left out and the step is recorded as empty.",
        ("mtrain/core/engine/finalize.py", "mtrain/core/step/step.py"),
        (
            issue_test("a_batch_without_tokens_leaves_no_gradient"),
            "tests/parity/objectives/test_terms.py::test_an_empty_batch_leaves_every_bit",
        ),
    ),
    KnownIssue(
        "sums of weights below one",
        "The weights of the whole batch are raised to at least 1 before gradients are divided by them, so weights that "
        "add up to less shrink the step.",
        (
            Place(
                "distributed/finalize_model_grads.py",
                "finalize_model_grads",
                "safe_num_tokens = torch.clamp(num_tokens, min=1)",
            ),
        ),
        "weights of a global batch that add up to less than 1",
        always,
        "fixed",
        "The division is by the denominator itself; megatron-core's count is not handed on.",
        ("mtrain/core/engine/finalize.py",),
        (issue_test("a_batch_that_weighs_less_than_one_is_divided_by_one"),),
        since="0.19.2",
    ),
    KnownIssue(
        "averages instead of sums over ranks",
        "By default gradients are multiplied by 1 / (dp x cp) before they are summed, or averaged in the collective.",
        (
            Place(
                "distributed/distributed_data_parallel.py",
                "DistributedDataParallel.__init__",
                "gradient_scaling_factor = 1.0",
            ),
        ),
        "dp x cp > 1",
        lambda config, layout: layout.dp * layout.cp > 1,
        "fixed",
        "Gradients are summed: the factor is 1 and averaging in the collective is off.",
        ("mtrain/core/layers/transformer_config.py",),
        (
            issue_test("gradients_are_averaged_over_ranks_and_summed_here"),
            issue_test("shards_of_a_sequence_are_divided_by_their_own_tokens"),
        ),
        findings=(9,),
    ),
    KnownIssue(
        "label smoothing under tensor parallelism",
        "Each rank smooths over its own part of the vocabulary, so loss and gradient differ from rank to rank.",
        (Place(_CROSS_ENTROPY, "_VocabParallelCrossEntropy.forward", "mean_log_probs = log_probs.mean(dim=-1)"),),
        "tp > 1 and label smoothing",
        lambda config, layout: layout.tp > 1,
        "fixed",
        "Smoothing is over the whole real vocabulary, with the sum over ranks in the same all-reduce.",
        ("mtrain/core/loss/vocab_parallel/logits.py",),
        (
            spec_test("label_smoothing_is_wrong_under_tensor_parallelism"),
            "tests/core/loss/vocab_parallel/test_vocab_parallel.py::test_losses_and_gradients_are_those_of_the_whole_vocabulary",
        ),
        findings=(1,),
    ),
    KnownIssue(
        "gathered logits with labels",
        "A model that gathers its logits still computes the loss as if they were split: it is too large by log(tp).",
        (
            Place("models/gpt/gpt_model.py", "GPTModel.__init__", "gather_output=not self.parallel_output,"),
            Place(
                "models/common/language_module/language_module.py",
                "LanguageModule.compute_language_model_loss",
                "loss = tensor_parallel.vocab_parallel_cross_entropy(",
            ),
        ),
        "tp > 1 and parallel_output=False",
        lambda config, layout: layout.tp > 1,
        "fixed",
        "Logits stay split and the loss is computed outside the model.",
        ("mtrain/core/layers/language_model.py",),
        (issue_test("gathered_logits_add_log_tp"),),
        findings=(2,),
    ),
    KnownIssue(
        "fused cross entropy in bf16",
        "The native fused cross entropy rounds its gradient to bf16, whatever the precision of the model.",
        (Place("fusions/fused_cross_entropy.py", "calculate_gradients", "grad_input = grad_input.to(torch.bfloat16)"),),
        "cross_entropy_loss_fusion with the native implementation",
        has_field("cross_entropy"),
        "refused",
        "The field is not free; the loss here returns gradients in the precision of the logits.",
        ("mtrain/config/megatron_fields.py", "mtrain/core/loss/vocab_parallel/logits.py"),
        (issue_test("the_fused_cross_entropy_rounds_to_bf16"),),
        ({"cross_entropy_loss_fusion": True}, {"cross_entropy_fusion_impl": "native"}),
    ),
    KnownIssue(
        "padded vocabulary in the softmax",
        "Columns that only pad the vocabulary take part in the softmax, and how many there are depends on tp.",
        (
            Place(
                _CROSS_ENTROPY,
                "_VocabParallelCrossEntropy.forward",
                "(target_mask, masked_target_1d, predicted_logits, sum_exp_logits, exp_logits) = (",
            ),
        ),
        "a vocabulary that is no multiple of vocab_multiple x tp",
        lambda config, layout: padded_vocab_size(config.model, layout.tp) != config.model.vocab_size,
        "fixed",
        "Padding takes part in no softmax, its gradient is exactly 0 and its rows start at 0.",
        ("mtrain/core/loss/vocab_parallel/logits.py", "mtrain/core/layers/init_weights.py"),
        (issue_test("padding_of_the_vocabulary_changes_the_loss"),),
    ),
    KnownIssue(
        "sums overflow in fp16",
        "In per-token mode sums are differentiated, and dynamic loss scaling starts above what fp16 can hold of them.",
        (Place("optimizer/grad_scaler.py", "DynamicGradScaler.__init__", "assert min_scale > 0.0"),),
        "train.precision=fp16",
        lambda config, layout: config.train.precision == "fp16",
        "fixed",
        "The objective is first multiplied by an exact power of two near 1 / D, which the one division takes out.",
        ("mtrain/core/engine/finalize.py", "mtrain/core/loss/objective.py"),
        (
            "tests/parity/layouts/test_precision.py::test_plain_sums_would_overflow_in_fp16",
            "tests/parity/layouts/test_precision.py::test_the_numerator_scale_changes_no_bit",
        ),
    ),
)
