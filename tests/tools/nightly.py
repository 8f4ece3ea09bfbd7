"""Chooses the tests that run at night: `make test-nightly`.

The mark `nightly` is for tests that repeat, at a high price, something that a cheaper test of the suite shows. One rule
gives it to rows of tests that start ranks: by day a test runs as few rows as cover every axis of a layout and every
value of its other parameters that occurs in any of its rows, with four ranks where that is enough. The night runs the
others. The promise itself (PAIRS) has every pair of axes by day, and every injected fault of docs/proof/faults.md keeps
a row of this rule. The rest is marked by hand, next to the test that shows the same, or named in tests/night.txt. Tests
of hypothesis run by day with a third of their examples, and at night with all.
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import combinations
from typing import Any

import pytest
from hypothesis import is_hypothesis_test, settings

from mtrain.arch.layout import Layout
from tests.parity.cases import Case
from tests.paths import ROOT

ALWAYS = "tests/core/distributed/"
PAIRS = "tests/parity/layouts/test_layouts.py"
FEW_RANKS = 4
_SETTINGS = "_hypothesis_internal_use_settings"
FEWER, FEWEST = 3, 10
"""Factor between the examples of a drawn test at night and by day, and the smallest number that it leaves by day."""


def layouts_of(value: object) -> Iterator[Mapping[str, Any]]:
    """Yields the layouts in a parameter of a test, each as the keys of the section `layout`, and `dp`."""
    match value:
        case Layout():
            yield dataclasses.asdict(value)
        case Case():
            yield value.layout
        case tuple() if hasattr(value, "case"):  # a row of tests/parity/compare.py, which takes torch to import
            yield value.case.layout
        case list() | tuple():
            for each in value:
                yield from layouts_of(each)
        case _:
            return


def num_ranks(value: object) -> int:
    """Returns the number of ranks of the largest layout in a parameter of a test."""
    degrees = [[layout.get(axis, 1) for axis in ("tp", "pp", "cp", "dp")] for layout in layouts_of(value)]
    return max((math.prod(each) for each in degrees), default=1)


def axes_of(layout: Mapping[str, Any]) -> set[str]:
    """Names the axes that a layout uses; the kinds of context parallelism are different axes."""
    axes = {axis for axis in ("tp", "pp", "vpp", "dp", "ep", "etp") if layout.get(axis, 1) != 1}
    axes |= {"sp"} if layout.get("sp") else set()
    axes |= {f"cp {layout.get('cp_comm', 'allgather')}"} if layout.get("cp", 1) != 1 else set()
    return axes | ({"uneven stages"} if any(layout.get(key) for key in layout if key.endswith("_layers")) else set())


def features(item: pytest.Function) -> frozenset[str]:
    """Collects the features of a test's row: its injected fault, axes of its layouts, its changes, other parameters."""
    fault = item.get_closest_marker("fault")
    found = set() if fault is None else {f"fault {fault.args}"}
    for name, value in item.callspec.params.items():
        layouts = list(layouts_of(value))
        found.update(*map(axes_of, layouts))
        several: list[Any] = value if isinstance(value, list) else [value]
        found |= {f"row {row.name}" for row in several if hasattr(row, "changes")}
        match value:
            case Mapping():
                found |= {f"{name}.{key}={one!r}" for key, one in value.items()}
            case _ if not layouts:
                found.add(f"{name}={value!r}")
    return frozenset(found)


def covering(rows: Collection[tuple[frozenset[str], int]], together: int = 1) -> set[int]:
    """Chooses rows that together have every feature of all rows, preferring few ranks; returns their indices.

    Args:
        rows: Features and number of ranks of each row.
        together: Number of features whose combinations must occur: those of one row occur together in one of the chosen
            rows.
    """
    wanted = [{each for size in range(1, together + 1) for each in combinations(sorted(has), size)} for has, _ in rows]
    ranks = [count for _, count in rows]
    missing = set().union(*wanted)
    chosen: set[int] = set()
    while missing or not chosen:
        best = min(
            (index for index in range(len(wanted)) if wanted[index] & missing or not missing),
            key=lambda index: (ranks[index] > FEW_RANKS, -len(wanted[index] & missing), ranks[index], index),
        )
        chosen.add(best)
        missing -= wanted[best]
    return chosen


def draw_fewer_examples(items: Iterable[pytest.Item]) -> None:
    """Reduces the number of examples of the tests that hypothesis runs."""
    for test in {item.obj for item in items if isinstance(item, pytest.Function) and is_hypothesis_test(item.obj)}:
        whole: settings = vars(test)[_SETTINGS]
        count = min(whole.max_examples, max(FEWEST, whole.max_examples // FEWER))
        vars(test)[_SETTINGS] = settings(whole, max_examples=count)


def named_tests(text: str) -> set[str]:
    """Reads the tests and rows that a text like tests/night.txt names, one a line; two blanks and # begin a comment."""
    lines = (line.partition("  #")[0].rstrip() for line in text.splitlines())
    return {line for line in lines if line and not line.startswith("#")}


class Nightly:
    """Plugin that marks tests before `-m` chooses among them."""

    def __init__(self) -> None:
        self.rows: dict[str, list[tuple[frozenset[str], bool]]] = {}
        """Test to which the rule applies -> features of each row, and whether the row waits for the night."""
        self.unknown: set[str] = set()
        """Names in tests/night.txt that no test of their files has."""

    def has(self, file: str) -> bool:
        """Says whether the tests of a file were collected."""
        return any(test.startswith(f"{file}::") for test in self.rows)

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Adds the mark `nightly` to the rows that are not needed by day, and draws fewer examples by day."""
        if "not nightly" in config.option.markexpr:
            draw_fewer_examples(items)
        named = named_tests((ROOT / "tests" / "night.txt").read_text())
        files, matched = set(), set()
        for item in items:
            files.add(item.nodeid.partition("::")[0])
            names = named & {item.nodeid, item.nodeid.partition("[")[0]}
            if names:
                item.add_marker(pytest.mark.nightly)
                matched |= names
        self.unknown = {name for name in named - matched if name.partition("::")[0] in files}
        rows: dict[str, list[pytest.Function]] = defaultdict(list)
        for item in items:
            if item.nodeid.startswith(ALWAYS) or item.get_closest_marker("nightly") is not None:
                continue
            if isinstance(item, pytest.Function) and "pool" in item.fixturenames and hasattr(item, "callspec"):
                rows[item.nodeid.partition("[")[0]].append(item)
        for test, of_one_test in rows.items():
            known = [(features(item), num_ranks(list(item.callspec.params.values()))) for item in of_one_test]
            by_day = covering(known, 2 if test.startswith(PAIRS) else 1)
            for index in set(range(len(of_one_test))) - by_day:
                of_one_test[index].add_marker(pytest.mark.nightly)
            self.rows[test] = [(has, index not in by_day) for index, (has, _) in enumerate(known)]
