"""Checks which rows wait for the night: those whose axes and values other rows of the same test have by day."""

from itertools import combinations
from typing import Any

import pytest

from mtrain.arch.layout import Layout
from tests.parity.cases import case
from tests.parity.compare import Row
from tests.parity.layouts.test_layouts import RUNS
from tests.paths import ROOT
from tests.tools.nightly import Nightly, axes_of, covering, named_tests, num_ranks

pytest_plugins = ["pytester"]
SUITE = """
import pytest
from mtrain.arch.layout import Layout

@pytest.fixture
def pool(): ...

AXES = [Layout(), Layout(tp=2), Layout(tp=2, pp=2), Layout(dp=2), Layout(cp=2), Layout(tp=2, cp=2, dp=2)]

@pytest.mark.parametrize("layout", AXES, ids=str)
def test_axes(pool, layout): ...

@pytest.mark.parametrize("layout", [Layout(cp=2), Layout(cp=2, cp_comm="ulysses"), Layout(tp=2, sp=True)], ids=str)
def test_kinds(pool, layout): ...

@pytest.mark.parametrize("changes", [{"a": 1}, {"a": 1, "b": 2}, {"a": 2}, {"b": 2}], ids=str)
def test_changes(pool, changes): ...

@pytest.mark.parametrize(("name", "layout"), [("x", Layout(dp=2)), ("y", Layout(dp=2)), ("x", Layout(dp=4))], ids=str)
def test_names(pool, name, layout): ...

@pytest.mark.parametrize("layout", [
    Layout(dp=2),
    pytest.param(Layout(dp=4), marks=pytest.mark.fault("ranks", "one")),
    pytest.param(Layout(dp=3), marks=pytest.mark.fault("ranks", "one")),
], ids=str)
def test_faults(pool, layout): ...

@pytest.mark.parametrize("layout", [Layout(dp=8)], ids=str)
def test_large_alone(pool, layout): ...

@pytest.mark.parametrize("layout", [Layout(), Layout(dp=8)], ids=str)
def test_without_ranks(layout): ...
"""
PLUGIN = """
from tests.tools.nightly import Nightly
def pytest_configure(config): config.pluginmanager.register(Nightly())
"""
BY_NIGHT = [
    "axes[tp1-pp1-cp1-dp1]",
    "axes[tp2-pp1-cp1-dp1]",
    "axes[tp2-pp1-cp2-dp2]",
    "changes[{'a': 1}]",
    "changes[{'b': 2}]",
    "faults[tp1-pp1-cp1-dp2]",
    "faults[tp1-pp1-cp1-dp4]",
    "names[x-tp1-pp1-cp1-dp4]",
]
BY_DAY = [
    "axes[tp1-pp1-cp1-dp2]",
    "axes[tp1-pp1-cp2-dp1]",
    "axes[tp2-pp2-cp1-dp1]",
    "changes[{'a': 1, 'b': 2}]",
    "changes[{'a': 2}]",
    "faults[tp1-pp1-cp1-dp3]",
    "kinds[tp1-pp1-cp2-dp1]",
    "kinds[tp1-pp1-cp2ulysses-dp1]",
    "kinds[tp2sp-pp1-cp1-dp1]",
    "large_alone[tp1-pp1-cp1-dp8]",
    "names[x-tp1-pp1-cp1-dp2]",
    "names[y-tp1-pp1-cp1-dp2]",
    "without_ranks[tp1-pp1-cp1-dp1]",
    "without_ranks[tp1-pp1-cp1-dp8]",
]


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


def test_what_there_is_to_a_row_is_there_by_day(pytester: pytest.Pytester) -> None:
    pytester.makeini("[pytest]\nmarkers = nightly\n")
    pytester.syspathinsert(ROOT)
    pytester.makeconftest(PLUGIN)
    pytester.makepyfile(SUITE)
    names = {}
    for chosen in ("nightly", "not nightly"):
        passed, _, failed = pytester.inline_run("-m", chosen, "-p", "no:cacheprovider").listoutcomes()
        assert not failed
        names[chosen] = sorted(report.nodeid.partition("::test_")[2] for report in passed)
    assert names["nightly"] == BY_NIGHT
    assert names["not nightly"] == BY_DAY


def test_few_rows_of_few_ranks_are_chosen() -> None:
    small, large, rest = (frozenset({"tp"}), 2), (frozenset({"tp", "dp", "cp"}), 8), (frozenset({"dp", "cp"}), 4)
    assert covering([small, large, rest]) == {0, 2}, "eight ranks only for what four have not"
    assert 1 in covering([small, large, rest], together=2), "tp and dp are together in one alone"
    assert covering([small, small]) == {0}
    assert covering([(frozenset(), 1), (frozenset(), 1)]) == {0}, "one stays of rows that have nothing"


AXES = {"tp", "sp", "pp", "vpp", "cp allgather", "cp ulysses", "cp ring", "dp", "uneven stages"}


def test_the_promise_has_every_pair_of_axes_by_day() -> None:
    known = [(frozenset(axes_of(case.layout)), num_ranks(case)) for case in RUNS]
    by_day = [known[index][0] for index in covering(known, together=2)]
    assert frozenset[str]().union(*by_day) == AXES
    assert {pair for axes, _ in known for pair in combinations(sorted(axes), 2)} == {
        pair for axes in by_day for pair in combinations(sorted(axes), 2)
    }
    assert len(by_day) < len(RUNS) / 3


def test_every_test_stays_by_day_with_every_axis_that_it_has(request: pytest.FixtureRequest) -> None:
    """Checks the tests that this run collected: all of them where the whole suite runs."""
    nightly = request.config.pluginmanager.get_plugin("nightly")
    assert isinstance(nightly, Nightly)
    of_parity: set[str] = set()
    for test, rows in nightly.rows.items():
        by_day = [has for has, is_nightly in rows if not is_nightly]
        assert by_day, f"{test} has no row by day; mark it by hand where another test shows the same"
        assert frozenset[str]().union(*by_day) == frozenset[str]().union(*(has for has, _ in rows)), test
        of_parity |= frozenset[str]().union(*by_day) if test.startswith("tests/parity/") else set()
    if nightly.has("tests/parity/models/test_experts.py") and nightly.has("tests/parity/layouts/test_layouts.py"):
        assert of_parity >= AXES | {"ep", "etp"}


def test_names_may_have_rows_and_comments() -> None:
    assert named_tests("# a::b\na::b\n\na::c[x - # y]  # shown by a::d\n") == {"a::b", "a::c[x - # y]"}


def test_every_name_for_the_night_is_a_test(request: pytest.FixtureRequest) -> None:
    """Checks the files that this run collected: all of them where the whole suite runs."""
    nightly = request.config.pluginmanager.get_plugin("nightly")
    assert isinstance(nightly, Nightly)
    assert not nightly.unknown
    files = {name.partition("::")[0] for name in named_tests((ROOT / "tests" / "night.txt").read_text())}
    assert all((ROOT / file).is_file() for file in files)


def test_the_suite_leaves_them_out_and_a_target_runs_them() -> None:
    assert '-m "not slurm and not nightly"' in (ROOT / "tests/run.sh").read_text()
    assert '-m "nightly or hypothesis"' in (ROOT / "Makefile").read_text()


DRAWN = """
from hypothesis import given, settings, strategies as st

@settings(max_examples=60, database=None)
@given(st.integers())
def test_many(number): print("many")

@settings(max_examples=7, database=None)
@given(st.integers())
def test_few(number): print("few")
"""


@pytest.mark.parametrize(("chosen", "numbers"), [("hypothesis", (60, 7)), ("not nightly", (20, 7)), ("", (60, 7))])
def test_drawn_tests_have_a_third_of_their_examples_by_day(
    pytester: pytest.Pytester, chosen: str, numbers: tuple[int, int]
) -> None:
    pytester.makeini("[pytest]\nmarkers = nightly\n")
    pytester.syspathinsert(ROOT)
    pytester.makeconftest(PLUGIN)
    pytester.makepyfile(DRAWN)
    shown = pytester.runpytest_inprocess("-m", chosen, "-p", "no:cacheprovider", "-rP").outlines
    assert tuple(shown.count(name) for name in ("many", "few")) == numbers
