"""What ranks do in the tests of preference losses under `Engine`; the functions for `Pool.run`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from torch.nn.functional import relu

from mtrain import (
    Datum,
    Engine,
    EvalResult,
    GroupMember,
    MtrainError,
    PreferenceValue,
    ScoredSequences,
    StepResult,
    preference_loss,
)
from mtrain.config import Config
from mtrain.core.ranks.groups import Groups
from tests.training.engine_ranks import free


@preference_loss(needs_reference=True)
def hinge(sequences: ScoredSequences, beta: float = 0.1) -> PreferenceValue:
    """The user's own loss of docs/training/preference.md."""
    pairs = sequences.pairs()
    chosen, rejected = beta * pairs.chosen.ratios, beta * pairs.rejected.ratios
    return sequences.value_of_pairs(relu(1 - (chosen - rejected)), pairs, (chosen, rejected))


class Seen(NamedTuple):
    """Results of a rank; the same on all ranks."""

    references: list[float]
    steps: list[StepResult]
    evaluation: EvalResult


def with_references(batch: Sequence[Datum], scores: Sequence[float]) -> list[Datum]:
    """Returns the batch with scores of a reference model."""
    return [
        replace(datum, member=None if datum.member is None else replace(datum.member, reference=score))
        for datum, score in zip(batch, scores, strict=True)
    ]


def trained(groups: Groups, config: Config, batch: Sequence[Datum], sizes: Sequence[int]) -> list[Seen]:
    """Makes two steps on one batch, in calls of each number of samples in `sizes` by a new engine; the reference is the
    model as it begins."""
    found = []
    with free(groups):
        for size in sizes:
            with Engine(config) as engine:
                references = engine.scores(batch)
                given = with_references(batch, references)
                steps = []
                for _ in range(2):
                    for start in range(0, len(given), size):
                        engine.forward_backward(given[start : start + size])
                    steps.append(engine.optim_step())
                found.append(Seen(references, steps, engine.evaluate([given])))
    return found


def messages(groups: Groups, config: Config, batches: Sequence[Sequence[Datum]]) -> list[str]:
    """Returns the message about each batch; an empty text where it is trained."""
    found = []
    with free(groups), Engine(config) as engine:
        for batch in batches:
            try:
                engine.forward_backward(batch)
                engine.optim_step()
                found.append("")
            except MtrainError as error:
                found.append(f"{type(error).__name__}: {error}")
    return found


def scores(groups: Groups, config: Config, batch: Sequence[Datum]) -> list[float]:
    """Scores a batch under the weights that a run begins from."""
    with free(groups), Engine(config) as engine:
        return engine.scores(batch)


def rewards(groups: Groups, config: Config, sequences: Sequence[Sequence[int]]) -> list[float]:
    """Returns the rewards of a reward model with its first weights."""
    return scores(groups, config, [Datum(ids, member=GroupMember(0, "chosen")) for ids in sequences])


def gone_on(groups: Groups, config: Config, batch: Sequence[Datum], folder: str) -> tuple[StepResult, StepResult]:
    """Returns the second step after a checkpoint of the first: of the engine that saved, and of one that loads."""
    with free(groups):
        with Engine(config) as engine:
            for _ in range(2):
                engine.forward_backward(batch)
                straight = engine.optim_step()
                if engine.step == 1:
                    engine.save(folder)
        return straight, loaded_step(config, batch, folder)


def loaded_step(config: Config, batch: Sequence[Datum], folder: str) -> StepResult:
    """Returns the step after a checkpoint."""
    with Engine(config) as engine:
        engine.load(folder)
        engine.forward_backward(batch)
        return engine.optim_step()


def loaded_elsewhere(groups: Groups, config: Config, batch: Sequence[Datum], folder: str) -> StepResult:
    """Runs `loaded_step` on the pool's ranks."""
    with free(groups):
        return loaded_step(config, batch, folder)


def bare(groups: Groups, config: Config) -> None:
    """Asks for the model without its adapters."""
    with free(groups), Engine(config) as engine, engine.adapters_off():
        raise AssertionError("refused")


def evaluated(groups: Groups, config: Config, batch: Sequence[Datum]) -> EvalResult:
    """Evaluates the model with its first weights."""
    with free(groups), Engine(config) as engine:
        return engine.evaluate([batch])
