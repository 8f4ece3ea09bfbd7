"""Work of every rank in a parity test; the functions for `Pool.run`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mtrain.arch.lr import learning_rate
from mtrain.base.errors import NumericError
from mtrain.checkpoint.state.gather import gradient_shards, parameter_shards
from mtrain.config import Config
from mtrain.config.schema.loss import MAIN_TERM
from mtrain.core.batch.batch import Microbatch
from mtrain.core.engine.finalize import finalize_gradients
from mtrain.core.engine.loss_reduction import PairAccumulator, StepSums, TermTotals, Totals
from mtrain.core.engine.optimizer import Optimizer
from mtrain.core.engine.rank_model import RankModel, build_model
from mtrain.core.engine.schedule import LossOfLogits, run_forward, run_schedule
from mtrain.core.layers.build import unwrap
from mtrain.core.layers.init_weights import sharded_tensors
from mtrain.core.layers.layer_spec import global_name
from mtrain.core.layers.output_layer import Logits
from mtrain.core.layers.sharded_parameters import held_values
from mtrain.core.loss.objective import Objective
from mtrain.core.loss.pair import LossPair
from mtrain.core.ranks.broadcast import broadcast_batches, slice_for_rank
from mtrain.core.ranks.groups import Groups
from mtrain.core.step.loss import term_inputs
from mtrain.core.step.step import TrainingStep
from mtrain.data.loader import Given, RowsOfRank
from tests.core.state.gathering import gather_whole
from tests.parity.batches import GlobalBatch

Arrays = dict[str, Any]
"""Global tensors by name, as numpy: a torch tensor would travel between processes as an open file."""


class StepOutcome(NamedTuple):
    """Report of a rank on one optimizer step."""

    loss: float
    """Objective: the quantity that was differentiated."""
    terms: dict[str, TermTotals]
    grad_norm: float
    gradients: Arrays | None
    """Gradients before clipping, without the loss scale of fp16; on rank 0, else None."""
    diagnostics: Mapping[str, float] = {}
    """Values that loss functions report."""


class Outcome(NamedTuple):
    """Run of a few steps."""

    steps: list[StepOutcome]
    parameters: Arrays | None
    """Parameters after the last step; on rank 0, else None."""


class Built(NamedTuple):
    """Model that is ready to train on this rank."""

    model: RankModel
    training: TrainingStep


def build(
    groups: Groups, config: Config, parameters: Mapping[str, Any] | None = None, choices: tuple[str, ...] = ()
) -> Built:
    """Builds model, optimizer and step, with given global parameters or with the initial weights."""
    sharded = build_model(config, groups, weights_follow=parameters is not None)
    if parameters is not None:
        set_parameters(sharded.chunks, groups, parameters)
    optimizer = Optimizer(config, sharded, groups)  # copies the weights where it keeps its own
    model = RankModel(config, groups, sharded, optimizer)
    return Built(model, TrainingStep(model, _objective(config, choices)))


def named_choices(batch: GlobalBatch) -> tuple[str, ...]:
    """Says whether a sample names the experts of its tokens."""
    return tuple(dict.fromkeys(name for sample in batch for name in sample.choices))


def _objective(config: Config, choices: tuple[str, ...]) -> Objective:
    found = Objective.from_config(config.loss, config.model)
    return replace(found, choices=choices)


def train(
    groups: Groups, config: Config, parameters: Mapping[str, Any] | None, batches: Sequence[GlobalBatch]
) -> Outcome:
    """Trains one optimizer step for each global batch."""
    built = build(groups, config, parameters, choices=named_choices(batches[0]))
    steps = [run_step(built, groups, config, batch, number) for number, batch in enumerate(batches)]
    built.model.sharded.gather_parameters()
    return Outcome(steps, arrays(gather_whole(parameter_shards(built.model.chunks, groups))))


class Run(NamedTuple):
    """Run of a model of its own."""

    config: Config
    parameters: Mapping[str, Any] | None
    """Global tensors by name; None: the initial ones."""
    batches: Sequence[GlobalBatch]


def train_each(groups: Groups, runs: Sequence[Run]) -> list[Outcome]:
    """Trains several runs of one layout, one after another on the same ranks, which start once for all of them."""
    return [train(groups, *run) for run in runs]


def run_step(built: Built, groups: Groups, config: Config, batch: GlobalBatch, number: int) -> StepOutcome:
    """Gathers the gradients of a batch, and makes the update of step `number`."""
    totals = built.training.forward_backward(own_microbatches(batch, groups, config))
    gradients = arrays(gather_whole(gradient_shards(built.model.sharded, groups)))
    update = built.training.update(totals, learning_rate(number, config.optimizer, config.train.num_steps))
    norm = 0.0 if update is None else update.grad_norm
    return StepOutcome(totals.objective, dict(totals.terms), norm, gradients, totals.diagnostics)


def own_microbatches(batch: GlobalBatch, groups: Groups, config: Config) -> list[Microbatch] | None:
    """Returns the part of a global batch that this rank reads; None where tensor-parallel rank 0 reads for it."""
    if groups.tp_rank > 0:
        return None
    choices = named_choices(batch)
    extras = _objective(config, choices).extras if choices or (batch and batch[0].extras) else ()
    rows, samples = RowsOfRank(config, groups.dp_rank, groups.layout.dp, extras=extras), Given(batch)
    return rows.microbatches(rows.plan(samples, len(batch)), samples, has_first=True)


@torch.no_grad()
def set_parameters(chunks: Sequence[Any], groups: Groups, parameters: Mapping[str, Any]) -> None:
    """Cuts this rank's shards out of global tensors; rows of the padded vocabulary become 0.

    Args:
        chunks: Model chunks, before the optimizer copies their weights.
        groups: The process groups.
        parameters: Arrays by global name, tables with their real rows only.
    """
    for chunk in chunks:
        for part in sharded_tensors(unwrap(chunk), groups):
            axes = part.prepend_axis_num
            name = global_name(part.key, tuple(part.global_offset[:axes]))
            whole = torch.zeros(part.global_shape[axes:], dtype=torch.float64)
            values = torch.as_tensor(parameters[name])
            whole[: len(values)] = values
            region = zip(part.global_offset[axes:], part.data.shape, strict=True)
            part.data.copy_(whole[tuple(slice(start, start + size) for start, size in region)])


def arrays(tensors: Mapping[str, Tensor] | None) -> Arrays | None:
    """Converts tensors to numpy, half precision to float32."""
    if tensors is None:
        return None
    return {name: value.to(torch.promote_types(value.dtype, torch.float32)).numpy() for name, value in tensors.items()}


class Bits(NamedTuple):
    """Bits of a rank's weights and optimizer state before and after a step."""

    before: list[bytes]
    after: list[bytes]
    num_state_tensors: int
    is_empty: bool
    loss: float
    largest_gradient: float


def bits_around_a_step(
    groups: Groups, config: Config, parameters: Mapping[str, Any], batches: Sequence[GlobalBatch]
) -> Bits:
    """Trains on all batches but the last, then compares every bit around the last one."""
    built = build(groups, config, parameters)
    for number, batch in enumerate(batches[:-1]):
        run_step(built, groups, config, batch, number)
    before = _bits(built)
    totals = built.training.forward_backward(own_microbatches(batches[-1], groups, config))
    largest = max(float(shard.data.abs().max()) for shard in gradient_shards(built.model.sharded, groups))
    built.training.update(totals, config.optimizer.lr)
    num_states = sum(len(state) for inner in _inner(built) for state in inner.state.values())
    return Bits(before, _bits(built), num_states, totals.is_empty, totals.objective, largest)


def _inner(built: Built) -> list[torch.optim.Optimizer]:
    outer = getattr(built.model.optimizer.inner, "chained_optimizers", [built.model.optimizer.inner])
    return [megatrons.optimizer for megatrons in outer]


def _bits(built: Built) -> list[bytes]:
    tensors = [held_values(parameter) for chunk in built.model.chunks for parameter in chunk.parameters()]
    for inner in _inner(built):
        tensors += [main for group in inner.param_groups for main in group["params"]]
        tensors += [value for state in inner.state.values() for value in state.values() if isinstance(value, Tensor)]
    return [tensor.detach().flatten().view(torch.uint8).numpy().tobytes() for tensor in tensors]


def numeric_error(groups: Groups, config: Config, parameters: Mapping[str, Any], batch: GlobalBatch) -> str:
    """Returns the message of the NumericError that a step must raise before it changes a weight or a moment."""
    built = build(groups, config, parameters)
    before = _bits(built)
    try:
        totals = built.training.forward_backward(own_microbatches(batch, groups, config))
        built.training.update(totals, config.optimizer.lr)
    except NumericError as error:
        assert _bits(built) == before
        return str(error)
    raise AssertionError("the step raised nothing")


class HalfStep(NamedTuple):
    """Result of dynamic loss scaling in a step."""

    overflowed: bool
    loss_scale: float
    """Loss scale after the step."""
    changed: bool
    """Whether a weight or a moment of the optimizer has changed."""
    grad_norm: float
    """Gradient norm; nan where it overflowed."""


def scaled_steps(
    groups: Groups, config: Config, parameters: Mapping[str, Any], batches: Sequence[GlobalBatch]
) -> list[HalfStep]:
    """Trains steps in fp16, some of which may overflow."""
    built = build(groups, config, parameters)
    steps = []
    for batch in batches:
        before = _bits(built)
        totals = built.training.forward_backward(own_microbatches(batch, groups, config))
        update = built.training.update(totals, config.optimizer.lr)
        assert update is not None
        changed = before != _bits(built)
        steps.append(HalfStep(update.overflowed, built.model.optimizer.loss_scale(), changed, update.grad_norm))
    return steps


def scaled_gradients(
    groups: Groups, config: Config, parameters: Mapping[str, Any], batch: GlobalBatch, numerator_scales: Sequence[float]
) -> list[Arrays | None]:
    """Returns the gradients of one batch for each factor that the objective is multiplied by before backward."""
    built = build(groups, config, parameters)
    objective = Objective.from_config(config.loss)
    batches = broadcast_batches(
        own_microbatches(batch, groups, config),
        groups.layout.num_microbatches(len(batch), config.train.micro_batch_size),
        (MAIN_TERM,),
        config,
        groups,
    )
    found = []
    for numerator_scale in numerator_scales:
        accumulator = PairAccumulator((MAIN_TERM,), groups.device)
        built.model.optimizer.zero_grad()
        run_schedule(
            built.model.chunks,
            slice_for_rank(batches, groups),
            _scaled(objective, numerator_scale, config, groups),
            accumulator,
            config,
        )
        scale = numerator_scale * built.model.optimizer.loss_scale()
        finalize_gradients(built.model.sharded, StepSums(accumulator, {MAIN_TERM: 0.0}, gradient_scale=scale), groups)
        found.append(arrays(gather_whole(gradient_shards(built.model.sharded, groups))))
    return found


def _scaled(objective: Objective, numerator_scale: float, config: Config, groups: Groups) -> LossOfLogits:
    def loss(logits: Logits, batch: Microbatch) -> tuple[Tensor, Mapping[str, LossPair]]:
        pairs = objective.pairs(term_inputs(logits, batch, config, groups))
        return objective.scalar(pairs, {}, numerator_scale), pairs

    return loss


def logits_by_microbatch(
    groups: Groups, config: Config, parameters: Mapping[str, Any], batch: GlobalBatch
) -> list[Any]:
    """Returns this rank's logits [seq_local, batch, vocab_local] of each microbatch; empty outside of the last
    stage."""
    built = build(groups, config, parameters)
    count = groups.layout.num_microbatches(len(batch), config.train.micro_batch_size)
    batches = broadcast_batches(own_microbatches(batch, groups, config), count, (MAIN_TERM,), config, groups)
    seen: list[Any] = []
    run_forward(
        built.model.chunks,
        slice_for_rank(batches, groups),
        lambda logits, own: seen.append(logits.main.whole().numpy()),
        config,
    )
    return seen


class LogitsAndStep(NamedTuple):
    """Results of a rank for given weights."""

    logits: list[Any]
    """Logits as from `logits_by_microbatch`."""
    outcome: Outcome


def logits_and_a_step(
    groups: Groups, config: Config, parameters: Mapping[str, Any], batch: GlobalBatch
) -> LogitsAndStep:
    """Computes the logits of a batch, then makes an optimizer step on it, from the same weights."""
    logits = logits_by_microbatch(groups, config, parameters, batch)
    return LogitsAndStep(logits, train(groups, config, parameters, [batch]))


def logits_with_and_without_depths(
    groups: Groups, config: Config, parameters: Mapping[str, Any], batch: GlobalBatch
) -> list[tuple[int, bool, bool]]:
    """Counts the depths of each microbatch, and says whether there are none if none is wanted, and whether the main
    logits are the same bits then; empty outside of the last stage."""
    built = build(groups, config, parameters)
    count = groups.layout.num_microbatches(len(batch), config.train.micro_batch_size)
    shared = broadcast_batches(own_microbatches(batch, groups, config), count, (MAIN_TERM,), config, groups)
    whole = slice_for_rank(shared, groups)
    every: list[Logits] = []
    one: list[Logits] = []
    run_forward(built.model.chunks, whole, lambda logits, own: every.append(logits), config)
    alone_rows = [replace(row, mtp=()) for row in whole]
    run_forward(built.model.chunks, alone_rows, lambda logits, own: one.append(logits), config)
    return [
        (len(asked.mtp), alone.mtp == (), torch.equal(asked.main.whole(), alone.main.whole()))
        for asked, alone in zip(every, one, strict=True)
    ]


def losses_along(
    groups: Groups,
    config: Config,
    parameters: Mapping[str, Any],
    direction: Mapping[str, Any],
    steps: Sequence[float],
    batch: GlobalBatch,
) -> list[float]:
    """Returns the reported loss at parameters + step x direction for each step."""
    built = build(groups, config, parameters)
    found = []
    for step in steps:
        moved = {name: value + step * direction[name] for name, value in parameters.items()}
        set_parameters(built.model.chunks, groups, moved)
        found.append(built.training.forward_backward(own_microbatches(batch, groups, config)).objective)
    return found


def totals_by_source(
    groups: Groups, configs: Sequence[Config], parameters: Mapping[str, Any], batch: GlobalBatch
) -> list[tuple[Totals, ...]]:
    """Returns the totals of the sources in a step of each configuration."""
    built = [build(groups, config, parameters) for config in configs]
    return [
        one.training.forward_backward(own_microbatches(batch, groups, config)).sources
        for one, config in zip(built, configs, strict=True)
    ]
