"""Several sinks as one."""

from pathlib import Path

import pytest

from mtrain.report.metrics.jsonl import JsonlSink, read_records
from mtrain.report.metrics.sinks import Sinks
from tests.report.metrics.records import step_record


def test_every_sink_gets_every_record(tmp_path: Path) -> None:
    paths = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    with Sinks(*(JsonlSink(path, 0) for path in paths)) as sinks:
        sinks.write(step_record(1))
    assert [list(read_records(path)) for path in paths] == [[step_record(1)]] * 2


def test_all_are_closed_when_the_run_fails(tmp_path: Path) -> None:
    inner = JsonlSink(tmp_path / "metrics.jsonl", 0)
    with pytest.raises(ZeroDivisionError), Sinks(inner):
        raise ZeroDivisionError
    with pytest.raises(ValueError, match="closed file"):
        inner.write(step_record(2))
