"""Faults of multi-token prediction."""

from __future__ import annotations

from mtrain.arch.layout import Layout
from mtrain.config import Config
from tests.known_issues.rows.row import KnownIssue, Place, has_field

_MODEL = "models/gpt/gpt_model.py"
_DEPTHS = "transformer/multi_token_prediction.py"
_FAULTS = "tests/known_issues/test_mtp.py"
_PARITY = "tests/parity/models/test_multi_token.py"


def _has_depths(config: Config, layout: Layout) -> bool:
    return config.model.mtp_depths > 0


def _has_depths_with_windows(config: Config, layout: Layout) -> bool:
    return config.model.mtp_depths > 0 and config.model.sliding_window is not None


ROWS = (
    KnownIssue(
        "depths divided by the tokens of the main loss",
        "In per-token mode the loss of each depth is divided by the tokens of the main loss, though fewer tokens have "
        "another one so far ahead.",
        (Place(_MODEL, "GPTModel._postprocess", "hidden_states, mtp_loss_scale * mtp_loss"),),
        "model.mtp_depths > 0",
        _has_depths,
        "fixed",
        "Each depth is a term of its own, scaled by its own planned denominator.",
        ("mtrain/core/batch/collate.py", "mtrain/core/loss/objective.py"),
        (
            f"{_FAULTS}::test_depths_are_divided_by_the_tokens_of_the_main_loss",
            f"{_PARITY}::test_depths_do_not_change_with_the_layout",
        ),
        gone_in="0.19.2",
    ),
    KnownIssue(
        "depths of a microbatch without loss tokens",
        "By default the loss of a depth is divided by its tokens in the microbatch, with nothing against 0: one "
        "microbatch without loss tokens makes the gradient of the step NaN.",
        (Place(_MODEL, "GPTModel._postprocess", "hidden_states, mtp_loss_scale * mtp_loss / num_tokens"),),
        "model.mtp_depths > 0 and a microbatch whose tokens are all masked",
        _has_depths,
        "fixed",
        "Sums are divided once for the step; a denominator of 0 makes the factor 0.",
        ("mtrain/core/loss/objective.py",),
        (
            f"{_FAULTS}::test_a_microbatch_without_loss_tokens_is_not_a_number",
            f"{_PARITY}::test_nothing_lies_so_far_ahead",
        ),
        gone_in="0.19.2",
    ),
    KnownIssue(
        "rolling over the edges of documents",
        "Packed rows are rolled between the unpadded lengths of their documents: where documents are padded, all but "
        "the first get tokens and labels of other places. Rows whose documents only the attention knows are rolled "
        "over every edge.",
        (
            Place(_DEPTHS, "_roll_tensor_packed_seq", "cu_seqlens = packed_seq_params.cu_seqlens_q"),
            Place(_DEPTHS, "roll_tensor", "rolled_tensor = torch.roll(tensor, shifts=shifts, dims=dims)"),
        ),
        "model.mtp_depths > 0 and several documents in a row",
        _has_depths,
        "fixed",
        "Tokens, labels and weights of every depth are cut from whole rows, inside each document.",
        ("mtrain/core/batch/collate.py",),
        (
            f"{_FAULTS}::test_rolling_takes_tokens_of_other_places",
            f"{_PARITY}::test_depths_do_not_change_with_the_layout",
        ),
    ),
    KnownIssue(
        "depths without a loss mask",
        "A model that is called without its loss mask, which only the depths ask for, trains them on every token, "
        "prompts and padding too.",
        (
            Place(_MODEL, "GPTModel._postprocess", "loss_mask = torch.ones_like(mtp_labels)", "0.16.1"),
            Place(_DEPTHS, "process_mtp_loss", "loss_mask = torch.ones_like(mtp_labels)", "0.19.2"),
        ),
        "model.mtp_depths > 0, where the caller masks the main loss alone",
        _has_depths,
        "fixed",
        "The weights of the depths come with the batch, from the mask of the token that each predicts.",
        ("mtrain/core/batch/collate.py",),
        (
            f"{_FAULTS}::test_without_a_mask_prompts_are_in_the_loss",
            f"{_PARITY}::test_depths_do_not_change_with_the_layout",
        ),
    ),
    KnownIssue(
        "depths weighed by the tokens of their own microbatch",
        "In per-token mode the loss of a depth is multiplied by the ratio of two counts, the main loss's and its own, "
        "of one rank's part of one microbatch: where their masks differ, so does the weight of a token.",
        (
            Place(
                _DEPTHS,
                "process_mtp_loss",
                "mtp_loss_scale * mtp_loss * (original_num_tokens / num_tokens_safe)",
            ),
        ),
        "model.mtp_depths > 0 and several microbatches, replicas or context-parallel ranks",
        _has_depths,
        "fixed",
        "Each depth is a term of its own, scaled by its own planned denominator of the whole global batch.",
        ("mtrain/core/batch/collate.py", "mtrain/core/loss/objective.py"),
        (
            f"{_FAULTS}::test_tokens_of_depths_weigh_according_to_their_microbatch",
            f"{_PARITY}::test_depths_do_not_change_with_the_layout",
        ),
        since="0.19.2",
        findings=(3,),
    ),
    KnownIssue(
        "layers of depths numbered as the first layers",
        "The layer of every depth is numbered from 1 again, so it gets the sliding window, the positions and the "
        "scaling that a pattern gives the first layers of the model, not those that go on with it.",
        (
            Place(
                "transformer/transformer_layer.py",
                "TransformerLayer.__init__",
                "if is_mtp_layer or not add_layer_offset:",
            ),
        ),
        "model.mtp_depths > 0 with windows or positions that follow a pattern of layers",
        _has_depths_with_windows,
        "fixed",
        "Depths are a module of ours and are numbered on after the last layer, under every version.",
        ("mtrain/core/layers/mtp.py",),
        (
            f"{_FAULTS}::test_layers_of_depths_are_numbered_as_the_first_ones",
            f"{_PARITY}::test_depths_do_not_change_with_the_layout",
        ),
        since="0.19.2",
    ),
    KnownIssue(
        "logged losses of depths",
        "The loss of a depth in the log is a sum of the means of microbatches, averaged over ranks: another number "
        "than what is differentiated, and one that follows the layout.",
        (
            Place(_MODEL, "GPTModel._postprocess", "torch.sum(mtp_loss) / num_tokens,", "0.16.1"),
            Place(_DEPTHS, "process_mtp_loss", ") / num_tokens.clamp(min=1)", "0.19.2"),
        ),
        "model.mtp_depths > 0 and several microbatches or ranks",
        _has_depths,
        "fixed",
        "Records have each depth's own sum over its own denominator, of the whole global batch.",
        ("mtrain/core/engine/loss_reduction.py",),
        (
            f"{_FAULTS}::test_the_logged_loss_of_a_depth_is_a_mean_of_means",
            f"{_PARITY}::test_depths_do_not_change_with_the_layout",
        ),
    ),
    KnownIssue(
        "depths with a gradient norm of their own",
        "With mtp_detach_heads the parameters of depths are left out of the gradient norm, which is reported and "
        "which the others are clipped by, and are clipped by a norm of their own.",
        (
            Place(_DEPTHS, "MultiTokenPredictionBlock.__init__", "param.grad_norm_group = 'mtp'"),
            Place(
                "optimizer/optimizer.py",
                "MegatronOptimizer.get_grads_for_grad_norm",
                "param_filter = lambda p: not _is_separate_grad_norm_group(_get_param_grad_norm_group(p))",
            ),
        ),
        "mtp_detach_heads",
        has_field("mtp_detach_heads"),
        "refused",
        "The field is refused; one norm counts every parameter once.",
        ("mtrain/config/megatron_fields.py",),
        (f"{_FAULTS}::test_detached_depths_are_missing_in_the_norm",),
        ({"mtp_detach_heads": True},),
        since="0.19.2",
    ),
    KnownIssue(
        "z-losses of a repeated depth",
        "Where one layer serves all depths, its balancing losses are divided by their number, but its z-loss only in "
        "the log: the gradient is as many times too strong.",
        (
            Place(
                "transformer/moe/router.py",
                "TopKRouter.apply_z_loss",
                "z_loss = z_loss / self.config.mtp_num_layers",
            ),
        ),
        "mtp_use_repeated_layer with experts and a z-loss",
        has_field("mtp_use_repeated_layer"),
        "refused",
        "The field is refused; each depth has a layer of its own.",
        ("mtrain/config/megatron_fields.py",),
        ("tests/known_issues/test_balance.py::test_the_z_loss_of_a_repeated_depth_is_divided_in_the_log_alone",),
        ({"mtp_use_repeated_layer": True},),
        since="0.19.2",
    ),
    KnownIssue(
        "tied embeddings with depths",
        "With a pipeline and tied embeddings the last stage also allocates an output table that nothing uses, and no "
        "checkpoint can be described: an AssertionError that names dictionary keys.",
        (
            Place(_MODEL, "GPTModel.__init__", "skip_weight_param_allocation=self.pre_process"),
            Place(
                "models/common/language_module/language_module.py",
                "LanguageModule.tie_embeddings_and_output_weights_state_dict",
                "if getattr(self, 'mtp_process', False):",
            ),
        ),
        "model.mtp_depths > 0, model.tied_embeddings=true and pp > 1",
        lambda config, layout: config.model.mtp_depths > 0 and config.model.tied_embeddings and layout.pp > 1,
        "fixed",
        "No table is made where the embeddings are.",
        ("mtrain/core/layers/language_model.py",),
        (
            f"{_FAULTS}::test_tied_embeddings_cannot_be_described",
            "tests/core/state/test_save_and_load.py::test_depths_of_multi_token_prediction_travel_between_layouts",
        ),
    ),
)
