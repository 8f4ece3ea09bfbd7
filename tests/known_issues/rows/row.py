"""Row of the table of known issues."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from mtrain.config import Config
from mtrain.config.known_issues import Refusal
from mtrain.plan.layout import Layout

VERSION = "0.16.1"
"""Version of megatron-core from which the table was made."""

Outcome = Literal["fixed", "refused", "noted"]
"""Outcome of a fault. fixed: absent by construction. refused: a ConfigError before the run. noted: allowed, and
logged."""

Condition = Callable[[Config, Layout], bool]

ISSUE_TESTS = "tests/known_issues/test_issues.py"
SPEC_TESTS = "tests/known_issues/test_whole_steps.py"


class Place(NamedTuple):
    """Place of a fault in megatron-core: code that another release may move, but not change, while the fault is
    there."""

    path: str
    """File below megatron/core."""
    symbol: str
    """Function, method or class around the code, with dots; empty at the level of the module."""
    quote: str
    """Part of one line of the code."""

    def __str__(self) -> str:
        return f"{self.path}::{self.symbol}" if self.symbol else self.path


@dataclass(frozen=True)
class KnownIssue:
    """One fault of megatron-core and what we do about it."""

    name: str
    fault: str
    """Description of the fault in plain Megatron-Core, one sentence."""
    places: tuple[Place, ...]
    condition: str
    """Condition under which plain Megatron-Core shows it, in words."""
    applies: Condition
    """Condition as a predicate; for a refused row, whether a configuration would be refused."""
    outcome: Outcome
    here: str
    """Description of what happens instead, one sentence."""
    modules: tuple[str, ...]
    """Files that implement it."""
    tests: tuple[str, ...]
    """Tests as `file::function`, which show the fault and its absence."""
    refused: tuple[dict[str, Any], ...] = ()
    """Contents of `model.megatron` that a refused row refuses."""


def issue_test(name: str) -> str:
    """Names a test of this table's own file."""
    return f"{ISSUE_TESTS}::test_{name}"


def spec_test(name: str) -> str:
    """Names a test of whole steps in plain Megatron-Core."""
    return f"{SPEC_TESTS}::test_{name}"


def always(config: Config, layout: Layout) -> bool:
    """Applies to every run."""
    return True


def breaks(refusal: Refusal) -> Condition:
    """Makes the condition that the layer which reads configurations refuses."""
    return lambda config, layout: any(refusal.messages(config))


def has_field(*prefixes: str) -> Condition:
    """Makes the condition that a field with one of these prefixes was passed to megatron-core."""
    return lambda config, layout: any(name.startswith(prefixes) for name in config.model.megatron)
