"""Row of the table of known issues."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from mtrain.arch.layout import Layout
from mtrain.base.ground import MEGATRON_CORES, found_megatron
from mtrain.config import Config
from mtrain.config.known_issues import Refusal

VERSIONS = MEGATRON_CORES
"""Versions of megatron-core in whose sources each row was looked up."""
VERSION = VERSIONS[0]


@functools.cache
def installed() -> str:
    """Returns the version that tests run on, which is one of VERSIONS."""
    found = found_megatron()
    assert found is not None
    assert found.version in VERSIONS
    return found.version


Outcome = Literal["fixed", "refused", "noted", "absent"]
"""Outcome of a fault. fixed: absent by construction. refused: a ConfigError before the run. noted: allowed, and
logged. absent: it cannot arise, since nothing here calls that code."""

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
    version: str | None = None
    """Version whose source has it so; None for all of them."""

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
    gone_in: str | None = None
    """First of VERSIONS without the fault; None while all have it."""
    since: str = VERSIONS[0]
    """First of VERSIONS with the fault."""
    findings: tuple[int, ...] = ()
    """Numbers of the findings of NVIDIA/Megatron-LM#7452 that it is, or is a part of."""

    def bites(self, version: str) -> bool:
        """Says whether a version of VERSIONS has the fault."""
        end = len(VERSIONS) if self.gone_in is None else VERSIONS.index(self.gone_in)
        return VERSIONS.index(self.since) <= VERSIONS.index(version) < end

    def places_in(self, version: str) -> list[Place]:
        """Lists where a version has the fault."""
        return [place for place in self.places if place.version in (None, version)]


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

    def refused(config: Config, layout: Layout) -> bool:
        given = config.model.megatron
        return any(field in given and refusal.breaks(given[field], config) for field in refusal.fields)

    return refused


def has_field(*prefixes: str) -> Condition:
    """Makes the condition that a field with one of these prefixes was passed to megatron-core."""
    return lambda config, layout: any(name.startswith(prefixes) for name in config.model.megatron)
