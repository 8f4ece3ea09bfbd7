"""Faults of balancing losses, of biases of the choice, and of the padding mask that both need."""

from __future__ import annotations

from mtrain.arch.layout import Layout
from mtrain.config import Config
from tests.known_issues.rows.row import KnownIssue, Place

_ROUTER = "transformer/moe/router.py"
_BALANCE = "mtrain/core/engine/router_balance.py"
_FAULTS = "tests/known_issues/test_balance.py::test_"
_OURS = "tests/parity/models/test_balance.py::test_"
_PARITY = f"{_OURS}balancing_does_not_change_with_the_layout"


def _has_losses(config: Config, layout: Layout) -> bool:
    return bool(config.loss.router.coefficients)


def _has_running_counts(config: Config, layout: Layout) -> bool:
    return config.loss.router.global_balance_coefficient > 0


def _moves_biases(config: Config, layout: Layout) -> bool:
    return config.model.experts is not None and config.model.experts.bias_update_rate > 0


def _counts_text(config: Config, layout: Layout) -> bool:
    return _has_losses(config, layout) or _moves_biases(config, layout)


def _cuts_masks(config: Config, layout: Layout) -> bool:
    return _counts_text(config, layout) and layout.sp and layout.pp > 1


ROWS = (
    KnownIssue(
        "auxiliary losses of experts",
        "In per-token mode they are weighted by all positions and divided by the tokens that have a loss: ten times "
        "too strong where a tenth has one.",
        (
            Place(
                _ROUTER,
                "TopKRouter.attach_and_log_load_balancing_loss",
                "num_tokens = valid_token_count if valid_token_count is not None else activation.shape[0]",
                "0.16.1",
            ),
            # what it multiplies by is the number of tokens without padding, not of tokens with a loss
            Place(
                _ROUTER,
                "TopKRouter.attach_and_log_load_balancing_loss",
                "num_local_tokens = (",
                "0.19.2",
            ),
        ),
        "losses of routers with masked tokens",
        _has_losses,
        "fixed",
        "Their sums over text enter backward with coefficient x D_main / D_k of the whole global batch, so that the "
        "one division leaves coefficient / D_k.",
        (_BALANCE, "mtrain/core/loss/router.py", "mtrain/core/step/step.py"),
        (
            f"{_FAULTS}auxiliary_losses_weigh_tokens_without_a_loss",
            _PARITY,
            f"{_OURS}the_loss_mask_changes_nothing_of_it",
        ),
    ),
    KnownIssue(
        "auxiliary losses that shrink with the layout",
        "In per-token mode the z-loss is divided by tp x cp, and the loss of sequences by the rows of a microbatch.",
        (
            Place(
                _ROUTER,
                "TopKRouter.apply_z_loss",
                "moe_z_loss_coeff = self.config.moe_z_loss_coeff / self.tp_cp_group.size()",
            ),
            Place(_ROUTER, "TopKRouter._apply_seq_aux_loss", "/ bsz"),
        ),
        "losses of routers with tp, cp or several rows",
        _has_losses,
        "fixed",
        "Each is a sum over text with a denominator of its own for the whole global batch.",
        (_BALANCE, "mtrain/core/loss/router.py", "mtrain/core/step/step.py"),
        (f"{_FAULTS}auxiliary_losses_shrink_with_ranks_and_rows", _PARITY),
        gone_in="0.19.2",
    ),
    KnownIssue(
        "running auxiliary losses",
        "The loss on running counts is divided by the number of data-parallel ranks, and by its definition a "
        "microbatch weighs according to its place in the step.",
        (Place(_ROUTER, "TopKRouter._apply_global_aux_loss", "self.ga_steps += 1"),),
        "a balancing loss on running counts",
        _has_running_counts,
        "noted",
        "It is refused unless loss.allow_layout_dependent=true; then it is the mean over tokens, and every record says "
        "that it depends on the layout.",
        (_BALANCE, "mtrain/config/rules.py", "mtrain/config/known_issues.py"),
        (
            f"{_FAULTS}running_losses_shrink_with_data_parallel_ranks_and_follow_the_order",
            f"{_OURS}what_follows_the_layout_is_what_its_name_says",
        ),
    ),
    KnownIssue(
        "masked counts of auxiliary losses",
        "Under a padding mask the tokens of a rank are counted after the counts were summed over ranks in place: every "
        "rank takes the tokens of all for its own.",
        (
            Place(
                "transformer/moe/moe_utils.py",
                "get_tokens_per_expert_and_token_count",
                "local_tokens_per_expert = routing_map.sum(dim=0)",
            ),
        ),
        "losses of routers with padding, on several ranks",
        _has_losses,
        "fixed",
        "Text is counted from the mask itself.",
        (_BALANCE,),
        (f"{_FAULTS}masked_counts_of_a_rank_are_those_of_all_ranks", _PARITY),
        findings=(10,),
    ),
    KnownIssue(
        "expert bias under a mask",
        "A mask of tokens is laid over the experts: an error, or silently wrong where both are as many.",
        (Place(_ROUTER, "TopKRouter._apply_expert_bias", "if padding_mask is not None:"),),
        "a moving bias of the choice with padding",
        _moves_biases,
        "fixed",
        "Counts are of text alone, exact over the global batch, in integers.",
        (_BALANCE,),
        (
            f"{_FAULTS}a_mask_takes_experts_away_where_it_should_take_tokens",
            f"{_OURS}counts_are_exact_and_of_text_alone",
        ),
    ),
    KnownIssue(
        "expert bias of steps that are skipped",
        "It moves when gradients are finalised, before anybody knows whether the step will be applied.",
        (
            Place(
                "distributed/finalize_model_grads.py",
                "finalize_model_grads",
                "if config.moe_router_enable_expert_bias:",
            ),
        ),
        "a moving bias of the choice",
        _moves_biases,
        "fixed",
        "It moves after a successful update: not in an empty batch, after an overflow, or where the run stops.",
        (_BALANCE, "mtrain/core/step/step.py"),
        (f"{_FAULTS}biases_move_before_the_optimizer_refuses_the_step", f"{_OURS}biases_move_with_the_weights_alone"),
    ),
    KnownIssue(
        "padding masks after the first stage",
        "Sequence parallelism cuts the padding mask on the first pipeline stage only: on all others routers get the "
        "mask of whole rows.",
        (
            Place(
                "models/gpt/gpt_model.py",
                "GPTModel._preprocess",
                "tensor_parallel.scatter_to_sequence_parallel_region(",
            ),
        ),
        "padding with sequence and pipeline parallelism",
        _cuts_masks,
        "fixed",
        "Every stage cuts its mask.",
        ("mtrain/core/layers/language_model.py",),
        (f"{_FAULTS}the_first_stage_alone_cuts_the_padding_mask", _PARITY),
    ),
    KnownIssue(
        "padding masks cut by other ranks' groups",
        "Sequence parallelism cuts the padding mask by the global tensor-parallel group, where all else of the model "
        "uses the one that it was given: if they differ, routers get the mask of other tokens.",
        (
            Place(
                "models/gpt/gpt_model.py",
                "GPTModel._preprocess",
                "padding_mask.transpose(0, 1).contiguous()",
            ),
        ),
        "padding with sequence parallelism, where process groups are given",
        lambda config, layout: _counts_text(config, layout) and layout.sp,
        "fixed",
        "The shell of the model cuts its mask by the group that it was given.",
        ("mtrain/core/layers/language_model.py",),
        (f"{_FAULTS}the_padding_mask_is_cut_by_the_global_group", _PARITY),
        findings=(5,),
    ),
    KnownIssue(
        "padding masks of layers that are not recomputed",
        "Where only the first layers of a block are recomputed, the others get no padding mask.",
        (Place("transformer/transformer_block.py", "TransformerBlock._checkpointed_forward", "rotary_pos_emb,"),),
        "padding with recompute_method=block",
        lambda config, layout: _counts_text(config, layout) and config.train.recompute == "full",
        "fixed",
        "train.recompute=full recomputes every layer of a model with experts (recompute_layers is refused), and a "
        "router without its mask stops the run.",
        ("mtrain/core/layers/transformer_config.py", _BALANCE),
        (f"{_FAULTS}layers_beyond_the_recomputed_ones_lose_the_padding_mask", _PARITY),
        gone_in="0.19.2",
    ),
)
