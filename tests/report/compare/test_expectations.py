"""What `mtrain compare` expects of two runs: rounding of their precision, and differences by definition."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mtrain.report.compare.runs import Comparison, compare_runs
from tests.report.compare.test_runs import ENVIRONMENT, changed, compare, first, run, steps
from tests.training.test_trainer import command, finished, records, start

__all__ = ["command", "start"]

CONFIG = """
run: {dir: a}
layout: {tp: 1, cp: 1}
train: {precision: PRECISION, micro_batch_size: 1}
model: {hidden_dropout: 0.0, attention_dropout: 0.0, experts: {capacity_factor: null}}
"""


def pair(tmp_path: Path, a: str = "fp32", b: str = "fp32", rtol: float | None = None, **values: object) -> Comparison:
    """Two runs in these precisions, of which the second has other values in step 3."""
    tmp_path = Path(tempfile.mkdtemp(dir=tmp_path))
    runs = [
        run(tmp_path / name, recorded, CONFIG.replace("PRECISION", precision))
        for name, recorded, precision in (("a", steps(), a), ("b", changed(3, **values), b))
    ]
    return compare_runs(runs[0], runs[1], rtol)


@pytest.mark.parametrize(
    ("precision", "loss", "grad_norm"),
    [("fp32", 1e-5, 1e-5), ("fp16", 2**-11, 10 * 2**-11), ("bf16", 2**-8, 10 * 2**-8)],
)
def test_the_tolerance_is_that_of_the_precision(tmp_path: Path, precision: str, loss: float, grad_norm: float) -> None:
    before = steps()[2]
    almost, beyond = 0.99, 1.05
    within = {"loss": before.loss * (1 + almost * loss), "grad_norm": before.grad_norm * (1 + almost * grad_norm)}
    assert pair(tmp_path, precision, precision, **within).divergence is None
    assert first(pair(tmp_path, precision, precision, loss=before.loss * (1 + beyond * loss))) == (3, "loss")
    norm = before.grad_norm * (1 + beyond * grad_norm)
    assert first(pair(tmp_path, precision, precision, grad_norm=norm)) == (3, "gradient norm")
    rate = before.lr * (1 + 2e-5)
    assert first(pair(tmp_path, precision, precision, lr=rate)) == (3, "learning rate"), "float64 in every precision"


def test_the_coarser_precision_of_a_pair_decides_unless_a_tolerance_is_given(tmp_path: Path) -> None:
    loss = steps()[2].loss * (1 + 1e-3)
    for a, b in (("bf16", "fp32"), ("fp32", "bf16"), ("fp16", "bf16"), ("bf16", "fp16")):
        assert pair(tmp_path, a, b, loss=loss).divergence is None
    assert first(pair(tmp_path, "fp32", "fp16", loss=loss)) == (3, "loss")
    assert first(pair(tmp_path, "bf16", "bf16", 1e-4, loss=loss)) == (3, "loss")


@pytest.mark.parametrize(
    ("precision", "reported"),
    [
        pytest.param("fp32", "1e-05, for fp32", marks=pytest.mark.nightly),
        ("bf16", "4e-03 (losses) and 4e-02 (gradient norms), by the"),
    ],
)
def test_the_command_says_which_tolerance_it_takes(tmp_path: Path, precision: str, reported: str) -> None:
    config = CONFIG.replace("PRECISION", precision)
    a, b = (run(tmp_path / name, steps(), config) for name in "ab")
    done = compare(a, b, "--output", tmp_path)
    assert done.returncode == 0, done.stderr
    assert f"tolerance      {reported}" in done.stdout
    assert f"Tolerance: {reported}" in (tmp_path / "compare.html").read_text()


DROPOUT = CONFIG.replace("hidden_dropout: 0.0", "hidden_dropout: 0.1")


def expected(tmp_path: Path, a: str, b: str, environment: dict[str, str] = ENVIRONMENT) -> str | None:
    tmp_path = Path(tempfile.mkdtemp(dir=tmp_path))
    return compare_runs(run(tmp_path / "a", steps(), a), run(tmp_path / "b", steps(), b, environment), None).expected


def test_dropout_on_another_layout_or_micro_batch_size_is_expected_to_differ(tmp_path: Path) -> None:
    larger, cut = (DROPOUT.replace(*change) for change in (("size: 1", "size: 2"), ("tp: 1, cp: 1", "tp: 2, cp: 2")))
    words = "model.hidden_dropout above 0 makes the numbers follow"
    assert expected(tmp_path, DROPOUT, larger) == f"{words} train.micro_batch_size"
    assert expected(tmp_path, DROPOUT, cut) == f"{words} layout.cp, layout.tp"
    assert expected(tmp_path, DROPOUT, DROPOUT, {**ENVIRONMENT, "world_size": "2"}) == f"{words} world_size"
    assert expected(tmp_path, DROPOUT, DROPOUT) is None, "the same draws"
    assert expected(tmp_path, CONFIG, CONFIG.replace("size: 1", "size: 2")) is None, "no draws"


def test_what_depends_on_the_layout_by_definition_is_expected_to_differ(tmp_path: Path) -> None:
    capacity = CONFIG.replace("capacity_factor: null", "capacity_factor: 1.5").replace(
        "attention_dropout: 0.0", "attention_dropout: 0.1"
    )
    words = "model.attention_dropout and model.experts.capacity_factor above 0 make the numbers follow layout.tp"
    assert expected(tmp_path, capacity, capacity.replace("tp: 1", "tp: 2")) == words


def test_an_unrecorded_world_size_may_be_another(tmp_path: Path) -> None:
    a, b = run(tmp_path / "a", steps(), DROPOUT), run(tmp_path / "b", steps(), DROPOUT)
    (b / "environment.json").unlink()
    reported = compare_runs(a, b, None).expected
    assert reported is not None
    assert reported.endswith("follow the world size (not recorded)")


@pytest.mark.nightly  # real runs; by day the same sentences from records, above
def test_dropout_follows_the_micro_batch_size_and_every_record_says_so(
    command: Callable[..., list[str]], start: Any, tmp_path: Path
) -> None:
    """Real runs: the same layout, another micro-batch size; 0.1.0 asked for no consent, so none is asked for."""
    sizes = {"small": "train.micro_batch_size=1", "large": "train.micro_batch_size=2"}
    for name, size in sizes.items():
        options = ("model.hidden_dropout=0.2", "train.num_steps=3", "valid.at_end=true", "valid.max_samples=4", size)
        code, output, errors = finished(start(command(*options, run=name)))
        assert code == 0, errors
        assert "this run repeats only with its own" in output
        assert all(
            record["layout_dependent"] for kind in ("step", "valid") for record in records(tmp_path / name, kind)
        )
    done = compare(tmp_path / "small", tmp_path / "large", "--output", tmp_path)
    assert done.returncode == 1, done.stderr
    reported = "a difference: model.hidden_dropout above 0 makes the numbers follow train.micro_batch_size"
    assert f"expected       {reported}" in done.stdout
    assert (
        f"A difference is expected: {reported.removeprefix('a difference: ')}."
        in (tmp_path / "compare.html").read_text()
    )


@pytest.mark.nightly  # the tolerance of bf16: above; layouts in bf16: tests/parity
def test_layouts_in_bf16_are_equal_as_far_as_bf16_goes(
    command: Callable[..., list[str]], start: Any, tmp_path: Path
) -> None:
    half = ("train.precision=bf16", "train.num_steps=4")
    assert finished(start(command(*half, run="one")))[0] == 0
    code, _, errors = finished(start(command(*half, "layout.tp=2", "layout.sp=true", ranks=2, run="two")))
    assert code == 0, errors
    runs = tmp_path / "one", tmp_path / "two"
    assert compare_runs(*runs, 1e-5).divergence is not None
    assert compare_runs(*runs, None).divergence is None
