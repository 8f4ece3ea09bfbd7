"""Faults of multi-token prediction."""

from __future__ import annotations

from mtrain.config import Config
from mtrain.plan.layout import Layout
from tests.known_issues.rows.row import KnownIssue, Place

_MODEL = "models/gpt/gpt_model.py"
_DEPTHS = "transformer/multi_token_prediction.py"
_FAULTS = "tests/known_issues/test_mtp.py"
_PARITY = "tests/parity/models/test_multi_token.py"


def _has_depths(config: Config, layout: Layout) -> bool:
    return config.model.mtp_depths > 0


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
        ("mtrain/data/collate.py", "mtrain/loss/objective.py"),
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
        ("mtrain/loss/objective.py",),
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
        ("mtrain/data/collate.py",),
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
        ("mtrain/data/collate.py",),
        (
            f"{_FAULTS}::test_without_a_mask_prompts_are_in_the_loss",
            f"{_PARITY}::test_depths_do_not_change_with_the_layout",
        ),
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
        ("mtrain/mcore/model/language_model.py",),
        (
            f"{_FAULTS}::test_tied_embeddings_cannot_be_described",
            "tests/mcore/state/test_save_and_load.py::test_depths_of_multi_token_prediction_travel_between_layouts",
        ),
    ),
)
