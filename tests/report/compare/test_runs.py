"""Comparing two runs: the first divergent step and quantity, differences of the rest, exit codes and pictures."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import math
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import matplotlib.image
import pytest

from mtrain.__main__ import main
from mtrain.base.errors import ConfigError, DataError
from mtrain.config.changes import Change
from mtrain.report.compare.report import comparison_page, comparison_picture
from mtrain.report.compare.runs import Comparison, compare_runs, relative_difference
from mtrain.report.metrics.record import StepRecord, TermRecord
from mtrain.runs.folder import RunFolder
from tests.browser import Browser
from tests.cli.command_line import blocking
from tests.elements import assert_is_accessible, assert_is_self_contained, read_html, rows
from tests.messages import refuses
from tests.paths import ROOT
from tests.report.metrics.records import step_record, valid_record
from tests.report.metrics.test_plot import BLUE, RED, colours
from tests.report.metrics.test_plot import run_folder as metrics_folder

CONFIG = "model: {num_layers: 2}\nlayout: {tp: 1}\nrun: {dir: a}\n"
ENVIRONMENT = {"torch": "2.9", "device": "cpu"}


def run(
    path: Path, steps: Sequence[StepRecord], config: str = CONFIG, environment: dict[str, str] = ENVIRONMENT
) -> Path:
    metrics_folder(path, valid_record(0), *steps)
    RunFolder(path).write_config(config)
    RunFolder(path).write_environment(environment)
    return path


def steps(count: int = 5) -> list[StepRecord]:
    """A run with one side term."""
    return [
        dataclasses.replace(
            step_record(step, 4.0 / step),
            terms={"main": TermRecord(loss=4.0 / step, numerator=1.0, denominator=1000.0), "z": side_term(9.0)},
        )
        for step in range(1, count + 1)
    ]


def side_term(loss: float, denominator: float = 500.0) -> TermRecord:
    return TermRecord(loss=loss, numerator=loss * denominator, denominator=denominator)


def changed(step: int, **values: Any) -> list[StepRecord]:
    """The same run with other values in one step."""
    return [dataclasses.replace(each, **values) if each.step == step else each for each in steps()]


def compared(tmp_path: Path, b: Sequence[StepRecord], rtol: float = 1e-5) -> Comparison:
    return compare_runs(run(tmp_path / "a", steps()), run(tmp_path / "b", b), rtol)


def first(comparison: Comparison) -> tuple[int, str] | None:
    found = comparison.divergence
    return None if found is None else (found.step, found.name)


def test_equal_runs_are_equal(tmp_path: Path) -> None:
    comparison = compared(tmp_path, steps())
    assert comparison.divergence is None
    assert [each.name for each in comparison.quantities] == [
        "denominator",
        "denominator of z",
        "loss",
        "loss of z",
        "gradient norm",
        "learning rate",
    ]
    assert all(each.worst == 0 and each.first_step_beyond(0) is None for each in comparison.quantities)


@pytest.mark.parametrize(
    ("values", "name"),
    [
        ({"denominator": 1001.0, "loss": 9.0, "grad_norm": 9.0, "lr": 9.0}, "denominator"),
        ({"loss": 9.0, "grad_norm": 9.0, "lr": 9.0}, "loss"),
        ({"grad_norm": 9.0, "lr": 9.0}, "gradient norm"),
        ({"lr": 9.0}, "learning rate"),
        ({"terms": {"z": side_term(8.0)}, "grad_norm": 9.0}, "loss of z"),
        ({"terms": {"z": side_term(8.0, 501.0)}, "loss": 9.0}, "denominator of z"),
        ({"terms": {}}, "denominator of z"),
        ({"empty": True}, "loss"),
        ({"loss": math.nan}, "loss"),
        ({"grad_norm": math.inf}, "gradient norm"),
    ],
)
def test_the_first_quantity_is_the_one_that_a_step_computes_first(
    tmp_path: Path, values: dict[str, object], name: str
) -> None:
    assert first(compared(tmp_path, changed(3, **values))) == (3, name)


def test_an_earlier_step_comes_before_an_earlier_quantity(tmp_path: Path) -> None:
    b = [*changed(2, lr=9.0)[:3], *changed(4, denominator=9.0)[3:]]
    comparison = compared(tmp_path, b)
    assert first(comparison) == (2, "learning rate")
    reported = str(comparison.divergence)
    assert reported == "step 2, learning rate: 0.001 and 9, relative difference 1.0e+00 (tolerance 1e-05)"


def test_what_is_within_the_tolerance_is_equal_but_reported(tmp_path: Path) -> None:
    comparison = compared(tmp_path, changed(2, grad_norm=0.5 * (1 + 9e-6)))
    assert comparison.divergence is None
    norm = next(each for each in comparison.quantities if each.kind == "grad_norm")
    assert norm.first_step_beyond(0) == 2
    assert norm.worst == pytest.approx(9e-6, rel=1e-4)
    assert first(compare_runs(tmp_path / "a", tmp_path / "b", 8e-6)) == (2, "gradient norm")


def test_counts_must_be_equal_whatever_the_tolerance(tmp_path: Path) -> None:
    a = [dataclasses.replace(each, denominator=5e8) for each in steps()]
    b = [dataclasses.replace(each, denominator=5e8 + (each.step == 4)) for each in steps()]
    found = compare_runs(run(tmp_path / "a", a), run(tmp_path / "b", b), 0.5)
    assert first(found) == (4, "denominator")


def test_sums_of_fractional_weights_may_differ_by_the_order_of_the_sum(tmp_path: Path) -> None:
    assert compared(tmp_path, changed(2, denominator=1000.0 * (1 + 2e-15))).divergence is None


def test_tokens_of_both_runs_are_reported(tmp_path: Path) -> None:
    counted = [dataclasses.replace(each, padding_tokens=10, loss_tokens=1000) for each in steps()]
    comparison = compared(tmp_path, counted)
    assert comparison.tokens == (
        "5,120 (padding not counted separately), 2,048 a second",
        "5,120 of text, 5,000 of them in the loss, and 50 of padding; 2,048 a second",
    )
    assert all(
        f"Tokens of {name}: {reported}." in comparison_page(comparison)
        for name, reported in zip("ab", comparison.tokens, strict=True)
    )


def test_runs_that_break_in_the_same_way_are_equal(tmp_path: Path) -> None:
    a = run(tmp_path / "a", changed(4, loss=math.nan, grad_norm=math.inf))
    b = run(tmp_path / "b", changed(4, loss=math.nan, grad_norm=math.inf))
    assert compare_runs(a, b, 0.0).divergence is None


def test_steps_that_one_run_lacks_are_not_compared(tmp_path: Path) -> None:
    comparison = compared(tmp_path, [each for each in steps(9) if each.step > 2])
    assert comparison.steps == (3, 4, 5)
    assert comparison.num_steps == (5, 7)
    assert comparison.divergence is None


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        (2.0, 1.0, 0.5),
        (0.0, 0.0, 0.0),
        (0.0, 1e-300, 1.0),
        (1e308, -1e308, 2.0),
        (math.inf, math.inf, 0.0),
        (math.inf, -math.inf, math.inf),
        (math.nan, math.nan, 0.0),
        (math.nan, 1.0, math.inf),
    ],
)
def test_relative_difference(a: float, b: float, expected: float) -> None:
    assert relative_difference(a, b) == relative_difference(b, a) == expected


def test_configurations_and_environments_are_compared(tmp_path: Path) -> None:
    config = CONFIG.replace("tp: 1", "tp: 2").replace("num_layers: 2", "num_layers: 3")
    b = run(tmp_path / "b", steps(), config, {"torch": "2.10", "device": "cpu", "layout": "x"})
    comparison = compare_runs(run(tmp_path / "a", steps()), b, 0)
    assert [(each.key, each.is_neutral) for each in comparison.changes] == [
        ("layout.tp", True),
        ("model.num_layers", False),
    ]
    assert comparison.environment == (Change("layout", None, "x", True), Change("torch", "2.9", "2.10", True))


def test_a_run_that_does_not_tell_its_environment_is_named(tmp_path: Path) -> None:
    a, b = run(tmp_path / "a", steps()), run(tmp_path / "b", steps())
    RunFolder(b).environment.unlink()
    comparison = compare_runs(a, b, 0)
    assert comparison.unrecorded == ("b",)
    assert comparison.environment == ()


def test_bad_input_is_refused(tmp_path: Path) -> None:
    good, other = run(tmp_path / "good", steps()), run(tmp_path / "other", steps())
    late = run(tmp_path / "late", [step_record(9)])
    validated = run(tmp_path / "validated", [])
    for b, fact in ((tmp_path, "metrics.jsonl"), (late, "9"), (validated, "validated")):
        with refuses(DataError, fact):
            compare_runs(good, b, 0)
    for rtol in (-1.0, math.nan, math.inf):
        with refuses(ConfigError, "--rtol"):
            compare_runs(good, other, rtol)
    RunFolder(other).config.write_text("a: [1\n")
    with refuses(DataError, "config.yaml"):
        compare_runs(good, other, 0)
    RunFolder(other).config.unlink()
    with refuses(DataError, "config.yaml"):
        compare_runs(good, other, 0)
    RunFolder(other).metrics.write_text("{}\n")
    with refuses(DataError, "line 1"):
        compare_runs(good, other, 0)


def compare(*arguments: object) -> subprocess.CompletedProcess[str]:
    """The command line, in this process."""
    command, output, errors = ["mtrain", "compare", *map(str, arguments)], io.StringIO(), io.StringIO()
    with (
        mock.patch.object(sys, "argv", command),
        contextlib.redirect_stdout(output),
        contextlib.redirect_stderr(errors),
        pytest.raises(SystemExit) as end,
    ):
        main()
    code = end.value.code or 0
    assert isinstance(code, int)
    return subprocess.CompletedProcess(command, code, output.getvalue(), errors.getvalue())


def compare_without_torch(*arguments: object) -> subprocess.CompletedProcess[str]:
    """The command line, where importing torch is an error."""
    blocked = blocking(("torch",)) + "import runpy; runpy.run_module('mtrain', run_name='__main__')"
    command = [sys.executable, "-c", blocked, "compare", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)


def test_the_command_tells_and_draws_a_divergence(tmp_path: Path, chromium: Browser) -> None:
    a = run(tmp_path / "a", steps(), environment={**ENVIRONMENT, "torch": "2.10"})
    b = run(tmp_path / "b", changed(3, denominator=999.0, loss=1.5), CONFIG.replace("num_layers: 2", "num_layers: 3"))
    done = compare_without_torch(a, b, "--output", tmp_path / "new" / "out")
    assert (done.returncode, done.stderr) == (1, "")
    reported = {line[:15].strip(): line[15:] for line in done.stdout.splitlines()}
    assert reported["configuration"] == "model.num_layers: 2 -> 3"
    assert reported["environment"] == "torch: 2.10 -> 2.9"
    assert reported["verdict"].startswith(
        "divergent from step 3, denominator: 1000 and 999, relative difference 1.0e-03"
    )
    assert ["denominator", "1.0e-03", "1e-12", "3", "3"] in [line.split() for line in done.stdout.splitlines()]

    assert {BLUE, RED} <= colours(tmp_path / "new" / "out" / "compare.png")
    page = tmp_path / "new" / "out" / "compare.html"
    read = read_html(page.read_text())
    assert_is_self_contained(read)
    assert_is_accessible(read)
    assert read.all("h1")[0].text.startswith("✗ DIVERGENT a and b over 5 steps")
    assert rows(read.all("table")[0])[1] == ["denominator", "✗ DIVERGENT", "1.0e-03", "1e-12", "3", "3"]
    assert len(read.all("figure")) == 6
    visit = chromium.open(page, 360)
    assert (visit.requests, visit.complaints) == ([page.as_uri()], [])
    assert chromium.evaluate("document.documentElement.scrollWidth") == 360


def test_the_command_ends_with_0_where_runs_are_equal_and_3_where_they_cannot_be_read(tmp_path: Path) -> None:
    a, b = run(tmp_path / "a", steps()), run(tmp_path / "b", changed(2, lr=1e-3 * (1 + 1e-9)))
    done = compare(a, b, "--output", tmp_path)
    assert done.returncode == 0, done.stderr
    assert "verdict        equal within 1e-05" in done.stdout
    assert read_html((tmp_path / "compare.html").read_text()).all("h1")[0].text.startswith("✓ EQUAL")
    assert matplotlib.image.imread(tmp_path / "compare.png").shape[2] >= 3
    stricter = compare(a, b, "--output", tmp_path, "--rtol", "1e-12")
    assert stricter.returncode == 1
    assert "tolerance      1e-12, --rtol" in stricter.stdout
    refused = compare(a, tmp_path / "none", "--output", tmp_path)
    assert refused.returncode == 3
    assert refused.stderr.count("\n") == 1
    assert "Traceback" not in refused.stderr


def test_a_long_run_with_gaps_is_drawn(tmp_path: Path) -> None:
    long = [
        step_record(step, math.nan if step % 50 == 0 else 5 / step, empty=step % 70 == 0) for step in range(1, 1500)
    ]
    other = [dataclasses.replace(each, loss=each.loss * 1.01) for each in long]
    comparison = compare_runs(run(tmp_path / "a", long), run(tmp_path / "b", other), 1e-5)
    text = comparison_page(comparison)
    assert_is_accessible(read_html(text))
    assert len(text) < 200_000
    comparison_picture(comparison).savefig(tmp_path / "x.png")
    assert {BLUE, RED} <= colours(tmp_path / "x.png")
