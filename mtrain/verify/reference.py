"""The exact values: one process, the whole global batch at once, float64.

Of the training step nothing is used: no pipeline schedule, no DDP, no gradient buffer, no division of gradients, no
clipping, no optimizer. The model's modules and the loss functions are evaluated once, and torch differentiates each
term's numerator by itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mtrain.data.batch import Microbatch
from mtrain.loss.pair import LossPair, TermInputs
from mtrain.loss.terms import Objective
from mtrain.mcore.gather import Shard
from mtrain.mcore.groups import Groups
from mtrain.mcore.initialize import sharded_tensors
from mtrain.mcore.model import LanguageModel, build_frozen_model, build_model, unwrap
from mtrain.mcore.multi_token import Logits
from mtrain.mcore.share import share_batches
from mtrain.mcore.spec import global_name
from mtrain.mcore.teacher import Teacher
from mtrain.step import term_inputs_of
from mtrain.verify.activations import Piece, Watch
from mtrain.verify.adamw import AdamW
from mtrain.verify.result import StepValues
from mtrain.verify.routers import ExactRouters
from mtrain.verify.samples import Batches
from mtrain.verify.weights import Arrays, assembled, drawn, given, set_weights
from mtrain.verify.worker import Job, rate


@dataclass(frozen=True)
class Exact:
    """One step."""

    values: StepValues
    gradients: Arrays
    """float64, of the normalised objective, before clipping."""
    biases: Arrays
    """float64: the biases of the choice of experts after the step, where they move."""
    pieces: list[Piece]
    """Module outputs, where the step was watched."""


def exact_steps(groups: Groups, job: Job, weights: Sequence[Arrays], first: int = 0) -> list[Exact]:
    """Loss and gradients of each step at the weights that a layout had before it.

    Args:
        groups: Of one process.
        job: The configuration with the whole global batch in one microbatch.
        weights: One set a step.
        first: Index of the first of these steps.
    """
    evaluator = _Evaluator(groups, job)
    return [evaluator.step(number, each) for number, each in enumerate(weights, first)]


def exact_run(groups: Groups, job: Job) -> tuple[list[StepValues], list[str]]:
    """The reference's own run of all steps with exact AdamW updates, and the names of all tensors in model order."""
    evaluator = _Evaluator(groups, job)
    optimizer = AdamW(job.config.optimizer)
    weights = evaluator.initial()
    values = []
    for number in range(job.plan.num_steps):
        exact = evaluator.step(number, weights)
        values.append(exact.values)
        if exact.values.denominators["main"] != 0:
            learning_rate = rate(job.config, number)
            new = optimizer.updated(weights, exact.gradients, exact.values.grad_norm, learning_rate).weights
            weights = {**weights, **new, **exact.biases}
    return values, list(weights)


class _Evaluator:
    """One float64 model."""

    def __init__(self, groups: Groups, job: Job) -> None:
        # nothing is computed again in backward: it changes no value, and its engine refuses torch.autograd.grad;
        # TransformerEngine knows no float64
        train = job.config.train.model_copy(update={"recompute": "none"})
        model = job.config.model.model_copy(update={"backend": "torch"})
        config = job.config.model_copy(update={"train": train, "model": model})
        self._groups, self._job, self._config = groups, job, config
        self._model: LanguageModel = unwrap(build_model(config, groups)[0]).double()
        self._draw()  # buffers stay so
        self._objective = Objective.from_config(job.config.loss, config.model.mtp_depths)
        self._routers = ExactRouters(self._model, config)
        self._teacher = self._exact_teacher()
        self._batches = Batches(config, job.plan, 0, 1)

    def _exact_teacher(self) -> Teacher | None:
        """The teacher that the layouts have, in float64."""
        if self._config.loss.teacher is None:
            return None
        chunks = build_frozen_model(self._config, self._groups)
        set_weights(chunks, self._groups, lambda name, shape: drawn(name, shape, self._config, "teacher"))
        return Teacher(self._config, [chunk.double() for chunk in chunks], self._groups)

    def _draw(self) -> None:
        set_weights([self._model], self._groups, lambda name, shape: drawn(name, shape, self._config))

    def initial(self) -> Arrays:
        """The weights that every layout starts from."""
        self._draw()
        return self._whole(lambda value: value)

    def step(self, number: int, weights: Arrays) -> Exact:
        """Values and gradients at these weights."""
        set_weights([self._model], self._groups, given(weights))
        (batch,) = share_batches(self._batches.of_step(number), 1, (), self._config, self._groups)
        watched = number == self._job.watched_step
        with Watch([self._model], self._groups, self._config, enabled=watched) as watch:
            output = self._model(batch.tokens, batch.positions, batch.document_starts, batch.is_padding, batch.ahead)
        logits = output if isinstance(output, Logits) else Logits(output)
        inputs_of = term_inputs_of([batch], self._config, self._groups, self._teacher)
        pairs = self._pairs(inputs_of(logits, batch)) | self._routers.pairs(batch.is_padding)
        denominators = self._denominators(batch, pairs)
        gradients = self._gradients(pairs, denominators)
        biases = self._whole(self._routers.moved_biases().get)
        return Exact(self._values(number, pairs, denominators, gradients), gradients, biases, watch.pieces)

    def _pairs(self, inputs: dict[str, TermInputs]) -> dict[str, LossPair]:
        """As the objective, but a numerator may be float64, which a user's function makes of float64 logits."""
        found = {term: function(inputs[term]) for term, function in self._objective.functions.items()}
        if all(isinstance(pair, LossPair) for pair in found.values()):
            return found
        return self._objective.pairs(inputs)  # says what is wrong

    def _denominators(self, batch: Microbatch, pairs: dict[str, LossPair]) -> dict[str, float]:
        """From whole rows, correctly rounded; measured ones are known to the loss function alone."""
        if self._config.loss.denominator == "measured":
            return {term: float(pair.denominator) for term, pair in pairs.items()}
        counted = {term: math.fsum(shares.flatten().tolist()) for term, shares in batch.shares.items()}
        return {term: counted[term] if term in counted else float(pair.denominator) for term, pair in pairs.items()}

    def _gradients(self, pairs: dict[str, LossPair], denominators: dict[str, float]) -> Arrays:
        parameters = list(self._model.parameters())
        total = [torch.zeros_like(each) for each in parameters]
        for term, coefficient in self._objective.coefficients.items():
            if denominators[term] == 0:
                continue
            parts = torch.autograd.grad(pairs[term].numerator, parameters, retain_graph=True, allow_unused=True)
            for sum_, part in zip(total, parts, strict=True):
                if part is not None:
                    sum_ += part * (coefficient / denominators[term])
        if denominators["main"] == 0:
            total = [torch.zeros_like(each) for each in parameters]
        return self._whole(dict(zip(parameters, total, strict=True)).get)

    def _whole(self, value_of: Callable[[Tensor], Tensor | None]) -> Arrays:
        """Global tensors of what belongs to parameters and buffers; None leaves one out."""
        shards: list[Any] = []
        for part in sharded_tensors(self._model, self._groups, value_of):
            axes = part.prepend_axis_num
            name = global_name(part.key, tuple(part.global_offset[:axes]))
            shape, offset = tuple(part.global_shape[axes:]), tuple(part.global_offset[axes:])
            shards.append(Shard(name, shape, offset, part.data.detach().cpu().numpy()))
        return assembled(shards).tensors

    def _values(
        self, number: int, pairs: dict[str, LossPair], denominators: dict[str, float], gradients: Arrays
    ) -> StepValues:
        numerators = {term: float(pair.numerator.detach()) for term, pair in pairs.items()}
        means = {term: numerators[term] / denominators[term] if denominators[term] else 0.0 for term in numerators}
        norm = math.sqrt(math.fsum(float((each**2).sum()) for each in gradients.values()))
        objective = self._objective.reported(numerators, denominators)
        return StepValues(number + 1, objective, means, numerators, denominators, norm)
