"""metrics.jsonl: append, rewind, repair."""

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from mtrain.base.errors import DataError, MachineError
from mtrain.report.metrics.jsonl import AppendedFile, JsonlSink, read_records, rewind
from mtrain.report.metrics.record import Record
from tests.base.crash import killed_at_every_file_operation
from tests.fault_table import Notice
from tests.messages import refuses
from tests.report.metrics.records import step_record, valid_record


def written(path: Path, *records: Record, resume_step: int = 0) -> list[Record]:
    sink = JsonlSink(path, resume_step)
    for record in records:
        sink.write(record)
    sink.close()
    return list(read_records(path))


def test_every_record_can_be_read_before_the_sink_is_closed(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    sink = JsonlSink(path, 0)
    for step in range(1, 4):
        sink.write(step_record(step))
        assert [record.step for record in read_records(path)] == list(range(1, step + 1))
    sink.close()


def test_resuming_at_a_step_leaves_no_line_beyond_it(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    first: list[Record] = [
        valid_record(0),
        step_record(1),
        step_record(2),
        valid_record(2),
        step_record(3),
        valid_record(3),
    ]
    written(path, *first)
    again = written(path, step_record(3, loss=9.0), resume_step=2)
    assert again == [*first[:4], step_record(3, loss=9.0)]


def test_starting_at_step_zero_keeps_nothing(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    written(path, valid_record(0), step_record(1))
    assert written(path, valid_record(0, 3.0)) == [valid_record(0, 3.0)]


def test_what_is_kept_is_kept_byte_for_byte(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    written(path, *(step_record(step, loss=1 / step) for step in range(1, 6)))
    before = path.read_bytes().splitlines(keepends=True)
    rewind(path, 3)
    assert path.read_bytes() == b"".join(before[:3])


@pytest.mark.parametrize("length", [1, 40, -1])
@pytest.mark.fault(
    "disk",
    "half a line at the end of metrics.jsonl, as a kill leaves it",
    happens="left out by readers, and taken away by the next start",
    exit_code=None,
)
def test_a_half_line_at_the_end_is_repaired(tmp_path: Path, length: int, notice: Notice) -> None:
    path = tmp_path / "metrics.jsonl"
    written(path, step_record(1), step_record(2))
    first, second = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(first + second[:length])
    with notice:
        assert list(read_records(path)) == [step_record(1)]
    assert written(path, step_record(2, loss=4.0), resume_step=2) == [step_record(1), step_record(2, loss=4.0)]


def test_a_damaged_line_inside_is_named_and_nothing_is_lost(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    written(path, step_record(1))
    path.write_bytes(path.read_bytes() + b'{"kind": "st\n' + path.read_bytes())
    before = path.read_bytes()
    with refuses(DataError, "line 2", "metrics.jsonl"):
        JsonlSink(path, 1)
    assert path.read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_line_without_end_is_not_read_to_its_end(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    written(path, step_record(1))
    os.truncate(path, 40 * 2**30)
    with refuses(DataError, "line 2", "metrics.jsonl", "1048576"):
        list(read_records(path))


def test_records_wait_for_the_disk_with_one_warning_and_no_half_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "metrics.jsonl"
    records = [step_record(step) for step in range(1, 7)]
    sink = JsonlSink(path, 0)
    sink.write(records[0])
    with no_file_larger_than(path.stat().st_size + 10):
        for record in records[1:4]:
            sink.write(record)
            assert path.read_text().endswith("\n"), "half a line is taken back"
            assert list(read_records(path)) == records[:1]
    assert capsys.readouterr().err == (
        f"warning: could not write {path}: File too large; training continues, the records wait\n"
    )
    sink.write(records[4])
    assert list(read_records(path)) == records[:5]
    assert capsys.readouterr().err == f"{path} has what was waiting for the disk\n"
    sink.write(records[5])
    sink.close()
    assert list(read_records(path)) == records
    assert capsys.readouterr().err == ""


def test_what_the_disk_has_refused_to_the_end_is_named_and_missed_at_the_next_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "metrics.jsonl"
    sink = JsonlSink(path, 0)
    sink.write(step_record(1))
    with no_file_larger_than(path.stat().st_size):
        sink.write(step_record(2))
        sink.write(step_record(3))
        with refuses(MachineError, "step 2", "step 3"):
            sink.close()
    capsys.readouterr()
    assert written(path, step_record(4), resume_step=3) == [step_record(1), step_record(4)]
    assert capsys.readouterr().err == f"warning: {path} lacks 2 of the 3 steps before this start\n"


def test_what_waits_is_bounded_and_what_is_dropped_is_counted(tmp_path: Path) -> None:
    path, before = tmp_path / "file", b" " * 10_000
    path.write_bytes(before)
    file = AppendedFile(path, b"head ", most_waiting_bytes=20)
    with no_file_larger_than(len(before)):
        for step in range(1, 6):
            file.append(step, b"entry %d " % step)
    file.append(6, b"last")
    assert path.read_bytes() == before + b"head entry 4 entry 5 last"
    with refuses(MachineError, "step 1", "step 3"):
        file.close()


@contextmanager
def no_file_larger_than(size_bytes: int) -> Iterator[None]:
    """Makes the operating system refuse to write beyond the size, as it does on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_process_killed_while_rewinding_leaves_the_old_file_or_the_new_one(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    old = written(path, *(step_record(step) for step in range(1, 6)))
    whole = path.read_bytes()
    seen = set()
    for _ in killed_at_every_file_operation(lambda: rewind(path, 2), tmp_path):
        records = list(read_records(path))
        assert records in (old, old[:2])
        seen.add(len(records))
        path.write_bytes(whole)
    assert seen == {5, 2}
