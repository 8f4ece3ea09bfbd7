"""The data of a parity check: verdicts, orders, and the way through JSON."""

import json
import math
from dataclasses import replace

import pytest

from mtrain.verify.core.result import Deviation, ParityReport
from tests.verify.reports import TENSORS, layout_result, read_back, report


@pytest.mark.parametrize("gradient", [1e-7, 0.5, math.inf])
def test_a_report_comes_back_from_json(gradient: float) -> None:
    original = report(gradient)
    assert read_back(ParityReport, original.to_json()) == original


def test_json_is_strict_where_numbers_are_not_finite() -> None:
    text = report(math.nan).to_json()
    json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    worst = read_back(ParityReport, text).layouts[1].worst("gradient")
    assert worst is not None
    assert math.isnan(worst.value)


@pytest.mark.parametrize(
    ("value", "tolerance", "passed", "excess"),
    [
        (0.0, 0.0, True, 0.0),
        (1e-9, 0.0, False, math.inf),
        (1e-6, 1e-6, True, 1.0),
        (2e-6, 1e-6, False, 2.0),
        (math.inf, 1e-6, False, math.inf),
        (math.nan, 1e-6, False, math.inf),
    ],
)
def test_a_deviation_passes_up_to_its_tolerance(value: float, tolerance: float, passed: bool, excess: float) -> None:
    deviation = Deviation("loss", "main", 1, value, tolerance)
    assert deviation.passed is passed
    assert deviation.excess == pytest.approx(excess)


@pytest.mark.parametrize("bad", [0.5, math.nan, math.inf])
def test_the_first_failure_and_the_worst_tensor_are_found(bad: float) -> None:
    layout = layout_result("x", {"cp": "2"}, bad)
    first, worst = layout.first_failure(), layout.worst_tensor()
    assert first is not None
    assert (first.step, first.kind, first.name) == (2, "gradient", TENSORS[-1])
    assert worst is not None
    assert worst.name == TENSORS[-1]
    assert not layout.passed


def test_no_tensor_is_the_worst_of_equals() -> None:
    layout = layout_result("x", {})
    same = tuple(replace(each, value=0.0) for each in layout.deviations)
    assert layout.worst_tensor() is not None
    assert replace(layout, deviations=same).worst_tensor() is None


def test_the_first_failure_goes_by_step_then_by_the_order_of_computation() -> None:
    layout = layout_result("x", {})
    later = Deviation("denominator", "main", 2, 1.0, 0.0)
    sooner = Deviation("grad_norm", "grad_norm", 1, 1.0, 1e-5)
    last = Deviation("update", TENSORS[0], 1, 1.0, 1e-5)
    failed = type(layout)(**{**vars(layout), "deviations": (*layout.deviations, later, last, sooner)})
    assert failed.first_failure() == sooner


def test_a_report_passes_where_every_layout_does() -> None:
    assert report().passed
    assert not report(0.5).passed
    guarded = layout_result("x", {})
    assert guarded.passed
    assert not type(guarded)(**{**vars(guarded), "guards": ("the denominator is wrong",)}).passed
