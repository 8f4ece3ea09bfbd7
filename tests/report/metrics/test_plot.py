"""The picture of loss curves: readable input, a PNG that shows every run."""

import math
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest

from mtrain.base.errors import DataError, MachineError
from mtrain.report.metrics.jsonl import JsonlSink
from mtrain.report.metrics.plot import Curves, load_curves, plot_losses, running_mean
from mtrain.report.metrics.record import ChangeRecord, Record
from tests.messages import refuses
from tests.report.metrics.records import step_record, valid_record


def run_folder(path: Path, *records: Record) -> Path:
    path.mkdir(parents=True)
    sink = JsonlSink(path / "metrics.jsonl", 0)
    for record in records:
        sink.write(record)
    sink.close()
    return path


def colours(picture: Path) -> set[tuple[int, int, int]]:
    pixels = np.round(matplotlib.image.imread(picture)[..., :3] * 255).astype(int)
    numbers = np.unique(pixels @ (1 << 16, 1 << 8, 1))  # on rows it would sort for seconds
    return {(int(each) >> 16, int(each) >> 8 & 255, int(each) & 255) for each in numbers}


BLUE, RED = (25, 89, 179), (179, 25, 43)


@pytest.mark.parametrize("num_steps", [3, pytest.param(300, marks=pytest.mark.nightly)])
def test_each_run_is_drawn_in_its_colour(tmp_path: Path, num_steps: int) -> None:
    steps = [step_record(step, 4.0 / step) for step in range(1, num_steps + 1)]
    first = run_folder(tmp_path / "a" / "run", valid_record(0), *steps, valid_record(num_steps))
    second = run_folder(tmp_path / "b" / "run", *steps[:2], step_record(3, math.nan))
    plot_losses([first], tmp_path / "one.png")
    plot_losses([first, second], tmp_path / "pictures" / "two.png")
    assert BLUE in colours(tmp_path / "one.png")
    assert RED not in colours(tmp_path / "one.png")
    assert {BLUE, RED} <= colours(tmp_path / "pictures" / "two.png")


def test_of_a_step_reported_twice_the_last_counts(tmp_path: Path) -> None:
    path = run_folder(tmp_path / "run", step_record(2, 9.0), step_record(1), step_record(2, 5.0), valid_record(2))
    curves = load_curves(path)
    assert [(record.step, record.loss) for record in curves.steps] == [(1, 2.5), (2, 5.0)]
    assert curves.passes == [valid_record(2)]


def test_a_folder_without_records_is_refused(tmp_path: Path) -> None:
    with refuses(DataError, "metrics.jsonl"):
        plot_losses([tmp_path], tmp_path / "x.png")
    (tmp_path / "metrics.jsonl").write_text("")
    with refuses(DataError):
        plot_losses([tmp_path], tmp_path / "x.png")


def test_a_picture_that_cannot_be_written_is_a_machine_error(tmp_path: Path) -> None:
    path = run_folder(tmp_path / "run", step_record(1))
    with refuses(MachineError):
        plot_losses([path], path / "metrics.jsonl" / "x.png")


def test_a_running_mean_is_shorter_at_the_ends_and_passes_over_gaps() -> None:
    assert running_mean([2.0, 4.0, 6.0, 11.0], 1) == [3.0, 4.0, 7.0, 8.5]
    assert running_mean([2.0, math.inf, 6.0], 1) == [2.0, 4.0, 6.0]
    assert math.isnan(running_mean([math.nan], 1)[0])


def test_passes_over_other_sets_do_not_compare() -> None:
    passes = [valid_record(step, loss) for step, loss in ((2, 1.0), (4, 3.0), (6, 2.5))]
    valid, rate = ChangeRecord(step=2, key="data.valid.valid"), ChangeRecord(step=4, key="optimizer.lr")
    later = ChangeRecord(step=6, key="loss.function")
    assert Curves([], passes, []).comparable_passes == passes
    assert Curves([], passes, [valid, rate]).comparable_passes == passes[1:]
    assert Curves([], passes, [valid, rate, later]).comparable_passes == passes[1:], "none follows the last change"
    assert Curves([], [], [valid]).comparable_passes == []
