"""Checks that docs/proof/faults.md agrees with the tests."""

from __future__ import annotations

import re

import pytest

from tests.fault_table import COMMAND, PAGE, Row, page, rows
from tests.paths import ROOT


def test_every_injected_fault_has_its_row(request: pytest.FixtureRequest) -> None:
    """Checks the tests that this run collected: all of them where the whole suite runs."""
    lines = PAGE.read_text()
    missing = {
        row.cells()
        for item in request.session.items
        if (mark := item.get_closest_marker("fault")) is not None
        and (row := Row.of(mark, item.nodeid)).cells() not in lines
    }
    assert missing == set(), f"run `{COMMAND}`"


def test_every_row_is_shown_by_a_test_that_exists() -> None:
    shown = re.findall(r"\| `([\w/]+\.py)::(\w+)` \|", PAGE.read_text())
    assert shown
    missing = [f"{file}::{name}" for file, name in shown if f"def {name}(" not in (ROOT / "tests" / file).read_text()]
    assert missing == []


def test_the_page_takes_the_slowest_of_several_injections() -> None:
    row = Row("ranks", "kill -9", "named", 5, "tests/test_x.py::test_y")
    text = page([(row, 0.01), (row, 2.04)])
    assert "| kill -9 | named | 5 | `test_x.py::test_y` | 2.0 s |" in text
    assert "1 faults" in text


def test_the_page_is_read_back() -> None:
    """Rows that are not measured again stay as they are."""
    assert page(rows(PAGE.read_text())) == PAGE.read_text()
