"""What a row of the table of known issues says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from mtrain.config import Config
from mtrain.config.known_issues import Refusal
from mtrain.plan.layout import Layout

VERSION = "0.16.1"
"""Of megatron-core: what the table was read from."""

Outcome = Literal["fixed", "refused", "noted"]
"""fixed: absent by construction. refused: a ConfigError before the run starts. noted: allowed, and said in the log."""

Condition = Callable[[Config, Layout], bool]

ISSUE_TESTS = "tests/known_issues/test_issues.py"
SPEC_TESTS = "tests/known_issues/test_whole_steps.py"


class Place(NamedTuple):
    """Where megatron-core does it: code that another release may move, but not change, while the fault is there."""

    path: str
    """File below megatron/core."""
    symbol: str
    """Function, method or class around the code, with dots; empty at the level of the module."""
    quote: str
    """Part of one line that stands there."""

    def __str__(self) -> str:
        return f"{self.path}::{self.symbol}" if self.symbol else self.path


@dataclass(frozen=True)
class KnownIssue:
    """One fault of megatron-core and what becomes of it here."""

    name: str
    fault: str
    """One sentence on plain Megatron-Core."""
    places: tuple[Place, ...]
    condition: str
    """When plain Megatron-Core shows it, in words."""
    applies: Condition
    """The same as a predicate; of a refused row, when a configuration would be refused."""
    outcome: Outcome
    here: str
    """What happens instead, one sentence."""
    modules: tuple[str, ...]
    """Files that see to it."""
    tests: tuple[str, ...]
    """`file::function`; show the fault and its absence."""
    refused: tuple[dict[str, Any], ...] = ()
    """Contents of `model.megatron` that a refused row turns away."""


def issue_test(name: str) -> str:
    """A test of this table's own file."""
    return f"{ISSUE_TESTS}::test_{name}"


def spec_test(name: str) -> str:
    """A test of whole steps in plain Megatron-Core."""
    return f"{SPEC_TESTS}::test_{name}"


def always(config: Config, layout: Layout) -> bool:
    """Every run is concerned."""
    return True


def breaks(refusal: Refusal) -> Condition:
    """Whether the layer that reads configurations refuses."""
    return lambda config, layout: any(refusal.messages(config))


def has_field(*prefixes: str) -> Condition:
    """Whether a field that begins so was passed to megatron-core."""
    return lambda config, layout: any(name.startswith(prefixes) for name in config.model.megatron)
