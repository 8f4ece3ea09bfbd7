"""The axis at fault, found from the layouts that pass and fail."""

import math

import numpy as np
import pytest

from mtrain.verify.core.activations import first_deviating
from mtrain.verify.core.result import Deviation, LayoutResult, diagnosed, failing_axis
from mtrain.verify.report.text import PARITY


def layout(*axes: str, fails: bool = False, error: str | None = None) -> LayoutResult:
    """Builds a layout that uses some axes."""
    value = 1.0 if fails else 0.0
    kinds = [("loss", 1, 0.0), ("loss", 2, 0.0), ("gradient", 2, 0.0), ("grad_norm", 2, value)]
    deviations = tuple(Deviation(kind, kind, step, found, 1e-6) for kind, step, found in kinds)
    used = dict.fromkeys(axes, "2")
    return LayoutResult("-".join(axes) or "one", used, 2 ** len(axes), 1.0, deviations=deviations, error=error)


@pytest.mark.parametrize(
    ("passing", "failing", "axis"),
    [
        ([[], ["tp"]], [["cp"], ["tp", "cp"]], "cp"),
        ([[], ["tp"]], [["tp", "sp"], ["tp", "sp", "cp"]], "sp"),
        ([[], ["microbatches"]], [["pp", "microbatches"]], "pp"),
        ([[], ["tp"], ["pp"]], [["tp", "pp"], ["tp", "pp", "dp"]], "tp x pp"),
        ([[], ["tp"], ["tp", "dp"]], [["tp", "dp", "cp"]], "cp"),
        ([[]], [["dp"], ["microbatches"], ["dp", "microbatches"]], "dp, microbatches"),
        ([], [[], ["tp"], ["cp"]], "every layout"),
        ([[], ["tp"], ["cp"]], [], None),
    ],
)
def test_the_axis_is_what_failing_layouts_do_not_share_with_passing_ones(
    passing: list[list[str]], failing: list[list[str]], axis: str | None
) -> None:
    results = [layout(*axes) for axes in passing] + [layout(*axes, fails=True) for axes in failing]
    assert failing_axis(results) == axis


def test_the_smallest_failing_layout_is_watched_at_its_first_failure() -> None:
    asked: list[tuple[str, int]] = []

    def watched(result: LayoutResult, step: int) -> str:
        asked.append((result.name, step))
        return "layer 0 mlp"

    results = [layout(), layout("tp", "cp", fails=True), layout("cp", fails=True), layout("tp")]
    diagnosis = diagnosed(results, watched, PARITY)
    assert diagnosis is not None
    assert asked == [("cp", 2)]
    assert (diagnosis.axis, diagnosis.layout, diagnosis.step) == ("cp", "cp", 2)
    assert (diagnosis.kind, diagnosis.name, diagnosis.module) == ("grad_norm", "grad_norm", "layer 0 mlp")
    where, what = diagnosis.lines
    assert all(part in where for part in ("cp alone breaks the run", "layout cp (2 ranks)", "step 2"))
    assert all(part in what for part in ("gradient norm by 1.0e+00", "losses and gradients agree", "layer 0 mlp"))


def test_a_layout_that_stopped_says_why() -> None:
    diagnosis = diagnosed([layout(), layout("pp", error="rank 1 died")], lambda result, step: "unasked", PARITY)
    assert diagnosis is not None
    assert (diagnosis.axis, diagnosis.step, diagnosis.kind, diagnosis.module) == ("pp", None, None, None)
    assert diagnosis.lines[1] == "stopped: rank 1 died"


@pytest.mark.parametrize(
    ("alone", "reported"),
    [
        (layout(fails=True), "even one process with one microbatch: the layout is not at fault"),
        (layout(error="out of memory"), "none of them was one process: the cause is open"),
        (None, "none of them was one process: the cause is open"),
    ],
    ids=["fails", "could not be run", "was not asked for"],
)
def test_no_axis_is_blamed_where_nothing_passes(alone: LayoutResult | None, reported: str) -> None:
    results = [*([alone] if alone else []), layout("cp", fails=True)]
    diagnosis = diagnosed(results, lambda result, step: None, PARITY)
    assert diagnosis is not None
    assert diagnosis.axis == "every layout"
    assert reported in diagnosis.lines[0]


@pytest.mark.parametrize("kind", ["samples", "lr"])
def test_what_is_wrong_before_the_forward_pass_needs_no_module(kind: str) -> None:
    failing = LayoutResult("one", {}, 1, 1.0, deviations=(Deviation(kind, kind, 10**6, 1.0, 0.0),))
    diagnosis = diagnosed([failing], lambda result, step: pytest.fail("a million steps were run again"), PARITY)
    assert diagnosis is not None
    assert "module" not in diagnosis.lines[1]


def test_there_is_nothing_to_say_where_all_pass() -> None:
    assert diagnosed([layout(), layout("tp")], lambda result, step: "unasked", PARITY) is None


@pytest.mark.parametrize(
    ("bad", "first"), [({}, None), ({"b": 0.1}, "b"), ({"b": 0.1, "a": 0.1}, "a"), ({"c": math.nan}, "c")]
)
def test_the_first_module_is_found_in_forward_order(bad: dict[str, float], first: str | None) -> None:
    exact = {name: np.arange(4.0) for name in "abc"}
    found = {name: value + bad.get(name, 1e-9) for name, value in exact.items()}
    assert first_deviating(found, exact, ["a", "b", "c", "d"], 1e-6) == first
