"""Which tests run at night: `make test-nightly`.

The mark `nightly` is for what repeats, at a high price, something that a cheaper test of the suite shows. One rule
gives it: rows of eight ranks, where the same test has rows of fewer, and rows of four, where it has four rows of fewer.
Those have every axis of what the test is about; the promise itself (ALWAYS) is tested on every layout, all axes
together among them, day and night. The rest is marked by hand.
"""

from __future__ import annotations

import math
from collections import defaultdict

import pytest

from mtrain.plan.layout import Layout
from tests.parity.cases import Case

ALWAYS = ("tests/parity/layouts/test_layouts.py", "tests/mcore/distributed/")
LIMITS = ((8, 1), (4, 4))
"""So many ranks or more wait for the night where the test has so many rows of fewer ranks."""


def num_ranks(value: object) -> int:
    """Of the largest layout in a parameter of a test."""
    match value:
        case Layout():
            return value.world_size
        case Case():
            return math.prod(value.layout.get(axis, 1) for axis in ("tp", "pp", "cp", "dp"))
        case tuple() if hasattr(value, "case"):  # a row of tests/parity/compare.py, which takes torch to import
            return num_ranks(value.case)
        case list() | tuple():
            return max(map(num_ranks, value), default=1)
        case _:
            return 1


class Nightly:
    """Marks tests before `-m` chooses among them."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Adds the mark."""
        rows: dict[str, list[tuple[pytest.Item, int]]] = defaultdict(list)
        for item in items:
            if item.nodeid.startswith(ALWAYS):
                continue
            if isinstance(item, pytest.Function) and "pool" in item.fixturenames and hasattr(item, "callspec"):
                ranks = num_ranks(list(item.callspec.params.values()))
                rows[item.nodeid.partition("[")[0]].append((item, ranks))
        for of_one_test in rows.values():
            for many, enough in LIMITS:
                large = [item for item, ranks in of_one_test if ranks >= many]
                if len(of_one_test) - len(large) >= enough:
                    for item in large:
                        item.add_marker(pytest.mark.nightly)
