"""The data ledger: its entries, their storage, and what the checker finds."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtrain.base.errors import DataError
from mtrain.core.batch.order import SamplePosition
from mtrain.core.batch.sample import Sample
from mtrain.data.ledger import (
    Ledger,
    SourceEntry,
    StartEntry,
    StepEntry,
    from_line,
    ranges,
    read_file,
    rewind_ledger,
    step_entry,
    to_line,
)
from mtrain.training.recording import LedgerSink
from tests.fault_table import Notice
from tests.messages import refuses
from tests.report.metrics.records import step_record, valid_record

START = StartEntry(0, "fp", ("a",), (4,))


class Listed:
    """Entries made beforehand: one source, epoch 0 of four samples and later epochs."""

    def __init__(self, ids: dict[int, list[int]]) -> None:
        self._ids = ids

    def next_entry(self, step: int) -> StepEntry:
        parts: dict[int, list[int]] = {}
        for number in self._ids[step]:
            parts.setdefault(number // 4, []).append(number % 4)
        return StepEntry(step, 2, 1, tuple(SourceEntry(0, e, tuple(sorted(ids)), 10, 5) for e, ids in parts.items()))


def written(folder: Path, rank: int, ids: dict[int, list[int]], start: StartEntry = START) -> None:
    sink = LedgerSink(folder, rank, Listed(ids).next_entry, start)
    for step in ids:
        sink.write(valid_record(step))
        sink.write(step_record(step))
    sink.close()


@given(st.lists(st.integers(0, 40)))
def test_numbers_survive_their_text(ids: list[int]) -> None:
    entry = StepEntry(1, 9, 2, (SourceEntry(0, 0, tuple(sorted(ids)), 1, 1),))
    line = to_line(entry)
    assert line.count(b"\n") == 1
    assert from_line(line) == entry


def test_neighbours_are_a_range() -> None:
    assert ranges((0, 1, 2, 5, 5, 6, 9)) == "0-2,5,5-6,9"


def sample(first: int, weight: float = 1.0) -> Sample:
    ids = np.arange(first, first + 4)
    return Sample(tokens=ids[:-1], labels=ids[1:], mask=np.array([0.0, 1.0, 1.0]), weight=weight)


def read(slots: list[int], weight: float = 1.0) -> StepEntry:
    """Builds the entry of samples of two sources that differ."""
    return step_entry(3, 9, [(SamplePosition(slot % 2, 0, slot), sample(slot, weight)) for slot in slots])


def test_an_entry_is_of_what_was_read_in_any_order() -> None:
    entry = read([2, 0, 1])
    assert entry == read([0, 1, 2])
    assert entry.sources == (SourceEntry(0, 0, (0, 2), 6, 4), SourceEntry(1, 0, (1,), 3, 2))
    assert (read([0, 1]).digest + read([2]).digest) % 2**64 == entry.digest, "ranks add up"
    assert read([0, 1, 2], weight=2.0).digest != entry.digest
    assert read([0, 1, 2], weight=0.0).sources[0].loss_tokens == 0


def test_ranks_are_merged_and_an_epoch_is_counted(tmp_path: Path) -> None:
    written(tmp_path, 0, {1: [0], 2: [2], 3: [4]})
    written(tmp_path, 1, {1: [3], 2: [1], 3: [6]})
    ledger = Ledger(tmp_path)
    assert ledger.step(1) == StepEntry(1, 2, 2, (SourceEntry(0, 0, (0, 3), 20, 10),))
    assert ledger.incomplete_steps() == {}
    first, second = ledger.epochs()
    assert (first.samples, first.size, first.repeated, first.lost) == (4, 4, (), 0)
    assert (second.epoch, second.samples, second.lost) == (1, 2, 0), "an epoch under way lacks nothing"


@pytest.mark.parametrize(
    ("ids", "repeated", "lost", "incomplete"),
    [
        ({1: [0, 1], 2: [1, 2], 3: [4, 5]}, (1,), 1, {}),
        ({1: [0, 1], 3: [4, 5]}, (), 2, {2: "is missing"}),
        ({1: [0, 1], 2: [2], 3: [3, 4]}, (), 0, {2: "has 1 of 2 samples"}),
    ],
    ids=["repeated", "a step is missing", "half a step"],
)
def test_what_was_repeated_or_lost_is_found(
    ids: dict[int, list[int]],
    repeated: tuple[int, ...],
    lost: int,
    incomplete: dict[int, str],
    tmp_path: Path,
) -> None:
    written(tmp_path, 0, ids)
    ledger = Ledger(tmp_path)
    assert (ledger.epochs()[0].repeated, ledger.epochs()[0].lost) == (repeated, lost)
    assert ledger.incomplete_steps() == incomplete


@pytest.mark.parametrize(("num_steps", "unread", "lost"), [(4, 12, 0), (8, 4, 0), (10, 0, 0)])
def test_an_unfinished_window_across_epochs_has_lost_nothing(
    num_steps: int, unread: int, lost: int, tmp_path: Path
) -> None:
    """Windows of 20 samples, five epochs of four; the rows of a window come in any order."""
    order = np.random.default_rng(1).permutation(20).tolist()
    start = StartEntry(0, "fp (2 rows of 8 a step, from windows of 20)", ("a",), (4,))
    written(tmp_path, 0, {step: order[2 * step - 2 : 2 * step] for step in range(1, num_steps + 1)}, start)
    ledger = Ledger(tmp_path)
    assert ledger.unread_of_window() == unread
    assert {(each.lost, each.repeated) for each in ledger.epochs()} == {(lost, ())}


def test_what_no_window_holds_any_more_is_lost(tmp_path: Path) -> None:
    """The window has ended, another one of 2 has begun, and one sample of it is to come: sample 1 comes no more."""
    start = StartEntry(0, "fp (2 rows of 8 a step, from windows of 4, of 2 from 2 updates on)", ("a",), (4,))
    written(tmp_path, 0, {1: [0, 5], 2: [2, 3], 3: [4, 6]}, start)
    ledger = Ledger(tmp_path)
    assert ledger.unread_of_window() == 0
    assert [each.lost for each in ledger.epochs()] == [1, 0]


def test_resuming_takes_back_what_lies_beyond_in_the_files_of_all_ranks(tmp_path: Path) -> None:
    for rank in range(2):
        written(tmp_path, rank, {1: [rank], 2: [2 + rank]})
    path = tmp_path / "dp_00001.jsonl"
    path.write_bytes(path.read_bytes() + b'{"step": 3, "dig')  # killed while it wrote
    rewind_ledger(tmp_path, 1)
    alone = StartEntry(1, "fp", ("a",), (4,))
    written(tmp_path, 0, {2: [2, 3]}, alone)
    assert [entry for entry in read_file(path) if isinstance(entry, StepEntry) and entry.step > 1] == []
    ledger = Ledger(tmp_path)
    assert (ledger.incomplete_steps(), ledger.epochs()[0].repeated) == ({}, ())
    assert ledger.start_of(2) == alone
    rewind_ledger(tmp_path, 1)
    assert Ledger(tmp_path).starts == {0: START}, "a start that is taken back is no start"
    rewind_ledger(tmp_path, 0)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.fault(
    "input",
    "a line of a run's data ledger is damaged",
    happens="one message names the file and the line",
    exit_code=3,
)
@pytest.mark.parametrize("line", [b"{", b"[1]", b'{"step": 1}', b'{"step": 1, "digest": "x", "sources": []}'])
def test_a_damaged_line_is_named(line: bytes, tmp_path: Path, notice: Notice) -> None:
    written(tmp_path, 0, {1: [0, 1]})
    path = tmp_path / "dp_00000.jsonl"
    path.write_bytes(path.read_bytes() + line + b"\n")
    with notice, refuses(DataError, "line 3", "dp_00000.jsonl") as caught:
        Ledger(tmp_path)
    assert caught.value.exit_code == notice.exit_code
