"""Training steps as a single process computes them from the whole global batch at once."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from mtrain.config.schema.loss import LossSection
from mtrain.config.schema.model import ModelSection
from mtrain.config.schema.train import AdamWSection, MuonSection
from tests.oracle import loss as definitions
from tests.oracle.experts import is_buffer
from tests.oracle.model import Parameters
from tests.oracle.optimizer import AdamW, global_norm
from tests.oracle.routers import moved_biases, recorded_margins


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
    """Smallest distance of a token from other experts; see `recorded_margins`."""


def oracle_steps(
    parameters: Parameters,
    model: ModelSection,
    loss: LossSection,
    optimizer: AdamWSection | MuonSection,
    learning_rates: Sequence[float],
    batches: Iterable[Sequence[definitions.Sequence]],
    teacher: definitions.Teacher | None = None,
) -> list[StepResult]:
    """Trains, one step for each batch.

    Args:
        parameters: Initial values by megatron-core's names, global shapes; any float dtype.
        model: Section of the architecture.
        loss: Section of the objective.
        optimizer: Section with AdamW's constants; its learning rate and schedule are not read.
        learning_rates: Learning rate of each batch.
        batches: Sequences of each global batch.
        teacher: Frozen model of the distillation terms, in float64.
    """
    assert isinstance(optimizer, AdamWSection), "this oracle has AdamW alone"
    current = {name: value.detach().double() for name, value in parameters.items()}
    adam = AdamW(optimizer)
    results = []
    for lr, batch in zip(learning_rates, batches, strict=True):
        results.append(_step(current, model, loss, adam, lr, list(batch), teacher))
        current = results[-1].parameters
    return results


def _step(
    parameters: Parameters,
    model: ModelSection,
    loss: LossSection,
    adam: AdamW,
    lr: float,
    batch: list[definitions.Sequence],
    teacher: definitions.Teacher | None,
) -> StepResult:
    buffers = {name: value for name, value in parameters.items() if is_buffer(name)}
    trained = {name: value for name, value in parameters.items() if name not in buffers}
    leaves = {name: value.clone().requires_grad_() for name, value in trained.items()}
    with recorded_margins() as margins:
        values = definitions.term_values(leaves | buffers, model, loss, batch, teacher)
    rate = 0.0 if model.experts is None else model.experts.bias_update_rate
    moved = moved_biases(buffers, definitions.routers_of(parameters, model, batch), rate) if rate else buffers
    is_empty = values["main"].denominator == 0  # nothing to learn: gradient 0 and no update, whatever the side terms
    objective = definitions.objective(values, loss)
    found = torch.autograd.grad(objective * (0.0 if is_empty else 1.0), list(leaves.values()), materialize_grads=True)
    gradients = dict(zip(leaves, found, strict=True))
    return StepResult(
        loss=objective.item(),
        means={name: value.mean.item() for name, value in values.items()},
        denominators={name: value.denominator for name, value in values.items()},
        grad_norm=global_norm(gradients),
        gradients=gradients,
        parameters=parameters if is_empty else adam.updated(trained, gradients, lr) | moved,
        margin=min(margins, default=math.inf),
    )
