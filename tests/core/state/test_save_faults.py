"""Faults injected while saving: the newest checkpoint stays intact, and one message says why."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from mtrain.arch.layout import Layout
from mtrain.base.errors import MachineError, RunFolderError
from mtrain.checkpoint.store.directory import CheckpointEntry, clean_leftovers, load_entry, newest_good, verify_files
from mtrain.checkpoint.store.steps import published_steps, step_name
from mtrain.config import Config
from tests.core.state import checkpoint_ranks
from tests.core.state import save_fault_ranks as ranks
from tests.core.state.test_save_and_load import configured
from tests.fault_table import Notice
from tests.pool import Pool, RankFailed

LAYOUT = Layout(dp=2)
WAITS = {"checkpoint.async_save": False}
BEFORE = 1
"""The step that is saved before the fault strikes in the save of the next."""
BY_DAY = [
    *((0, phase) for phase in ("snapshot", "write.1", "publish", "rename", "retention")),
    (1, "write.20"),
]
"""Rank and phase; all but `snapshot` lie in the thread that writes."""
BY_NIGHT = [
    *((0, phase) for phase in ("open", "write.0", "write.20", "write.26", "written", "list", "state", "end")),
    *((1, phase) for phase in ("snapshot", "open", "write.0", "write.1", "write.2", "write.26", "written")),
]
"""Further phases between those by day, with the same files present."""


def newest_whole(folder: Path) -> CheckpointEntry:
    """Returns the newest checkpoint, after reading every byte of it."""
    entry = newest_good(folder).entry
    assert entry is not None
    verify_files(entry, entry.manifest.files)
    return entry


def small(**changes: Any) -> Config:
    """Configures two layers: more would only write the same tensors again."""
    return configured(**{"model.num_layers": 2} | changes)


@pytest.fixture(scope="module")
def saved_once(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one checkpoint."""
    folder = tmp_path_factory.mktemp("saved")
    (ending, _) = pool.run(ranks.train_and_save, LAYOUT, small(), folder, [BEFORE], None, 1)
    assert ending.error == ("nothing", "")
    return folder


@pytest.fixture
def saved(saved_once: Path, tmp_path: Path) -> Path:
    """Copies that folder for one test alone."""
    return shutil.copytree(saved_once, tmp_path, dirs_exist_ok=True, symlinks=True)


@pytest.mark.fault(
    "checkpoints",
    "kill -9 of a rank at any of 21 points of a save",
    happens="the checkpoint before stays the newest, or the new one is whole; a start deletes leftovers",
    exit_code=5,
)
@pytest.mark.parametrize(
    "points", [BY_DAY, pytest.param(BY_NIGHT, marks=pytest.mark.nightly)], ids=["by day", "by night"]
)
def test_a_process_killed_at_any_of_many_points_of_a_save(
    pool: Pool, saved: Path, points: list[tuple[int, str]], notice: Notice
) -> None:
    assert len(set(BY_DAY + BY_NIGHT)) == 21
    for number, (rank, phase) in enumerate(points):
        step = 2
        fault = f"kill rank={rank} step={step} phase={phase}"
        with notice, pytest.raises(RankFailed, match=r"died with exit code -9|Connection closed|peer"):
            pool.run(ranks.train_and_save, LAYOUT, small(), saved, [step], fault, step, BEFORE)
        is_published = phase in ("retention", "end")
        assert newest_whole(saved).step == (step if is_published else BEFORE), fault
        clean_leftovers(saved)
        assert {path.name for path in saved.iterdir()} <= {"latest", step_name(BEFORE), step_name(step)}, number
        if is_published:
            for name in (saved / step_name(step)).iterdir():
                name.unlink()
            (saved / step_name(step)).rmdir()


@pytest.mark.nightly  # tests/training/faults saves both ways by day
def test_a_save_that_training_waits_for_writes_the_same_bytes(pool: Pool, tmp_path: Path) -> None:
    beside, waiting = tmp_path / "beside", tmp_path / "waiting"
    pool.run(ranks.save_once, LAYOUT, configured(), beside)
    assert pool.run(ranks.save_once, LAYOUT, configured(**WAITS), waiting) == [[1], [1]]
    one, other = (dict(newest_whole(folder).manifest.files) for folder in (waiting, beside))
    assert one.pop("config.yaml") != other.pop("config.yaml"), "checkpoint.async_save differs"
    assert one == other


@pytest.mark.fault(
    "checkpoints",
    "the disk is full for one rank in a save",
    happens="the save fails on all ranks, with the rank's name; the next one succeeds",
    exit_code=None,
)
@pytest.mark.parametrize(("victim", "changes"), [(0, {}), (1, {}), (1, WAITS)], ids=["0", "1", "1 waits"])
def test_a_full_disk_fails_one_save_and_training_goes_on(
    pool: Pool, saved: Path, victim: int, changes: dict[str, Any], notice: Notice
) -> None:
    fault = f"full rank={victim} step=2 phase=write.20"
    with notice:
        endings = pool.run(ranks.train_and_save, LAYOUT, small(**changes), saved, [2, 4], fault)
    assert [(ending.steps, ending.error) for ending in endings] == [(4, ("nothing", ""))] * 2
    assert newest_whole(saved).step == 4
    assert published_steps(saved) == [BEFORE, 4]
    (line,) = endings[0].warnings
    assert line.startswith(f"warning: no checkpoint of step 2: rank {victim}: could not save")
    assert "No space left on device" in line
    assert line.endswith("training continues")
    assert endings[1].warnings == []


@pytest.mark.fault(
    "checkpoints",
    "`latest` cannot be written when a checkpoint has been published",
    happens="a warning; the checkpoint counts, and older ones are deleted as ever",
    exit_code=None,
)
def test_a_checkpoint_counts_though_latest_cannot_be_written(pool: Pool, saved: Path, notice: Notice) -> None:
    (saved / "latest").unlink()
    (saved / "latest").mkdir()
    with notice:
        endings = pool.run(ranks.train_and_save, LAYOUT, small(**{"checkpoint.keep_last": 1}), saved, [2, 4], None)
    assert [(ending.steps, ending.error) for ending in endings] == [(4, ("nothing", ""))] * 2
    assert notice.exit_code is None
    assert BEFORE not in published_steps(saved)
    assert newest_whole(saved).step == 4
    for line, step in zip(endings[0].warnings, (2, 4), strict=True):
        assert line.startswith(f"warning: {saved / step_name(step)} is published, but mtrain could not write ")
        assert "latest: Is a directory" in line


@pytest.mark.fault(
    "checkpoints",
    "a save fails or hangs, with checkpoint.on_save_failure=stop",
    happens="every rank stops, after save_timeout_s where it hangs",
    exit_code=7,
)
@pytest.mark.parametrize(  # between the files and their publication: the kills above
    ("fault", "phase"),
    [
        ("full", "write.20"),
        pytest.param("full", "publish", marks=pytest.mark.nightly),
        # that a writer hangs is noticed by day in the test below
        pytest.param("hang", "write.20", marks=pytest.mark.nightly),
    ],
)
def test_a_failed_save_stops_training_where_it_is_asked_to(
    pool: Pool, saved: Path, fault: str, phase: str, notice: Notice
) -> None:
    """A writer that hangs is noticed within checkpoint.save_timeout_s."""
    timeout_s = 1 if fault == "hang" else 600
    config = small(**{"checkpoint.on_save_failure": "stop", "checkpoint.save_timeout_s": timeout_s})
    injected = f"{fault} rank=0 step=2 phase={phase}"
    with notice:
        endings = pool.run(ranks.train_and_save, LAYOUT, config, saved, [2], injected, 2000)
    assert notice.exit_code == MachineError.exit_code
    for ending in endings:
        kind, text = ending.error
        assert kind == "MachineError"
        assert ("No space left" if fault == "full" else "save_timeout_s=1") in text
        assert "step 2" in text
        assert ending.steps < 2000
        assert ending.seconds < 600
    assert newest_whole(saved).step == BEFORE


@pytest.mark.fault(
    "checkpoints",
    "the writer of a checkpoint hangs (dead file system), to the end of the run",
    happens="that save fails after save_timeout_s, the next at once; no second copy of the state; one message",
    exit_code=7,
)
@pytest.mark.waits
def test_a_hanging_writer_holds_up_neither_training_nor_the_message(pool: Pool, saved: Path, notice: Notice) -> None:
    """The next save fails at once, as its writer would add a second copy of the state; the last one must succeed."""
    config = small(**{"checkpoint.save_timeout_s": 5})  # in which the other rank has written, however busy the machine
    with notice:
        endings = pool.run(ranks.train_and_save, LAYOUT, config, saved, [2, 4], "hang rank=1 step=2 phase=open", 6)
    assert notice.exit_code == MachineError.exit_code
    for ending in endings:
        assert ending.steps == 6
        assert ending.error[0] == "MachineError"
        assert "rank 1" in ending.error[1]
        assert ending.seconds < 600
    first, second = endings[0].warnings
    assert "no checkpoint of step 2: rank 1: not finished within checkpoint.save_timeout_s=5" in first
    assert "no checkpoint of step 4: rank 1: the writer of an earlier checkpoint still waits for the disk" in second
    assert newest_whole(saved).step == BEFORE


@pytest.mark.fault(
    "checkpoints",
    "the run folder is taken over from elsewhere during a save",
    happens="the older run publishes nothing",
    exit_code=6,
)
@pytest.mark.parametrize("has_saved", [False, True], ids=["", "by a run that has saved the step"])
def test_a_run_that_lost_its_folder_publishes_nothing(
    pool: Pool, tmp_path: Path, notice: Notice, has_saved: bool
) -> None:
    with notice:
        (ending,) = pool.run(ranks.lose_the_folder, Layout(), configured(), tmp_path, has_saved)
    assert notice.exit_code == RunFolderError.exit_code
    kind, text = ending.error
    assert kind == "RunFolderError"
    assert "taken over by process 1 on another-node" in text
    assert ending.steps == 1
    assert newest_whole(tmp_path / "checkpoints").step == (2 if has_saved else 1), "of the other run"


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGES: dict[str, tuple[Any, str]] = {
    "flipped bit in a shard": (lambda folder: _flip(folder / "__1_0.distcp"), "BLAKE3"),
    "flipped bit in the metadata": (lambda folder: _flip(folder / ".metadata"), "BLAKE3"),
    "truncated shard": (lambda folder: (folder / "__0_0.distcp").write_bytes(b"PK"), "has 2 bytes"),
    "missing shard": (lambda folder: (folder / "__0_0.distcp").unlink(), "is missing"),
}


@pytest.mark.fault(
    "checkpoints",
    "flipped bit, truncated or missing file of a checkpoint",
    happens="the newest good one is taken, with a warning for each that is not; none good: exit code 3",
    exit_code=None,
)
def test_a_damaged_checkpoint_gives_way_to_the_one_before_loudly(pool: Pool, saved: Path, notice: Notice) -> None:
    steps = [BEFORE + 1 + number for number in range(len(DAMAGES))]
    config = small(**{"checkpoint.keep_last": 9})
    pool.run(ranks.train_and_save, LAYOUT, config, saved, steps, None, steps[-1], BEFORE)
    assert published_steps(saved) == [BEFORE, *steps]
    for step, (damage, _) in zip(steps, DAMAGES.values(), strict=True):
        damage(saved / step_name(step))
    with notice:
        found = pool.run(ranks.resume_or_initialize, Layout(tp=2), small(), saved)
    for taken, warnings, error in found:
        assert error == ("nothing", "")
        assert taken == BEFORE
        for line, step, (_, why) in zip(warnings, reversed(steps), reversed(DAMAGES.values()), strict=True):
            assert why in line
            assert f"step {step} is skipped" in line
    _flip(saved / step_name(BEFORE) / "training_state.json")
    for _, _, (kind, text) in pool.run(ranks.resume_or_initialize, Layout(tp=2), small(), saved):
        assert kind == "DataError"
        assert "no usable checkpoint" in text


@pytest.mark.parametrize("victim", [pytest.param(0, marks=pytest.mark.nightly), 1])  # rank 0: training continues, above
def test_a_full_disk_on_one_rank_fails_the_save_on_all(pool: Pool, tmp_path: Path, victim: int) -> None:
    faults = pool.run(checkpoint_ranks.save_on_full_disk, Layout(pp=2), configured(), tmp_path, victim)
    assert len(set(faults)) == 1
    kind, text = faults[0]
    assert kind == "MachineError"
    assert f"rank {victim}: could not save the checkpoint of step 2: File too large" in text
    assert list(tmp_path.iterdir()) == []


def test_a_published_step_is_not_written_again(pool: Pool, tmp_path: Path) -> None:
    pool.run(checkpoint_ranks.save, Layout(dp=2), small(), tmp_path, [3])
    faults = pool.run(checkpoint_ranks.save_error, Layout(dp=2), small(), tmp_path, 3)
    assert [kind for kind, _ in faults] == ["RunFolderError"] * 2
    assert load_entry(tmp_path / step_name(3)).manifest.layout == "tp1-pp1-cp1-dp2"
