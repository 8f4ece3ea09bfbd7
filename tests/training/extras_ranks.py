"""What ranks do in the tests of extras; the functions for `Pool.run`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from mtrain import (
    Datum,
    Engine,
    LossFunction,
    LossPair,
    MtrainError,
    StepResult,
    TermInputs,
    needs_extras,
    per_token,
    weigh,
)
from mtrain.config import Config
from mtrain.core.ranks.groups import Groups
from tests.training.engine_ranks import free


@needs_extras("factors", "scale")
def scaled(inputs: TermInputs) -> LossPair:
    """Does with extras what weights do; sees whole microbatches."""
    factors = inputs.extras["factors"] * inputs.extras["scale"]
    return weigh(factors * inputs.logits.cross_entropy(inputs.labels), inputs)


@per_token
@needs_extras("factors", "scale")
def scaled_by_token(inputs: TermInputs) -> LossPair:
    """Does the same for a few tokens at a time."""
    return scaled(inputs)


@needs_extras(scale="factors")
def scaled_where_asked(inputs: TermInputs, scale: float | None = None) -> LossPair:
    """Reads an extra only if an option is given."""
    losses = inputs.logits.cross_entropy(inputs.labels)
    return weigh(losses if scale is None else losses * inputs.extras["factors"], inputs)


@per_token
def unmarked(inputs: TermInputs) -> LossPair:
    """Reads extras without declaring them."""
    return weigh(inputs.extras["factors"] * inputs.logits.cross_entropy(inputs.labels), inputs)


class Found(NamedTuple):
    """Results of one step."""

    loss: float
    grad_norm: float


class Seen(NamedTuple):
    """Results by the way in which the factors came: weights or extras."""

    weights: Found
    extras: list[Found]
    """Results of each loss function."""
    refusals: list[tuple[type[MtrainError], str]]
    after: Found
    """Result of a step with weights, after the refusals."""


def by_weights_and_extras(
    groups: Groups,
    config: Config,
    losses: Sequence[LossFunction],
    weighted: Sequence[Datum],
    given: Sequence[Datum],
    wrong: Sequence[Datum],
) -> Seen:
    """Returns steps that have to agree, and the messages of refusals; the weights never change."""
    with free(groups), Engine(config) as engine:
        weights = _step(engine, weighted)
        found = [_step(engine, given, loss) for loss in losses]
        refusals = [_refused(engine, [*given[:2], each], losses[0]) for each in wrong]
        if groups.layout.pp == 1:  # the first stages would wait for the last one
            refusals.append(_refused(engine, given, unmarked))
        return Seen(weights, found, refusals, _step(engine, weighted))


def _step(engine: Engine, batch: Sequence[Datum], loss: LossFunction | None = None) -> Found:
    engine.forward_backward(batch, loss)
    done = engine.optim_step(lr=0.0)
    return Found(done.loss, done.grad_norm)


def _refused(engine: Engine, batch: Sequence[Datum], loss: LossFunction) -> tuple[type[MtrainError], str]:
    try:
        engine.forward_backward(batch, loss)
    except MtrainError as error:
        return type(error), str(error)
    raise AssertionError("nothing was refused")


def steps_of_config(groups: Groups, config: Config, batch: Sequence[Datum], num_steps: int) -> list[StepResult]:
    """Makes steps over the same batch, with the loss of the configuration; its second half is a call of its own."""
    done, half = [], len(batch) // 2
    with free(groups), Engine(config) as engine:
        for _ in range(num_steps):
            for part in (batch[:half], batch[half:]):
                engine.forward_backward(part)
            done.append(engine.optim_step())
    return done
