"""Replaceable parts of a checked run: a fault replaces one of them and never changes a module."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from pydantic import BaseModel
from torch import nn

from mtrain.arch.lr import LearningRate, learning_rate
from mtrain.config import Config
from mtrain.core.batch.collate import Collate, collate
from mtrain.core.batch.datum import Datum, sample_of
from mtrain.core.batch.sample import Sample, TokenizedSample
from mtrain.core.engine.optimizer import Optimizer
from mtrain.core.ranks.groups import Groups
from mtrain.core.step.step import StepFunctions
from mtrain.data.loader import StepLoader
from mtrain.data.samples.sft import sample_of_record

_T = TypeVar("_T")
_M = TypeVar("_M", bound=nn.Module)
_S = TypeVar("_S", bound=BaseModel)


def _unchanged(chunks: Sequence[nn.Module]) -> None:
    pass


def _sound_functions(groups: Groups) -> StepFunctions:
    return StepFunctions()


@dataclass(frozen=True)
class Collaborators:
    """Parts of a run that a fault can replace, in order of use; the reference uses none."""

    config: Callable[[Config], Config] = lambda config: config
    """Returns the ranks' configuration from the user's."""
    loader: type[StepLoader] = StepLoader
    of_datum: Callable[[Datum, str, Config, Sequence[str]], Sample] = sample_of
    """Makes a sample from a user's `Datum`."""
    of_record: Callable[[TokenizedSample, int, int, Sequence[str]], Sample] = sample_of_record
    """Makes a sample from the tokens of a record."""
    collate: Collate = collate
    """Makes microbatches of samples, from the run's own data or others."""
    change_model: Callable[[Sequence[nn.Module]], None] = _unchanged
    """Changes the built chunks before they get weights and an optimizer."""
    optimizer: type[Optimizer] = Optimizer
    step: Callable[[Groups], StepFunctions] = _sound_functions
    rate: LearningRate = learning_rate


SOUND = Collaborators()


def become(thing: _T, kind: type[_T]) -> None:
    """Changes the class of an object to a subclass without own state; its attributes stay."""
    assert issubclass(kind, type(thing))
    thing.__class__ = kind


def modules(chunks: Sequence[nn.Module], kind: type[_M]) -> Iterator[_M]:
    """Yields all modules of a kind."""
    return (module for chunk in chunks for module in chunk.modules() if isinstance(module, kind))


def with_values(section: _S, values: Mapping[str, Any]) -> _S:
    """Returns a section with other, unvalidated values."""
    assert values.keys() <= type(section).model_fields.keys(), f"{type(section).__name__} has no such keys: {values}"
    return section.model_copy(update=values)


def configured(name: str, change: Callable[[Any], Mapping[str, Any]]) -> Callable[[Config], Config]:
    """Returns a function that changes a section of a configuration; `change` maps the section to new values."""

    def changed(config: Config) -> Config:
        section = getattr(config, name)
        return with_values(config, {name: with_values(section, change(section))})

    return changed


def step_of(**functions: Any) -> Callable[[Groups], StepFunctions]:
    """Returns a maker of step functions that replaces some."""
    return lambda groups: StepFunctions(**functions)


ALONE = torch.distributed.ProcessGroup(0, 1)  # type: ignore[call-arg]
"""Process group of this rank alone; never communicates."""
