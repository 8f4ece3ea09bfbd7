"""The table of docs/training/serve.md, layout by call, is what is measured now."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.parity.cases import Case
from tests.pool import Pool
from tests.serve.table import column, measured, printed
from tests.serve.test_clients import LAYOUTS, named

FACTOR = 4.0
"""How far a figure may be from the printed one. It is the worst rounding of some tokens, half a unit in the last place
to two of them: another processor or another torch adds in another order, and another token is the worst one."""
PROMISED = 1e-5


def test_the_table_has_every_layout() -> None:
    table = printed()
    assert list(table) == [column(one) for one in LAYOUTS]
    assert all(0 < each < PROMISED for calls in table.values() for each in calls.values())


@pytest.mark.nightly
@pytest.mark.waits
@pytest.mark.parametrize("one", LAYOUTS, ids=named)
def test_the_table_has_what_each_call_deviates_by(pool: Pool, tmp_path: Path, one: Case) -> None:
    table, found = printed()[column(one)], measured(pool, one, tmp_path / "base")
    assert list(found) == list(table)
    assert {call: each for call, each in found.items() if not table[call] / FACTOR < each < table[call] * FACTOR} == {}
