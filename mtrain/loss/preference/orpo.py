"""Odds ratio preference optimization."""

import math

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from mtrain.loss.preference.scores import PreferenceValue, ScoredSequences, preference_loss


@preference_loss(needs_reference=False)
def orpo_loss(sequences: ScoredSequences, beta: float = 0.1, nll_coefficient: float = 1.0) -> PreferenceValue:
    """Computes the chosen answer's negative log-likelihood plus -log sigmoid of the log odds ratio of each pair.

    Scores are means over an answer's tokens, and so are both summands. No reference model is needed.

    Args:
        sequences: Chosen and rejected sequences, in pairs.
        beta: Weight of the odds ratio, the paper's lambda.
        nll_coefficient: Weight of the likelihood, 1 in the paper. Set it to 0 to have the likelihood as a side term
            with its own aggregation, such as `{function: next_token, aggregation: token-mean}`: side terms see chosen
            answers only.

    Source: Hong, Lee and Thorne 2024, equations 4 to 7.
    """
    pairs = sequences.pairs()
    chosen, rejected = pairs.chosen.scores, pairs.rejected.scores
    log_odds = (chosen - _log_of_rest(chosen)) - (rejected - _log_of_rest(rejected))
    losses = -nll_coefficient * chosen - beta * logsigmoid(log_odds)
    return sequences.value_of_pairs(losses, pairs, (beta * chosen, beta * rejected))


def _log_of_rest(scores: Tensor) -> Tensor:
    """Computes log(1 - exp(score)), accurate for scores near 0 and far from 0.

    Source: Maechler 2012, "Accurately computing log(1 - exp(-|a|))".
    """
    near_zero = scores > -math.log(2)
    # `where` differentiates both branches: each gets a harmless value where the other one is used
    small, large = torch.where(near_zero, scores, -1.0), torch.where(near_zero, -1.0, scores)
    return torch.where(near_zero, torch.log(-torch.expm1(small)), torch.log1p(-torch.exp(large)))
