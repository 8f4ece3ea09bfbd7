"""Odds ratio preference optimization."""

import math

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from mtrain.loss.preference.scores import PreferenceValue, ScoredSequences, preference_loss


@preference_loss(needs_reference=False)
def orpo_loss(sequences: ScoredSequences, beta: float = 0.1, nll_coefficient: float = 1.0) -> PreferenceValue:
    """The negative log-likelihood of the chosen answer, and -log sigmoid of the log odds ratio of the two answers.

    Scores are means over an answer's tokens, so that both are; a reference model is not needed.

    Args:
        sequences: Pairs.
        beta: Weight of the odds ratio, the paper's lambda.
        nll_coefficient: Weight of the likelihood, 1 in the paper. With 0 it can be a side term with an aggregation of
            its own, for instance `{function: next_token, aggregation: token-mean}`: side terms see chosen answers only.

    Source: Hong, Lee and Thorne 2024, equations 4 to 7.
    """
    pairs = sequences.pairs()
    chosen, rejected = pairs.chosen.scores, pairs.rejected.scores
    log_odds = (chosen - _log_of_rest(chosen)) - (rejected - _log_of_rest(rejected))
    losses = -nll_coefficient * chosen - beta * logsigmoid(log_odds)
    return sequences.value_of_pairs(losses, pairs, (beta * chosen, beta * rejected))


def _log_of_rest(scores: Tensor) -> Tensor:
    """log(1 - exp(score)), exact on both sides. Source: Maechler 2012, "Accurately computing log(1 - exp(-|a|))"."""
    near_zero = scores > -math.log(2)
    # `where` differentiates both branches: each is given a harmless value where the other one holds
    small, large = torch.where(near_zero, scores, -1.0), torch.where(near_zero, -1.0, scores)
    return torch.where(near_zero, torch.log(-torch.expm1(small)), torch.log1p(-torch.exp(large)))
