"""A tracker that fails, hangs or is slow stops nothing, and its gaps are reported."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping

import pytest

from mtrain.report.metrics.sinks import Sinks
from mtrain.report.metrics.trackers.open import TrackerSink
from tests.fault_table import Notice
from tests.report.metrics.records import step_record

ENOUGH_S = 60.0


class Remembers:
    """A tracker that keeps what it gets; it may fail at a step, or hang until it is released."""

    def __init__(self, fails_at: int | None = None, hangs: threading.Event | None = None) -> None:
        self.steps: list[int] = []
        self.texts: list[tuple[int, str, str]] = []
        self.is_finished = False
        self._fails_at, self._hangs = fails_at, hangs

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        if self._hangs is not None:
            self._hangs.wait()
        if step == self._fails_at:
            raise ConnectionError("no\nroute")
        assert numbers["train/loss"] == 2.5
        self.steps.append(step)

    def log_text(self, step: int, tag: str, text: str) -> None:
        if step == self._fails_at:
            raise ConnectionError("no page")
        self.texts.append((step, tag, text))

    def finish(self) -> None:
        self.is_finished = True


def test_every_record_arrives_in_order_and_the_tracker_is_finished(capfd: pytest.CaptureFixture[str]) -> None:
    tracker = Remembers()
    sink = TrackerSink("x", lambda: tracker, patience_s=ENOUGH_S)
    for step in range(1, 6):
        sink.write(step_record(step))
    sink.close()
    assert (tracker.steps, tracker.is_finished) == ([1, 2, 3, 4, 5], True)
    assert capfd.readouterr().err == ""


def test_texts_go_the_same_way(capfd: pytest.CaptureFixture[str]) -> None:
    tracker = Remembers(fails_at=4)
    sink = TrackerSink("x", lambda: tracker, patience_s=ENOUGH_S)
    sink.write(step_record(3))
    for step in (3, 4):
        Sinks(sink).write_text("samples", "> a\nb", step)
    sink.close()
    assert (tracker.steps, tracker.texts) == ([3], [(3, "samples", "> a\nb")])
    assert capfd.readouterr().err.splitlines() == [
        "warning: tracker x: step 4: ConnectionError: no page; training continues",
        "warning: tracker x: it lacks 1 of 3 records of this start; metrics.jsonl and samples.jsonl have them",
    ]


def test_a_record_that_is_refused_costs_itself_alone(capfd: pytest.CaptureFixture[str]) -> None:
    tracker = Remembers(fails_at=2)
    sink = TrackerSink("x", lambda: tracker, patience_s=ENOUGH_S)
    for step in (1, 2, 3):
        sink.write(step_record(step))
    sink.close()
    assert (tracker.steps, tracker.is_finished) == ([1, 3], True)
    assert capfd.readouterr().err.splitlines() == [
        "warning: tracker x: step 2: ConnectionError: no route; training continues",
        "warning: tracker x: it lacks 1 of 3 records of this start; metrics.jsonl has them",
    ]


@pytest.mark.fault(
    "services",
    "a tracker is down when the run starts",
    happens="one warning; the run trains without it, metrics.jsonl has all records",
    exit_code=None,
)
def test_a_tracker_that_cannot_be_opened_stops_nothing(capfd: pytest.CaptureFixture[str], notice: Notice) -> None:
    def opened() -> Remembers:
        raise RuntimeError("x" * 1000)

    with notice:
        sink = TrackerSink("x", opened, patience_s=ENOUGH_S)
        sink.write(step_record(1))
        sink.close()
    first, second = capfd.readouterr().err.splitlines()
    assert first == f"warning: tracker x: RuntimeError: {'x' * 300}; training continues without it"
    assert "lacks 1 of 1 record " in second


@pytest.mark.fault(
    "services",
    "a tracker takes a record and never answers",
    happens="training never waits for it; the end does for a set time, and says how many records it lacks",
    exit_code=None,
)
def test_a_tracker_that_hangs_is_left_behind(capfd: pytest.CaptureFixture[str], notice: Notice) -> None:
    let_go = threading.Event()
    sink = TrackerSink("x", lambda: Remembers(hangs=let_go), most_waiting=3, patience_s=0.2)
    for step in range(1, 101):
        sink.write(step_record(step))
    began = time.monotonic()
    with notice:
        sink.close()
    assert time.monotonic() - began < ENOUGH_S
    let_go.set()
    full, behind, missing = capfd.readouterr().err.splitlines()
    assert full == "warning: tracker x: 3 records wait for it; it loses later records, metrics.jsonl has them"
    assert behind == "warning: tracker x: it has not ended within 0.2 s and is abandoned"
    assert missing.startswith("warning: tracker x: it lacks 100 of 100 records")
