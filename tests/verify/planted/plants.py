"""Faults of a run's ranks: each replaces a function or class of the product by name, or changes what the ranks get."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar
from unittest.mock import patch

from pydantic import BaseModel
from torch import nn

from mtrain.config import Config
from mtrain.core.step import step
from mtrain.data import loader
from mtrain.verify.core import samples, worker
from mtrain.verify.core.reach import shrink_chunks

_T = TypeVar("_T")
_M = TypeVar("_M", bound=nn.Module)
_S = TypeVar("_S", bound=BaseModel)


class Target(NamedTuple):
    """Function or class of a module."""

    owner: Any
    """Module or class that holds it."""
    name: str
    replacement: Any


@dataclass(frozen=True)
class Plant:
    """One fault."""

    config: Callable[[Config], Config] | None = None
    """Returns the ranks' configuration from the user's."""
    change_model: Callable[[Sequence[nn.Module]], None] | None = None
    """Changes the built chunks before they get weights and an optimizer."""
    target: Target | None = None

    def configured(self, config: Config) -> Config:
        """Returns the configuration of the ranks."""
        return config if self.config is None else self.config(config)

    @contextmanager
    def planted(self) -> Iterator[None]:
        """Plants the fault in this process while the block runs."""
        with ExitStack() as stack:
            if self.target is not None:
                stack.enter_context(patch.object(*self.target))
            if (change := self.change_model) is not None:

                def shrink(modules: Sequence[nn.Module]) -> None:
                    shrink_chunks(modules)
                    change(modules)

                stack.enter_context(patch.object(worker, "shrink_chunks", shrink))
            yield


def replacing(owner: Any, name: str, replacement: Any) -> Plant:
    """Replaces what a module or class has under this name."""
    return Plant(target=Target(owner, name, replacement))


def in_step(name: str, replacement: Any) -> Plant:
    """Replaces a function or class that does the work of a training step."""
    return replacing(step, name, replacement)


def in_worker(name: str, replacement: Any) -> Plant:
    """Replaces a function or class that a checked rank uses."""
    return replacing(worker, name, replacement)


def in_samples(name: str, replacement: Any) -> Plant:
    """Replaces a function or class that makes samples of a checked rank."""
    return replacing(samples, name, replacement)


def collating(replacement: Any) -> Plant:
    """Replaces the function that makes microbatches of samples."""
    return replacing(loader, "collate", replacement)


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
