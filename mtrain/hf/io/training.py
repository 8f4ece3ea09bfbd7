"""Training steps as transformers and torch take them: one process, float32, nothing of Megatron-Core."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from mtrain.config.schema.train import AdamWSection
from mtrain.hf.io.logits import open_model


class TrainingRows(NamedTuple):
    """What goes through the model at once."""

    tokens: Tensor
    """[batch, seq] int64; each row is one document, seen causally."""
    labels: Tensor
    """[batch, seq] int64, shifted."""
    weights: Tensor
    """[batch, seq]: factor of each token's loss; 0 leaves it out."""


class StepInput(NamedTuple):
    """One optimizer step."""

    rows: Sequence[TrainingRows]
    denominator: float
    """What the weighted sum of token losses is divided by; 0: nothing to learn."""
    lr: float


class StepFound(NamedTuple):
    """What came out of a step."""

    numerator: float
    """Weighted sum of token losses, in nats."""
    grad_norm: float
    """Global L2 norm before clipping; 0 where there was nothing to learn."""


def transformers_steps(folder: Path, section: AdamWSection, steps: Iterable[StepInput]) -> Iterator[StepFound]:
    """AdamW steps from the weights of a folder, one after the other. Gradients of a step are added row by row.

    Args:
        folder: config.json and safetensors.
        section: Constants of AdamW and the clipping.
        steps: Their data.
    """
    model = open_model(folder)
    parameters = dict(model.named_parameters())
    optimizer = torch.optim.AdamW(
        list(_groups(parameters, section)), lr=0.0, betas=(section.beta1, section.beta2), eps=section.epsilon
    )
    for step in steps:
        optimizer.zero_grad()
        # gradients of all rows add up in .grad before the one optimizer step; fsum adds the losses exactly
        numerator = math.fsum(_backward(model, rows, step.denominator) for rows in step.rows)
        gradients = [value.grad for value in parameters.values() if value.grad is not None]
        norm = math.sqrt(math.fsum(float(_norm(gradient)) ** 2 for gradient in gradients))
        # an empty batch moves neither weights nor moments, and AdamW's own counter stays
        if step.denominator != 0:
            if section.clip_grad > 0:
                # with the norm in float64 from above: clip_grad_norm_ would compute its own in float32
                torch.nn.utils.clip_grads_with_norm_(parameters.values(), section.clip_grad, torch.tensor(norm))
            for group in optimizer.param_groups:
                group["lr"] = step.lr
            optimizer.step()
        yield StepFound(numerator, norm)


def _groups(parameters: dict[str, Any], section: AdamWSection) -> Iterator[dict[str, Any]]:
    """Matrices decay; norms and biases, of experts too, as the section says."""
    # experts of transformers 5 are stacked, so a bias of theirs is a matrix: it is known by its name
    small = {name for name, value in parameters.items() if value.dim() < 2 or name.endswith("bias")}
    decay = section.weight_decay
    yield {"params": [value for name, value in parameters.items() if name not in small], "weight_decay": decay}
    other = decay if section.decay_norms_and_biases else 0.0
    yield {"params": [value for name, value in parameters.items() if name in small], "weight_decay": other}


def _backward(model: Any, rows: TrainingRows, denominator: float) -> float:
    """Adds the gradients of some rows; their numerator."""
    # [batch, seq, vocab_size]; no cache, which would only take memory
    logits = model(rows.tokens, use_cache=False).logits.float()
    losses = functional.cross_entropy(logits.flatten(0, 1), rows.labels.flatten(), reduction="none")
    weights = rows.weights.flatten()
    numerator = torch.where(weights > 0, losses * weights, 0.0).sum(dtype=torch.float64)
    if denominator != 0:
        # divided before backward, the other order than in training: one more thing that the comparison proves
        torch.autograd.backward(numerator / denominator)
    return float(numerator.detach())


def _norm(gradient: Tensor) -> Tensor:
    """In float64: float32 sums of millions of squares are off by more than is compared."""
    norm: Tensor = torch.linalg.vector_norm(gradient, dtype=torch.float64)
    return norm
