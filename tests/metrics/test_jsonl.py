"""metrics.jsonl: append, rewind, repair."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from mtrain.errors import DataError, MachineError
from mtrain.metrics.jsonl import JsonlSink, read_records, rewind
from mtrain.metrics.record import Record
from tests.crash import killed_at_every_file_operation
from tests.metrics.records import step_record, valid_record


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
    first = [valid_record(0), step_record(1), step_record(2), valid_record(2), step_record(3), valid_record(3)]
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
def test_a_half_line_at_the_end_is_repaired(tmp_path: Path, length: int) -> None:
    path = tmp_path / "metrics.jsonl"
    written(path, step_record(1), step_record(2))
    first, second = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(first + second[:length])
    assert list(read_records(path)) == [step_record(1)]
    assert written(path, step_record(2, loss=4.0), resume_step=2) == [step_record(1), step_record(2, loss=4.0)]


def test_a_damaged_line_inside_is_named_and_nothing_is_lost(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    written(path, step_record(1))
    path.write_bytes(path.read_bytes() + b'{"kind": "st\n' + path.read_bytes())
    before = path.read_bytes()
    with pytest.raises(DataError, match=r"metrics.jsonl, line 2: "):
        JsonlSink(path, 1)
    assert path.read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_full_disk_is_one_readable_error_and_the_next_start_repairs(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    sink = JsonlSink(path, 0)
    sink.write(step_record(1))
    with no_file_larger_than(path.stat().st_size + 10), pytest.raises(MachineError, match=r"could not write .*jsonl"):
        sink.write(step_record(2))
    sink.close()
    assert written(path, step_record(2), resume_step=1) == [step_record(1), step_record(2)]


@contextmanager
def no_file_larger_than(size_bytes: int) -> Iterator[None]:
    """The operating system refuses to write beyond the size, as it does on a full disk."""
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
