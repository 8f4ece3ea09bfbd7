"""Losses of one token's distribution from their definitions; logits are [batch, seq, vocabulary] float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

TokenLosses = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""Function of logits, labels and the teacher's logits that returns losses in nats, [batch, seq]."""


def cross_entropy(logits: Tensor, labels: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """Computes -log p(label), or the mean of -log p under the label smoothed evenly over the vocabulary.

    Source: Szegedy et al. 2016, section 7.
    """
    negative = -torch.log_softmax(logits, -1)
    own = negative.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    return (1 - label_smoothing) * own + label_smoothing * negative.mean(-1)


def squared_logsumexp(logits: Tensor) -> Tensor:
    """Computes (log Z)^2. Source: PaLM (Chowdhery et al. 2022), section 5."""
    return torch.logsumexp(logits, -1) ** 2


def entropy(logits: Tensor) -> Tensor:
    """Computes -sum p log p."""
    logs = logits - torch.logsumexp(logits, -1, keepdim=True)
    return -(logs.exp() * logs).sum(-1)


def divergence(logits: Tensor, teacher: Tensor, direction: str = "forward", temperature: float = 1.0) -> Tensor:
    """Computes KL(teacher || model), or KL(model || teacher) if reverse. Source: Hinton et al. 2015; Gu et al. 2023."""
    own = torch.log_softmax(logits / temperature, -1)
    other = torch.log_softmax(teacher / temperature, -1)
    first, second = {"forward": (other, own), "reverse": (own, other)}[direction]
    return (first.exp() * (first - second)).sum(-1)


def dynamic(logits: Tensor, labels: Tensor) -> Tensor:
    """Computes -sg(p) log p of the label. Source: Wu et al. 2025, equation 9."""
    losses = cross_entropy(logits, labels)
    return losses * torch.exp(-losses).detach()


def known_losses(function: str, options: dict[str, Any]) -> TokenLosses | None:
    """Returns the token losses that a name in the configuration stands for; None if it is a user's function."""

    def distilled(logits: Tensor, labels: Tensor, teacher: Tensor | None) -> Tensor:
        assert teacher is not None, "the objective is refused without a teacher"
        return divergence(logits, teacher, **options)

    known: dict[str, TokenLosses] = {
        "next_token": lambda logits, labels, teacher: cross_entropy(logits, labels, **options),
        "z_loss": lambda logits, labels, teacher: squared_logsumexp(logits),
        "entropy": lambda logits, labels, teacher: entropy(logits),
        "distillation": distilled,
        "dft": lambda logits, labels, teacher: dynamic(logits, labels),
    }
    return known.get(function)
