"""Exact values of steps at given weights: the reference in float64 on one process."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mtrain.base.errors import ConfigError
from mtrain.config import Config
from mtrain.config.schema.loss import TermSection
from mtrain.config.schema.train import AnyOptimizer
from mtrain.core.loss.functions.load import load_loss_function
from mtrain.core.loss.pair import LossPair, TermInputs
from mtrain.core.loss.vocab_parallel.logits import VocabParallelLogits
from mtrain.core.ranks.groups import Groups
from mtrain.verify.core.result import StepValues
from mtrain.verify.core.weights import TABLES, Arrays, drawn
from mtrain.verify.reference.model.adapters import all_shapes, as_held
from mtrain.verify.reference.model.transformer import Transformer
from mtrain.verify.reference.objective import Evaluated, Scene, evaluated
from mtrain.verify.reference.optimizer import exact_optimizer
from mtrain.verify.reference.text import Rows, Text, rows_of


@dataclass(frozen=True)
class Exact:
    """Exact values of one step."""

    values: StepValues
    adds_exactly: frozenset[str]
    gradients: Arrays
    """Gradients of the normalised objective before clipping, float64."""
    biases: Arrays
    """Expert biases after the step, float64; empty if they are not updated."""
    outputs: dict[str, NDArray[Any]]
    """Outputs by module, [seq, batch, columns], 0 outside the text; empty if the step was not watched."""


@dataclass(frozen=True)
class ExactJob:
    """Steps to evaluate."""

    config: Config
    steps: Sequence[Sequence[Text]]
    first: int = 0
    watches: bool = False
    """Whether to record module outputs of the last step."""


def exact_steps(groups: Groups, job: ExactJob, weights: Sequence[Arrays]) -> list[Exact]:
    """Computes loss and gradients of each step at the weights before it, on the device of one-process groups."""
    evaluator = _Evaluator(groups.device, job.config)
    last = len(weights) - 1
    return [
        evaluator.step(job.first + number, before, texts, watches=job.watches and number == last)
        for number, (before, texts) in enumerate(zip(weights, job.steps))
    ]


class ExactRun(NamedTuple):
    """Outcome of the reference's own run."""

    values: list[StepValues]
    names: list[str]
    optimizer: AnyOptimizer
    """Section with the clipping norm and epsilon that were used."""


def exact_run(groups: Groups, job: ExactJob) -> ExactRun:
    """Runs all steps of the reference with exact updates.

    The user's `clip_grad` and `epsilon` do not fit the gradients of a small model: clipping starts at half of the first
    norm instead, and epsilon is at least the root mean square of the first clipped gradient.
    """
    config, weights = job.config, initial_weights(job.config)
    evaluator, optimizer = _Evaluator(groups.device, config), None
    names, values = list(weights), []
    for number, texts in enumerate(job.steps):
        exact = evaluator.step(number, weights, texts, watches=False)
        values.append(exact.values)
        if exact.values.denominators["main"] != 0:
            if optimizer is None:
                config = config.model_copy(update={"optimizer": _with_bounds_at(exact, config.optimizer)})
                optimizer = exact_optimizer(config)
            lr = config.optimizer.lr
            new = optimizer.updated(weights, exact.gradients, exact.values.grad_norm, lr).weights
            weights = {**weights, **new, **exact.biases}
    return ExactRun(values, names, config.optimizer)


def _with_bounds_at(exact: Exact, section: AnyOptimizer) -> AnyOptimizer:
    norm, clip_grad = exact.values.grad_norm, section.clip_grad
    if clip_grad > 0 and norm > 0:
        clip_grad = norm / 2
    clipped = min(norm, clip_grad) if clip_grad > 0 else norm
    num_elements = sum(gradient.size for gradient in exact.gradients.values())
    epsilon = max(section.epsilon, clipped / math.sqrt(num_elements))
    return section.model_copy(update={"clip_grad": clip_grad, "epsilon": epsilon})


def initial_weights(config: Config, model: str = "trained") -> Arrays:
    """Returns the weights that every layout starts from, in forward order, without vocabulary padding."""
    return {
        name: as_held(name, drawn(name, shape, config, model), config.adapter).numpy()
        for name, shape in all_shapes(config).items()
    }


def tensors_of(
    weights: Mapping[str, NDArray[Any]], shapes: Mapping[str, Sequence[int]], device: torch.device
) -> dict[str, Tensor]:
    """Converts weights to float64 tensors of these shapes; cuts vocabulary padding."""
    return {
        name: torch.from_numpy(weights[name][: shape[0]] if name in TABLES else weights[name]).to(device, torch.float64)
        for name, shape in shapes.items()
        if name in weights
    }


class _Evaluator:
    def __init__(self, device: torch.device, config: Config) -> None:
        self._device, self._config = device, config
        self._teacher = None
        if config.loss.teacher is not None:
            frozen = config.model_copy(update={"adapter": None})
            self._teacher = Transformer(config.model, self._tensors(initial_weights(frozen, "teacher")))

    def step(self, number: int, weights: Mapping[str, NDArray[Any]], texts: Sequence[Text], watches: bool) -> Exact:
        """Computes values and gradients of the step with index `number`."""
        config = self._config
        rows = rows_of(texts, config.data.seq_length, config.model.vocab_size, self._device)
        # what batches are compared with first, `samples`, has one rounding to float32
        rows = replace(rows, carried=torch.float32)
        result = evaluated(config, self._tensors(weights), rows, self._teacher, self._user_term)
        terms = {
            name: (float(term.mean.detach()), float(term.numerator.detach()), term.denominator)
            for name, term in result.terms.items()
        }
        return Exact(
            values=StepValues.of(number + 1, result.objective, terms, result.grad_norm),
            adds_exactly=frozenset(name for name, term in result.terms.items() if term.adds_exactly),
            gradients=_arrays(result.gradients.items()),
            biases=_arrays(result.biases.items()),
            outputs=_outputs(result, rows) if watches else {},
        )

    def _tensors(self, weights: Mapping[str, NDArray[Any]]) -> dict[str, Tensor]:
        return tensors_of(weights, all_shapes(self._config), self._device)

    def _user_term(self, section: TermSection, scene: Scene) -> tuple[Tensor, float]:
        """Calls the user's loss function, which has no second definition; returns numerator and denominator."""
        inputs = TermInputs(
            self._distribution(scene.logits),
            scene.labels,
            scene.weights,
            scene.token_shares,
            scene.tokens,
            None if scene.teacher is None else self._distribution(scene.teacher),
            aggregation=section.aggregation,
            extras={name: values.float() for name, values in scene.extras.items()},
        )
        pair = load_loss_function(section.function, section.options)(inputs)
        if not isinstance(pair, LossPair):
            raise ConfigError(
                f"loss.function={section.function!r} returned a value of type {type(pair).__name__}, but has to "
                "return an mtrain.LossPair(numerator, denominator)"
            )
        return pair.numerator, float(pair.denominator)

    def _distribution(self, logits: Tensor) -> VocabParallelLogits:
        return VocabParallelLogits(logits.transpose(0, 1), None, 0, self._config.model.vocab_size)


def _arrays(tensors: Iterable[tuple[str, Tensor]]) -> Arrays:
    return {name: tensor.detach().cpu().numpy() for name, tensor in tensors}


def _outputs(result: Evaluated, rows: Rows) -> dict[str, NDArray[Any]]:
    text = rows.is_text.unsqueeze(-1)
    masked = ((name, torch.where(text, output.detach(), 0.0)) for name, output in result.forward.outputs.items())
    return {name: output.transpose(0, 1).cpu().numpy() for name, output in masked}


def text_positions(texts: Sequence[Text], config: Config) -> NDArray[np.bool_]:
    """Returns a mask of the positions that hold text, [seq, batch]."""
    rows = rows_of(texts, config.data.seq_length, config.model.vocab_size, torch.device("cpu"))
    is_text: NDArray[np.bool_] = rows.is_text.numpy().T
    return is_text
