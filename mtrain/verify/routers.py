"""The exact values of what routers add: their terms of the objective, and where the biases of the choice move.

The whole global batch passes each router at once, so that a row's choices are counted where they are made.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mtrain.config import Config
from mtrain.config.experts import ExpertsSection
from mtrain.loss import router as losses
from mtrain.loss.pair import LossPair
from mtrain.loss.router import router_denominator
from mtrain.mcore.experts.router import Router


class _Seen:
    """What one router did in the last forward pass."""

    def __init__(self) -> None:
        self.logits_of_batch: Tensor | None = None
        self.is_text: Tensor | None = None
        self.counts: Tensor | None = None

    def logits(self, logits: Tensor, is_padding: Tensor | None) -> Tensor:
        """Keeps the logits [seq, batch, experts] with their graph."""
        assert is_padding is not None, "a batch of a model with experts says what is padding"
        self.logits_of_batch, self.is_text = logits, ~is_padding
        return logits

    def choice(self, chosen: Tensor, is_padding: Tensor | None) -> None:
        """Counts the tokens of text that go to each expert."""
        assert is_padding is not None, "a batch of a model with experts says what is padding"
        self.counts = (chosen & ~is_padding.reshape(-1, 1)).sum(0)


class ExactRouters:
    """Watches all routers of a whole model on one process."""

    def __init__(self, model: nn.Module, config: Config) -> None:
        """Args:
        model: Not wrapped.
        config: Terms and rate of the biases.
        """
        self._terms = tuple(config.loss.router.coefficients)
        self._section = config.model.experts
        self._seen: list[tuple[Router, _Seen]] = []
        for module in model.modules():
            if isinstance(module, Router):
                seen = _Seen()
                module.watch = seen
                self._seen.append((module, seen))

    def pairs(self, is_padding: Tensor | None) -> dict[str, LossPair]:
        """Numerators over all routers, with their graph, and the denominators of one layer.

        Args:
            is_padding: [batch, seq] of the whole global batch.
        """
        return {term: self._pair(term, is_padding) for term in self._terms}

    def _pair(self, term: str, is_padding: Tensor | None) -> LossPair:
        assert is_padding is not None, "a batch of a model with experts says what is padding"
        assert self._section is not None, "a rule of the configuration"
        numerator = torch.stack([_numerator(term, seen, self._section) for _, seen in self._seen]).sum()
        denominator = torch.tensor(router_denominator(term, [is_padding.cpu()]), dtype=torch.float64)
        return LossPair(numerator, denominator)

    @torch.no_grad()
    def moved_biases(self) -> dict[Tensor, Tensor]:
        """Each bias that moves -> what it is after a successful step, float64: one step towards an even load."""
        rate = 0.0 if self._section is None else self._section.bias_update_rate
        moved = {}
        for router, seen in self._seen:
            if router.expert_bias is not None and rate:
                assert seen.counts is not None, "there was no forward pass"
                towards = (seen.counts.sum() - seen.counts * len(seen.counts)).sign()  # no mean, which would be rounded
                moved[router.expert_bias] = router.expert_bias.double() + rate * towards
        return moved


def _numerator(term: str, seen: _Seen, section: ExpertsSection) -> Tensor:
    assert seen.logits_of_batch is not None, "there was no forward pass"
    assert seen.is_text is not None, "there was no forward pass"
    if term == losses.Z:
        return losses.squared_logsumexp(seen.logits_of_batch, seen.is_text).sum()
    scores = losses.normalised_scores(seen.logits_of_batch, section.score, seen.is_text)
    choices = losses.choices_by_row(scores, section.top_k, seen.is_text)
    num_tokens = seen.is_text.sum(0).double().clamp(min=1)
    return (losses.balance_losses(scores, choices).double() / num_tokens).sum()
