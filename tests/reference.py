"""Exact steps on the samples of a test: the reference of `mtrain verify`, in float64 on one process.

tests/verify/reference judges the reference itself by transformers, TRL, torch and arithmetic by hand.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mtrain.config import Config
from mtrain.config.schema.experts import ExpertsSection
from mtrain.config.schema.loss import TermSection
from mtrain.config.schema.model import ModelSection
from mtrain.core.batch.sample import Sample
from mtrain.verify.reference.model.experts import Routed
from mtrain.verify.reference.model.shapes import LAYER_SCALAR, shapes_of
from mtrain.verify.reference.model.transformer import Forward, Transformer
from mtrain.verify.reference.objective import Evaluated, Scene, cross_entropy, evaluated
from mtrain.verify.reference.optimizer import exact_optimizer
from mtrain.verify.reference.text import Rows
from tests.parity.replay import replaying

Parameters = dict[str, Tensor]
"""Tensors by megatron-core's names, of global shapes; tables without the padding of the vocabulary."""

USER_TERMS: dict[str, Callable[..., Tensor]] = {}
"""Name in the configuration -> numerator of a term from its scene and options; tests add their own."""


@dataclass(frozen=True)
class StepResult:
    """Results of one optimizer step; everything float64."""

    loss: float
    """Sum of coefficient x mean over all terms: what is differentiated and reported."""
    means: dict[str, float]
    """Mean of each term, numerator / denominator."""
    denominators: dict[str, float]
    """Denominator of each term."""
    grad_norm: float
    """2-norm of the normalized gradient, before clipping."""
    gradients: Parameters
    """Gradients of the objective, before clipping."""
    parameters: Parameters
    """Parameters after the update."""
    margin: float = math.inf
    """Smallest distance of a token from other experts; see `_margin`."""


def exact_steps(
    config: Config,
    parameters: Mapping[str, Any],
    learning_rates: Iterable[float],
    batches: Iterable[Sequence[Sample]],
    teacher: Transformer | None = None,
) -> list[StepResult]:
    """Trains, one step for each batch.

    Args:
        config: Configuration of the run; its learning rate and schedule are not read.
        parameters: Initial values; any float dtype.
        learning_rates: Learning rate of each batch.
        batches: Samples of each global batch.
        teacher: Frozen model of the distillation terms.
    """
    optimizer, results, current = exact_optimizer(config), [], doubles(parameters)
    for lr, batch in zip(learning_rates, batches, strict=True):
        found, margin = evaluate(config, current, batch, teacher), math.inf
        if config.model.experts is not None:
            margin = _margin(found.forward.seen, current, config)
        if found.terms["main"].denominator != 0:  # without anything to learn no update, whatever the side terms
            new = optimizer.updated(current, found.gradients, found.grad_norm, lr).weights
            current = current | doubles(new) | found.biases
        results.append(
            StepResult(
                loss=found.objective,
                means={name: float(term.mean.detach()) for name, term in found.terms.items()},
                denominators={name: term.denominator for name, term in found.terms.items()},
                grad_norm=found.grad_norm,
                gradients=found.gradients,
                parameters=current,
                margin=margin,
            )
        )
    return results


def evaluate(
    config: Config, parameters: Mapping[str, Any], batch: Sequence[Sample], teacher: Transformer | None = None
) -> Evaluated:
    """Computes terms and gradients of a global batch, without an update; takes the experts that samples name."""
    with replaying(batch, config.model):
        return evaluated(config, doubles(parameters), rows_of(batch), teacher, _user_term)


def _user_term(section: TermSection, scene: Scene) -> tuple[Tensor, float]:
    return USER_TERMS[section.function](scene, **section.options), float(scene.token_shares.sum())


def forward_of(parameters: Mapping[str, Tensor], model: ModelSection, rows: Rows) -> Forward:
    """Computes logits and choices of experts, with a graph to the parameters.

    Raises:
        AssertionError: The parameters are not the model's.
    """
    given = {name: tuple(value.shape) for name, value in parameters.items()}
    assert given == shapes_of(model), (
        f"parameters differ from the model's: {dict(given.items() ^ shapes_of(model).items())}"
    )
    return Transformer(model, parameters).forward(rows)


def logits_of(parameters: Mapping[str, Tensor], model: ModelSection, tokens: Tensor) -> Tensor:
    """Computes the logits [rows, length, vocab_size] of tokens [rows, length], each row a document."""
    rows = [Sample(row, row, np.zeros(len(row))) for row in tokens.numpy()]
    return forward_of(parameters, model, rows_of(rows)).logits


def token_losses_of(
    parameters: Mapping[str, Tensor], model: ModelSection, batch: Sequence[Sample], temperature: float = 1.0
) -> list[Tensor]:
    """Computes the cross entropy of each token, 0 where it has no loss: [length] of each sample."""
    rows = rows_of(batch)
    losses = cross_entropy(forward_of(parameters, model, rows).logits / temperature, rows.labels)
    kept = torch.where(rows.weights > 0, losses, 0.0)
    return [row[: len(sample.tokens)] for row, sample in zip(kept, batch, strict=True)]


def rows_of(batch: Sequence[Sample]) -> Rows:
    """Makes rows as wide as the longest sample."""
    size = max(sample.width for sample in batch)

    def rows(of: Callable[[Sample], NDArray[Any]], dtype: torch.dtype, nothing: int = 0) -> Tensor:
        found = torch.full((len(batch), size), nothing, dtype=dtype)
        for row, values in zip(found, map(of, batch), strict=True):
            row[: len(values)] = torch.as_tensor(values)
        return found

    return Rows(
        tokens=rows(lambda sample: sample.tokens, torch.int64),
        labels=rows(lambda sample: np.where(sample.mask > 0, sample.labels, 0), torch.int64),
        weights=rows(lambda sample: sample.mask, torch.float64),
        documents=rows(lambda sample: np.unique(_starts(sample), return_inverse=True)[1], torch.int64, nothing=-1),
        positions=rows(lambda sample: np.arange(len(sample.tokens)) - _starts(sample), torch.int64),
        sample_weights=torch.tensor([sample.weight for sample in batch], dtype=torch.float64),
        extras={name: rows(lambda sample: sample.extras[name], torch.float64) for name in batch[0].extras},  # noqa: B023
    )


def _starts(sample: Sample) -> NDArray[Any]:
    """Returns the position at which each token's document begins, [length]."""
    return np.zeros(len(sample.tokens)) if sample.document_starts is None else sample.document_starts


def random_parameters(model: ModelSection, seed: int) -> Parameters:
    """Draws every entry of the parameters, biases and norms too, so that no term of a gradient is 0 by accident."""
    generator = torch.Generator().manual_seed(seed)
    shapes, neutral = shapes_of(model), 0.0 if model.zero_centered_norm else 1.0
    drawn = {name: torch.randn(shape, dtype=torch.float64, generator=generator) for name, shape in shapes.items()}
    scaled = {
        name: neutral + 0.1 * value if "norm" in name and name.endswith("weight") else 0.2 * value
        for name, value in drawn.items()
    }
    # of a layer's whole output: near 0 it would leave nothing of the layers before
    return {name: 1 + value if name.endswith(LAYER_SCALAR) else value for name, value in scaled.items()}


def doubles(values: Mapping[str, Any]) -> Parameters:
    """Converts arrays and tensors to float64, without a graph."""
    return {name: torch.as_tensor(value).detach().double() for name, value in values.items()}


def _margin(seen: Sequence[Routed], parameters: Parameters, config: Config) -> float:
    """Returns how close a token comes to other experts, at every router and balancing loss, in standard deviations of
    the ranked values.

    A float32 run chooses the same experts if its ranking is wrong by less than half of that.
    """
    section = config.model.experts
    assert section is not None
    balances = config.loss.router.sequence_balance_coefficient > 0
    found = [math.inf]
    for router in seen:
        logits, bias = router.logits[router.is_text].detach(), parameters.get(f"{router.name}.expert_bias")
        softmax = logits.softmax(-1)
        scores = logits.sigmoid() if section.score == "sigmoid" else softmax if section.pre_softmax else logits
        ranking = scores if bias is None else scores + bias
        found.append(_distance(ranking, section) / float(ranking.std()))
        if balances:
            shares = scores / scores.sum(-1, keepdim=True) if section.score == "sigmoid" else softmax
            found.append(_gap(shares, section.top_k) / float(shares.std()))
    return min(found)


def _distance(ranking: Tensor, section: ExpertsSection) -> float:
    """Returns the smallest distance between what a token chooses last and what it leaves, of experts and of groups."""
    if section.num_groups is None or section.group_top_k is None:
        return _gap(ranking, section.top_k)
    grouped = ranking.view(len(ranking), section.num_groups, -1)
    best = section.top_k // section.group_top_k if section.group_score_top_k is None else section.group_score_top_k
    of_groups = grouped.topk(best).values.sum(-1)
    closed = of_groups < of_groups.topk(section.group_top_k).values[:, -1:]
    experts = grouped.masked_fill(closed.unsqueeze(-1), -math.inf).flatten(1)
    return min(_gap(experts, section.top_k), _gap(of_groups, section.group_top_k))


def _gap(values: Tensor, count: int) -> float:
    """Returns the smallest difference, over rows, between the `count`-th highest value and the next one."""
    if count == values.shape[-1]:
        return math.inf
    ordered = values.sort(-1, descending=True).values
    return float((ordered[:, count - 1] - ordered[:, count]).min())
