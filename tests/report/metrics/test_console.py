"""The console: plain lines in a log, a bar on a terminal, a remaining time that follows the clock."""

import io
from collections.abc import Mapping
from dataclasses import replace

import pytest
from rich.console import Console

from mtrain.report.metrics.record import Record, StepRecord, TermRecord, ValidRecord
from mtrain.report.metrics.shown import as_duration, as_size
from mtrain.report.metrics.sinks import ConsoleSink
from tests.report.metrics.records import step_record, valid_record, with_side_terms


class Clock:
    """A clock that advances only when the test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def shown(records: Mapping[float, Record], *, num_steps: int, terminal: bool = False, **options: int) -> str:
    """Returns what the sink wrote for records that come at these times, in seconds after the start."""
    clock, text = Clock(), io.StringIO()
    console = Console(file=text, force_terminal=terminal, width=200)
    sink = ConsoleSink(num_steps, console=console, clock=clock, **options)
    for time, record in records.items():
        clock.now = 1000.0 + time
        sink.write(record)
    sink.close()
    return text.getvalue()


def test_a_job_log_gets_one_plain_line_a_step() -> None:
    text = shown({2.0: step_record(1, 3.25), 4.0: step_record(2), 5.0: valid_record(2)}, num_steps=10)
    assert "\x1b" not in text
    assert text.splitlines() == [
        "step 1/10  loss 3.2500  grad_norm 0.500  lr 1.00e-03  2,048 tokens/s  eta 0:00:18",
        "step 2/10  loss 2.5000  grad_norm 0.500  lr 1.00e-03  2,048 tokens/s  eta 0:00:16",
        "step 2/10  valid_loss 2.7500  samples 8  0.1 s",
    ]


def test_side_terms_are_shown_briefly() -> None:
    first, second = (with_side_terms(record) for record in (step_record(1), valid_record(1)))
    step, passed = shown({2.0: first, 3.0: second}, num_steps=1).splitlines()
    assert step.startswith("step 1/1  loss 2.5000  kl 0.01235  z -  grad_norm 0.500  ")
    assert passed == "step 1/1  valid_loss 2.7500  kl 0.01235  z -  samples 8  0.1 s"


def test_remaining_time_counts_only_steps_of_this_start() -> None:
    text = shown({100.0: step_record(91)}, num_steps=100, resume_step=90)
    assert text.rstrip().endswith("eta 0:15:00")


def test_remaining_time_follows_a_change_of_pace() -> None:
    slow = {10.0 * step: step_record(step) for step in range(1, 11)}
    fast = {100.0 + (step - 10): step_record(step) for step in range(11, 80)}
    assert shown(slow | fast, num_steps=179).rstrip().endswith("eta 0:01:40")


def test_lines_come_at_the_interval_and_at_the_last_step() -> None:
    text = shown({float(step): step_record(step) for step in range(1, 8)}, num_steps=7, interval_steps=3)
    assert [line.split()[1] for line in text.splitlines()] == ["3/7", "6/7", "7/7"]


def test_an_empty_and_a_skipped_step_say_so() -> None:
    text = shown({1.0: step_record(1, empty=True), 2.0: step_record(2, skipped="fp16 overflow")}, num_steps=2)
    first, second = text.splitlines()
    assert "loss -" in first
    assert "empty batch" in first
    assert "skipped: fp16 overflow" in second


def test_padding_is_distinguished_where_there_is_some() -> None:
    records = {1.0: replace(step_record(1), padding_tokens=0), 2.0: replace(step_record(2), padding_tokens=3072)}
    first, second = shown(records, num_steps=2).splitlines()
    assert "2,048 tokens/s  eta" in first
    assert "2,048 tokens/s  padding 75.0%" in second


def test_several_validation_sets_are_shown_by_name() -> None:
    sets = {name: TermRecord(loss=loss, numerator=2 * loss, denominator=2.0) for name, loss in [("a", 2.75), ("b", 3)]}
    text = shown({1.0: replace(valid_record(1), valid_sets=sets)}, num_steps=1)
    assert "valid_loss 2.7500  a 2.7500  b 3.0000  samples 8" in text


def test_numbers_that_only_one_layout_gives_say_so_everywhere() -> None:
    records: dict[float, StepRecord | ValidRecord] = {1.0: step_record(1), 2.0: valid_record(1)}
    assert "this layout" not in shown({**records}, num_steps=1)
    text = shown({time: replace(record, layout_dependent=True) for time, record in records.items()}, num_steps=1)
    assert ["(of this layout only)" in line for line in text.splitlines()] == [True, True]


def test_a_terminal_gets_a_bar() -> None:
    text = shown({1.0: step_record(1), 2.0: step_record(2)}, num_steps=4, terminal=True)
    assert "━" in text
    assert "2/4" in text
    assert "eta 0:00:02" in text


@pytest.mark.parametrize(
    ("seconds", "text"), [(None, "-:--:--"), (0.4, "0:00:00"), (59.6, "0:01:00"), (90061, "25:01:01")]
)
def test_durations(seconds: float | None, text: str) -> None:
    assert as_duration(seconds) == text


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 bytes"), (1023, "1023 bytes"), (1536, "1.5 KiB"), (3 << 29, "1.5 GiB"), (1 << 60, "1048576.0 TiB")],
)
def test_sizes(num_bytes: int, text: str) -> None:
    assert as_size(num_bytes) == text


def test_memory_is_shown_where_it_was_recorded() -> None:
    text = shown({1.0: replace(step_record(1), memory_bytes=3 << 29)}, num_steps=1)
    assert "2,048 tokens/s  memory 1.5 GiB  eta" in text
