"""Which checkpoints stay: arithmetic by hypothesis, deletion on disk."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtrain.base.errors import DataError
from mtrain.checkpoint.store.directory import clean_leftovers, newest_good, reading
from mtrain.checkpoint.store.retention import Keep, Retention, apply_retention, to_delete, way_back
from mtrain.checkpoint.store.steps import published_steps, step_name
from tests.base.crash import killed_at_every_file_operation
from tests.checkpoint.checkpoints import change_manifest, damage, save
from tests.fault_table import Notice
from tests.messages import refuses

step_lists = st.lists(st.integers(0, 1000), unique=True, max_size=30)
keep_lasts = st.integers(1, 8)
keep_everys = st.none() | st.integers(1, 100)


@given(step_lists, keep_lasts, keep_everys)
def test_the_newest_and_the_multiples_stay_and_nothing_else(
    steps: list[int], keep_last: int, keep_every: int | None
) -> None:
    gone = to_delete(steps, Keep(keep_last, keep_every))
    for step in steps:
        is_recent = sum(other > step for other in steps) < keep_last
        is_multiple = keep_every is not None and step % keep_every == 0
        assert (step in gone) == (not is_recent and not is_multiple)
    assert gone == sorted(set(gone))


@given(step_lists, keep_lasts, keep_everys)
def test_deleting_after_each_save_ends_like_deleting_once(
    steps: list[int], keep_last: int, keep_every: int | None
) -> None:
    kept: list[int] = []
    for step in sorted(steps):
        kept.append(step)
        gone = to_delete(kept, Keep(keep_last, keep_every))
        kept = [other for other in kept if other not in gone]
    assert kept == sorted(set(steps) - set(to_delete(steps, Keep(keep_last, keep_every))))


def test_retention_on_disk(tmp_path: Path) -> None:
    for step in (10, 20, 30, 40, 50):
        save(tmp_path, step)
    assert apply_retention(tmp_path, Keep(2, 20), 50) == [10, 30]
    assert published_steps(tmp_path) == [20, 40, 50]
    assert apply_retention(tmp_path, Keep(2, 20), 50) == []


def test_the_last_good_checkpoint_stays_where_newer_ones_are_damaged(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        save(tmp_path, step)
    damage(tmp_path, 30)
    assert apply_retention(tmp_path, Keep(1), 30) == [10]
    assert published_steps(tmp_path) == [20, 30]
    entry = newest_good(tmp_path).entry
    assert entry is not None
    assert entry.step == 20


@pytest.mark.fault(
    "checkpoints",
    "kill -9 while a checkpoint is deleted",
    happens="the others stay whole; a start ends the deletion",
    exit_code=5,
)
def test_a_process_killed_while_deleting_leaves_good_ones_only(tmp_path: Path, notice: Notice) -> None:
    for step in (10, 20, 30):
        save(tmp_path, step)
    for _ in killed_at_every_file_operation(lambda: apply_retention(tmp_path, Keep(1), 30), tmp_path):
        with notice:
            newest = newest_good(tmp_path)
        assert newest.entry is not None
        assert (newest.entry.step, newest.warnings) == (30, ())
        clean_leftovers(tmp_path)
        for step in {10, 20} - set(published_steps(tmp_path)):
            save(tmp_path, step)


@given(st.dictionaries(st.integers(0, 50), st.none() | st.floats(0, 9), max_size=12), st.integers(0, 4))
def test_the_best_by_validation_stay(losses: dict[int, float | None], best: int) -> None:
    known = {step: loss for step, loss in losses.items() if loss is not None}
    gone = to_delete(losses, Keep(1, None, best), known)
    ranked = sorted(known, key=lambda step: (known[step], -step))
    assert set(gone) == set(losses) - set(ranked[:best]) - {max(losses, default=-1)}


@given(
    st.dictionaries(st.integers(0, 50), st.tuples(st.floats(0, 9), st.sampled_from([None, "a", "b"])), max_size=12),
    st.integers(0, 3),
)
def test_losses_of_different_measures_do_not_compete(results: dict[int, tuple[float, str | None]], best: int) -> None:
    losses = {step: loss for step, (loss, _) in results.items()}
    measures = {step: measure for step, (_, measure) in results.items()}
    gone = to_delete(results, Keep(1, None, best), losses, measures)
    for step, (loss, measure) in results.items():
        better = sum((own, -other) < (loss, -step) for other, (own, others) in results.items() if others == measure)
        assert (step in gone) == (better >= best and step != max(results))


@pytest.mark.parametrize("is_higher", [True, False])
def test_the_best_by_a_metric_of_tasks_stays_on_disk(tmp_path: Path, is_higher: bool) -> None:
    """Each metric name, and the validation loss, has its own best checkpoint."""
    for step, name, value in ((10, "a", 3.0), (20, "a", 1.0), (30, "a", 2.0), (40, "b", 9.0), (60, "a", 2.0)):
        save(tmp_path, step)
        metric = {"name": name, "value": value, "is_better_if_higher": is_higher}
        change_manifest(tmp_path / step_name(step), format=4, task_metric=metric)
    save(tmp_path, 50, 7.0)
    best = 10 if is_higher else 20
    assert apply_retention(tmp_path, Keep(1, best=1), 60) == sorted({10, 20, 30} - {best})
    assert published_steps(tmp_path) == [best, 40, 50, 60]


def test_the_best_stays_on_disk(tmp_path: Path) -> None:
    for step, loss in ((10, 3.0), (20, 1.0), (30, 2.0), (40, None), (50, None)):
        save(tmp_path, step, loss)
    assert apply_retention(tmp_path, Keep(1, best=1), 50) == [10, 30, 40]
    assert published_steps(tmp_path) == [20, 50]


@pytest.mark.fault(
    "checkpoints",
    "retention deletes a checkpoint that another process reads",
    happens="it stays until it is read",
    exit_code=None,
)
def test_what_is_being_read_is_not_deleted(tmp_path: Path, notice: Notice) -> None:
    entries = [save(tmp_path, step) for step in (10, 20, 30)]
    with reading(entries[0]), reading(entries[0]), notice:
        assert apply_retention(tmp_path, Keep(1), 30) == [20]
        assert (entries[0].path / "common.pt").read_bytes() == b"common"
    assert apply_retention(tmp_path, Keep(1), 30) == [10]
    with refuses(DataError), reading(entries[0]):
        pass


def test_what_is_not_confirmed_neither_counts_nor_goes(tmp_path: Path) -> None:
    for step in (10, 20, 30, 40):
        save(tmp_path, step)
    assert apply_retention(tmp_path, Keep(1), 9) == []
    assert apply_retention(tmp_path, Keep(1), 25) == [10]
    assert published_steps(tmp_path) == [20, 30, 40]
    assert apply_retention(tmp_path, Keep(1), 30) == [20]
    assert apply_retention(tmp_path, Keep(1), 30) == []


def test_a_run_deletes_when_what_it_published_or_resumed_from_is_confirmed(tmp_path: Path) -> None:
    for step in (10, 20):
        save(tmp_path, step)
    retention = Retention(tmp_path, Keep(1), lambda: None, start_step=20)
    retention.finish(60)
    assert published_steps(tmp_path) == [10, 20], "the start has confirmed nothing yet"
    retention.confirmed = 20
    retention.finish(60)
    assert published_steps(tmp_path) == [20]
    save(tmp_path, 30)
    retention.note_published(30)
    retention.confirmed = 29
    retention.finish(60)
    assert published_steps(tmp_path) == [20, 30]
    retention.confirmed = 30
    retention.finish(60)
    assert published_steps(tmp_path) == [30]


def test_the_way_back_names_what_to_do(tmp_path: Path) -> None:
    assert way_back(tmp_path, 7) == "no good checkpoint is left to go back to"
    first, second, third = (save(tmp_path, step).path for step in (10, 20, 30))
    assert way_back(tmp_path, 30) == f"go back to step 30: the next start resumes from {third}"
    damage(tmp_path, 30)
    assert way_back(tmp_path, 30) == f"go back to step 20: the next start resumes from {second}"
    assert way_back(tmp_path, 19).startswith(f"go back to step 10 ({first}): move {second} away")
    none = f"no good checkpoint is left to go back to: no finite loss followed {first}, {second}"
    assert way_back(tmp_path, 9) == none
