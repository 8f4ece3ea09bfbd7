"""Runs that the property search found: extremes of what it draws, kept since it does not reach them every time."""

import pytest

from tests.parity.cases import case
from tests.parity.compare import TOLERANCE, at_night
from tests.parity.search import Row, Trial, judge
from tests.pool import Pool

CP2, SEQ16 = case(2, cp=2), {"data__seq_length": 16}
MEANS = {"loss__aggregation": "seq-mean-token-mean"}
Z_LOSS = "z_loss"


def rows(*weights: float) -> tuple[Row, ...]:
    """Makes eight rows of 0 to 15 loss tokens, with sample weights in turn; every other row has fractional token
    weights."""
    return tuple(
        Row(loss_tokens=5 * slot % 17, is_fractional=slot % 2 == 0, weight=weights[slot % len(weights)])
        for slot in range(8)
    )


TRIALS = {
    # 1 / D is 1e35: nothing may be clamped, and no epsilon may be added to D
    # the smallest that are not refused; below, gradients lose digits (tests/parity/objectives/test_denominators.py)
    "tiny sample weights": Trial(CP2, (rows(2e-31),), SEQ16),
    "tiny sample weights, sequence means": Trial(CP2, (rows(2e-31),), SEQ16 | MEANS),
    "huge sample weights": Trial(CP2, (rows(1e30),), SEQ16),
    "sample weights that differ by 1e12": Trial(CP2, (rows(1e6, 1e-6),), SEQ16 | MEANS),
    # the main term is divided by 1, the side term by 1e-29
    "denominators that differ by 1e29": Trial(
        case(2, dp=2),
        (rows(1e-30),),
        SEQ16
        | {
            "loss__aggregation": "sum",
            "loss__side_terms": {"z": {"function": Z_LOSS, "coefficient": 0.1, "aggregation": "token-mean"}},
        },
    ),
    "documents of two tokens across every border of chunks": Trial(
        case(2, cp=2, tp=2, sp=True),
        (tuple(Row(loss_tokens=9 + slot, edges=tuple(range(1, 16, 2))) for slot in range(8)),),
        SEQ16 | {"data__isolate_documents": True},
    ),
    # the last stage's logits come from a table that arrives only when its depth embeds tokens
    "a shared table that arrives late": Trial(
        case(2, pp=2),
        (rows(1.0), rows(1.0)),
        SEQ16
        | {
            "model__mtp_depths": 1,
            "model__tied_embeddings": True,
            "train__overlap_grad_reduce": True,
            "train__overlap_param_gather": True,
        },
    ),
    # the gradient of scores is 0, and in float32 the rounding of a difference of equal numbers
    "tokens that see themselves alone": Trial(
        CP2, (rows(1.0),), SEQ16 | {"model__sliding_window": 1, "model__qk_norm": True}
    ),
    # a norm after the only expert cancels its score, but for epsilon
    "the score of one expert under a norm": Trial(
        case(2, dp=2, ep=2),
        (rows(1.0),),
        SEQ16
        | {
            "model__sandwich_norm": True,
            "model__experts": {"num_experts": 4, "top_k": 1, "ffn_hidden_size": 8, "score": "sigmoid"},
        },
    ),
    "latents under a norm with a mean": Trial(
        case(2, tp=2),
        (rows(1.0),),
        SEQ16
        | {
            "model__norm": "layernorm",
            "model__num_query_groups": None,
            "model__mla": {
                "q_lora_rank": 7,
                "kv_lora_rank": 5,
                "qk_nope_head_dim": 4,
                "qk_rope_head_dim": 2,
                "v_head_dim": 3,
            },
        },
    ),
    "a bias of the choice with a softmax": Trial(
        case(2, dp=2, ep=2),
        (rows(1.0),),
        SEQ16
        | {
            "model__experts": {
                "num_experts": 4,
                "top_k": 2,
                "ffn_hidden_size": 8,
                "expert_bias": True,
                "bias_update_rate": 0.01,
            }
        },
    ),
    "one loss token in the row, chunks of one token": Trial(
        case(cp=4), ((Row(1, "start"), Row(1, "end"), Row(1), Row()),), {"data__seq_length": 8}
    ),
}


NIGHT = {
    "tiny sample weights, sequence means",  # the day has tiny weights, and every sequence mean (test_aggregations.py)
    "huge sample weights",  # test_denominators.py
    "documents of two tokens across every border of chunks",  # test_options.py
}


@pytest.mark.parametrize("name", [at_night(name) if name in NIGHT else name for name in TRIALS])
def test_the_law_holds(pool: Pool, name: str) -> None:
    judge(pool, TRIALS[name]).assert_holds()


def test_terms_that_cancel(pool: Pool) -> None:
    """Has 2 loss tokens / 20 - 0.1: the objective and the gradient are 0, where the loss is only rounding."""
    again = {"aggregation": "seq-mean-token-mean", "empty_sequences": "include", "coefficient": -0.1}
    changes = {
        "loss__aggregation": "seq-mean-token-sum-norm",
        "loss__norm_length": 20,
        "loss__empty_sequences": "include",
        "loss__side_terms": {"again": again},
    }
    verdict = judge(pool, Trial(case(2, pp=2, cp=2), ((Row(), Row(), Row(2, "end"), Row()),), SEQ16 | changes))
    found = verdict.deviation
    assert not verdict.wrong_sums
    assert max(found.grad_norm, found.gradient, found.weights) <= TOLERANCE
