"""Failures: the first cause of many records, its class and its summary."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from mtrain.base.errors import (
    ConfigError,
    DataError,
    MachineError,
    NumericError,
    RankLostError,
    RunFolderError,
)
from mtrain.base.files import disk_faults
from mtrain.runs.failure import (
    GONE,
    FailureClass,
    FailureRecord,
    class_of,
    clear_summary,
    first_cause,
    last_failure,
    last_summary,
    record_failure,
    recorded,
    recording,
    reported_summary,
)
from mtrain.watch.judge import Lost


def record(rank: int, kind: FailureClass, time_s: float, reported_by: str = "rank") -> FailureRecord:
    return FailureRecord(rank, kind, "Error", f"message of rank {rank}", 5, reported_by, time_s, start=1, host="here")


LOST = FailureClass.LOST_PEER


def test_who_started_a_rank_that_has_gone_says_how_it_ended() -> None:
    """A watchdog may report earlier, but knows no signal; it knows more where the kernel reclaimed memory."""
    assert Lost.GONE.name.lower() == GONE
    stuck, killed = record(1, LOST, 1.0, "watchdog"), record(1, LOST, 2.0, "launcher")
    gone = replace(stuck, error=GONE)
    memory = replace(gone, kind=FailureClass.OUT_OF_MEMORY)
    other = record(2, LOST, 3.0, "launcher")
    assert first_cause([gone, killed]) == first_cause([killed, gone]) == killed
    assert first_cause([memory, killed]) == memory
    assert first_cause([gone, other]) == gone
    assert first_cause([stuck, killed]) == stuck, "the watchdog has ended it"


@pytest.mark.parametrize(
    ("records", "rank"),
    [
        ([record(0, LOST, 1.0), record(1, FailureClass.DATA, 2.0)], 1),
        ([record(0, LOST, 1.0), record(1, LOST, 2.0, "watchdog"), record(2, LOST, 1.5)], 1),
        ([record(3, FailureClass.BUG, 2.0), record(2, FailureClass.DISK, 1.0)], 2),
    ],
    ids=["a cause after its consequence", "the watchdog's", "the earliest"],
)
def test_the_first_cause_is_what_others_follow_from(records: list[FailureRecord], rank: int, tmp_path: Path) -> None:
    assert first_cause(records).rank == rank
    for order in (records, records[::-1]):
        clear_summary(tmp_path)
        for each in order:
            record_failure(tmp_path, each)
        reported = last_failure(tmp_path)
        assert reported is not None
        assert reported.rank == rank, "whoever comes last"


def memory_fault() -> BaseException:
    fault = MachineError("there is not enough memory")
    fault.__cause__ = RuntimeError("DefaultCPUAllocator: can't allocate memory: 10 bytes")
    return fault


def disk_fault() -> BaseException:
    try:
        with disk_faults("write it"):
            raise OSError(28, "No space left on device")
    except MachineError as fault:
        return fault
    raise AssertionError


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ConfigError(""), FailureClass.USER_INPUT),
        (DataError(""), FailureClass.DATA),
        (NumericError(""), FailureClass.NUMERIC),
        (RankLostError(""), LOST),
        (RunFolderError(""), FailureClass.CONFLICT),
        (MachineError(""), FailureClass.MACHINE),
        (disk_fault(), FailureClass.DISK),
        (memory_fault(), FailureClass.OUT_OF_MEMORY),
        (MemoryError(), FailureClass.OUT_OF_MEMORY),
        (KeyError("x"), FailureClass.BUG),
    ],
    ids=lambda value: str(value) if isinstance(value, FailureClass) else type(value).__name__,
)
def test_every_error_has_a_class(error: BaseException, kind: FailureClass) -> None:
    assert class_of(error) is kind


def test_a_summary_tells_rank_error_class_place_and_what_to_do(tmp_path: Path) -> None:
    def users_loss() -> None:
        raise KeyError("labels")

    with pytest.raises(KeyError) as caught, recording(tmp_path, 3, 2, lambda: "forward_backward of step 7"):
        users_loss()
    text = last_summary(tmp_path)
    assert text == reported_summary(caught.value)
    assert text.startswith("error: [rank 3] KeyError: 'labels'\n  class: bug (exit code 1), rank 3 on ")
    assert ", in forward_backward of step 7\n" in text
    assert f'at: File "{__file__}", line ' in text
    assert "in users_loss" in text
    assert "try: the traceback names the line" in text
    record_failure(tmp_path, replace(record(0, LOST, 9e12), start=2))
    reported = last_failure(tmp_path)
    assert reported is not None
    assert (reported.rank, reported.place, len(recorded(tmp_path, 2))) == (3, "forward_backward of step 7", 2)
    clear_summary(tmp_path)
    assert last_failure(tmp_path) is None
    assert last_summary(tmp_path) == ""
    assert len(recorded(tmp_path, 2)) == 2, "the records stay"


def test_a_folder_of_another_start_gets_no_record(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError), recording(tmp_path, 0, 1, lambda: "save"):
        raise RunFolderError("taken over")
    assert list(tmp_path.iterdir()) == []
