"""Which rows wait for the night: those of many ranks, where the same test has smaller ones."""

from typing import Any

import pytest

from mtrain.plan.layout import Layout
from tests.parity.cases import case
from tests.parity.compare import Row
from tests.paths import ROOT
from tests.tools.nightly import num_ranks

pytest_plugins = ["pytester"]
SUITE = """
import pytest
from mtrain.plan.layout import Layout

@pytest.fixture
def pool(): ...

@pytest.mark.parametrize("layout", [Layout(tp=2), Layout(tp=2, pp=2, dp=2)], ids=str)
def test_small_and_large(pool, layout): ...

@pytest.mark.parametrize("layout", [*(Layout(dp=n) for n in (1, 2, 3, 4))], ids=str)
def test_four_ranks_beside_three_rows(pool, layout): ...

@pytest.mark.parametrize("layout", [*(Layout(dp=n) for n in (1, 2, 3, 4)), Layout(tp=2)], ids=str)
def test_four_ranks_beside_four_rows(pool, layout): ...

@pytest.mark.parametrize("layout", [Layout(dp=8)], ids=str)
def test_large_alone(pool, layout): ...

@pytest.mark.parametrize("layout", [Layout(), Layout(dp=8)], ids=str)
def test_without_ranks(layout): ...
"""
SMALL = ["tp1-pp1-cp1-dp1", "tp1-pp1-cp1-dp2", "tp1-pp1-cp1-dp3", "tp2-pp1-cp1-dp1"]


@pytest.mark.parametrize(
    ("value", "ranks"),
    [
        (Layout(tp=2, pp=2, cp=2), 8),
        (case(tp=2, sp=True, dp=3), 6),
        ([Row("small", {}, case(), []), Row("large", {}, case(cp=4, dp=2), [])], 8),
        ({"no": "layout"}, 1),
        ([], 1),
    ],
)
def test_ranks_are_those_of_the_largest_layout(value: Any, ranks: int) -> None:
    assert num_ranks(value) == ranks


@pytest.mark.parametrize(
    ("chosen", "names"),
    [
        ("nightly", ["four_ranks_beside_four_rows[tp1-pp1-cp1-dp4]", "small_and_large[tp2-pp2-cp1-dp2]"]),
        (
            "not nightly",
            [
                *(f"four_ranks_beside_four_rows[{name}]" for name in SMALL),
                *(f"four_ranks_beside_three_rows[{name}]" for name in [*SMALL[:3], "tp1-pp1-cp1-dp4"]),
                "large_alone[tp1-pp1-cp1-dp8]",
                "small_and_large[tp2-pp1-cp1-dp1]",
                "without_ranks[tp1-pp1-cp1-dp1]",
                "without_ranks[tp1-pp1-cp1-dp8]",
            ],
        ),
    ],
)
def test_a_row_of_many_ranks_waits_only_where_there_are_enough_smaller_ones(
    pytester: pytest.Pytester, chosen: str, names: list[str]
) -> None:
    pytester.makeini("[pytest]\nmarkers = nightly\n")
    pytester.syspathinsert(ROOT)
    pytester.makeconftest(
        "from tests.tools.nightly import Nightly\n"
        "def pytest_configure(config): config.pluginmanager.register(Nightly())\n"
    )
    pytester.makepyfile(SUITE)
    passed, _, failed = pytester.inline_run("-m", chosen, "-p", "no:cacheprovider").listoutcomes()
    assert not failed
    assert sorted(report.nodeid.partition("::test_")[2] for report in passed) == sorted(names)


def test_the_suite_leaves_them_out_and_a_target_runs_them() -> None:
    assert '-m "not slurm and not nightly"' in (ROOT / "tests/run.sh").read_text()
    assert "-m nightly" in (ROOT / "Makefile").read_text()
