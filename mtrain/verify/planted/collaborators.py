"""What a checked run is made of: a fault is planted by handing it another one of these, never by changing a module."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from pydantic import BaseModel
from torch import nn

from mtrain.config import Config
from mtrain.data.collate import Collate, collate
from mtrain.data.datum import Datum, sample_of
from mtrain.data.loader import StepLoader
from mtrain.data.samples.sample import Sample
from mtrain.data.samples.sft import sample_of_record
from mtrain.data.samples.tokenized import TokenizedSample
from mtrain.mcore.distributed.groups import Groups
from mtrain.mcore.engine.optimizer import Optimizer
from mtrain.plan.lr import LearningRate, learning_rate
from mtrain.training.step import StepParts

_T = TypeVar("_T")
_M = TypeVar("_M", bound=nn.Module)
_S = TypeVar("_S", bound=BaseModel)


def _as_it_is(config: Config) -> Config:
    return config


def _unchanged(chunks: Sequence[nn.Module]) -> None:
    pass


def _sound_parts(groups: Groups) -> StepParts:
    return StepParts()


@dataclass(frozen=True)
class Collaborators:
    """In the order in which a run takes them up. The reference has none of them."""

    config: Callable[[Config], Config] = _as_it_is
    """What the ranks take for the user's configuration."""
    loader: type[StepLoader] = StepLoader
    of_datum: Callable[[Datum, str, Config, Sequence[str]], Sample] = sample_of
    """What a program hands over as a sample."""
    of_record: Callable[[TokenizedSample, int, int, Sequence[str]], Sample] = sample_of_record
    """The tokens of a record of a file as a sample."""
    collate: Collate = collate
    """Samples to microbatches, of the run's own data and of others."""
    change_model: Callable[[Sequence[nn.Module]], None] = _unchanged
    """Of the chunks as they are built, before they have weights and an optimizer."""
    optimizer: type[Optimizer] = Optimizer
    step: Callable[[Groups], StepParts] = _sound_parts
    rate: LearningRate = learning_rate


SOUND = Collaborators()


def become(thing: _T, kind: type[_T]) -> None:
    """Makes an object one of a subclass that has no state of its own: what it holds stays, what it does changes."""
    assert issubclass(kind, type(thing))
    thing.__class__ = kind


def modules(chunks: Sequence[nn.Module], kind: type[_M]) -> Iterator[_M]:
    """All of a kind."""
    return (module for chunk in chunks for module in chunk.modules() if isinstance(module, kind))


def with_values(section: _S, values: Mapping[str, Any]) -> _S:
    """A section with other values, which no rule looks at."""
    assert values.keys() <= type(section).model_fields.keys(), f"{type(section).__name__} has no such keys: {values}"
    return section.model_copy(update=values)


def configured(name: str, change: Callable[[Any], Mapping[str, Any]]) -> Callable[[Config], Config]:
    """A configuration with other values in the section of this name, which follow from those that it has."""

    def changed(config: Config) -> Config:
        section = getattr(config, name)
        return with_values(config, {name: with_values(section, change(section))})

    return changed


def step_of(**parts: Any) -> Callable[[Groups], StepParts]:
    """A step with some other parts, whatever the groups."""
    return lambda groups: StepParts(**parts)


ALONE = torch.distributed.ProcessGroup(0, 1)  # type: ignore[call-arg]
"""A group of this rank alone, which never communicates."""
