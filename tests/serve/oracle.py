"""The Tinker protocol's training from its definitions: one process, float64, torch's own AdamW and clipping."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mtrain.config import Config
from mtrain.core.batch.sample import Sample
from mtrain.verify.reference.model.adapters import is_trained, merged
from mtrain.verify.reference.model.transformer import Transformer
from tests.reference import Parameters, doubles, rows_of


class Oracle:
    """A model with its optimizer."""

    def __init__(self, config: Config, parameters: Mapping[str, Any]) -> None:
        self._config = config
        self.parameters: Parameters = {
            name: each.requires_grad_(is_trained(name, config.adapter)) for name, each in doubles(parameters).items()
        }
        self._trained = [each for each in self.parameters.values() if each.requires_grad]
        self._optimizer = torch.optim.AdamW(self._trained, lr=1.0, weight_decay=0.0)

    def log_probs(self, tokens: Sequence[Sequence[int]]) -> list[Tensor]:
        """Returns the log-probabilities of each sequence's tokens but the first, with a graph."""
        found = zip(self.distributions(tokens), tokens, strict=True)
        return [each.gather(-1, torch.tensor(ids[1:])[:, None])[:, 0] for each, ids in found]

    def distributions(self, tokens: Sequence[Sequence[int]]) -> list[Tensor]:
        """Returns log-probabilities of the whole vocabulary in the place of each token but the first."""
        samples = [Sample(np.array(ids[:-1]), np.array(ids[1:]), np.ones(len(ids) - 1)) for ids in tokens]
        model = Transformer(self._config.model, merged(self._config, self.parameters))
        logits = model.forward(rows_of(samples)).logits
        return [each[: len(ids) - 1].log_softmax(-1) for each, ids in zip(logits, tokens, strict=True)]

    def forward_backward(
        self, tokens: Sequence[Sequence[int]], loss: str, inputs: Sequence[Mapping[str, Any]]
    ) -> tuple[float, list[Tensor]]:
        """Adds the gradient of a sum over tokens; returns it, and the log-probabilities."""
        found = self.log_probs(tokens)
        total = torch.stack(
            [
                LOSSES[loss](p, {name: torch.tensor(values).double() for name, values in given.items()})
                for p, given in zip(found, inputs, strict=True)
            ]
        ).sum()
        total.backward()
        return float(total.detach()), [each.detach() for each in found]

    def step(self, options: Mapping[str, float]) -> float:
        """Makes an update; returns the gradient's norm before clipping."""
        most = options["grad_clip_norm"] or float("inf")
        norm = float(torch.nn.utils.clip_grad_norm_(self._trained, most))
        for group in self._optimizer.param_groups:
            group |= {
                "lr": options["learning_rate"],
                "betas": (options["beta1"], options["beta2"]),
                "eps": options["eps"],
            }
        with torch.no_grad():  # decoupled, of matrices alone, as the configuration says
            for each in self._trained:
                if each.dim() > 1:
                    each.mul_(1 - options["learning_rate"] * options["weight_decay"])
        self._optimizer.step()
        self._optimizer.zero_grad()
        return norm


def _ratio(p: Tensor, given: Mapping[str, Tensor]) -> Tensor:
    return torch.exp(p - given["logprobs"])


def _importance_sampling(p: Tensor, given: Mapping[str, Tensor]) -> Tensor:
    return -(_ratio(p, given) * given["advantages"]).sum()


def _surrogate(ratio: Tensor, advantages: Tensor) -> Tensor:
    return -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).sum()


def _ppo(p: Tensor, given: Mapping[str, Tensor]) -> Tensor:
    return _surrogate(_ratio(p, given), given["advantages"])


def _cispo(p: Tensor, given: Mapping[str, Tensor]) -> Tensor:
    return -(_ratio(p, given).detach().clamp(0.8, 1.2) * p * given["advantages"]).sum()


def _gspo(p: Tensor, given: Mapping[str, Tensor]) -> Tensor:
    counts = given.get("sequence_ratio_mask", given["advantages"]) != 0
    mean = (p - given["logprobs"])[counts].mean() if counts.any() else p.sum() * 0
    return _surrogate(torch.exp(mean.detach() + p - p.detach()), given["advantages"])


LOSSES = {
    "cross_entropy": lambda p, given: -(p * given["weights"]).sum(),
    "importance_sampling": _importance_sampling,
    "ppo": _ppo,
    "cispo": _cispo,
    "gspo": _gspo,
}
