"""What a run reads besides its training data: replaced between two starts, moved, or another one on another rank."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mtrain.arch.layout import Layout
from tests.checkpoint.checkpoints import change_manifest, save
from tests.fault_table import Notice
from tests.pool import Pool
from tests.training.faults import inputs_ranks
from tests.training.test_changed import manifest_changes, of_corpus, write_corpus
from tests.training.test_trainer import command, finished, numbers, records, start

__all__ = ["command", "start"]

OWN_LOSS = """
from mtrain.core.loss.functions.likelihood import next_token_loss
from mtrain.core.loss.pair import LossPair
from my_scale import SCALE


def scaled(inputs):
    pair = next_token_loss(inputs)
    return LossPair(SCALE * pair.numerator, pair.denominator)
"""


def manifest(run: Path, step: int) -> dict[str, Any]:
    """Returns the content of a checkpoint's manifest."""
    found: dict[str, Any] = json.loads((run / "checkpoints" / f"step_{step:08d}" / "mtrain.json").read_text())
    return found


@pytest.mark.fault(
    "input",
    "the source of a loss function of the user's own, or a module that it imports, was replaced",
    happens="resuming is refused until checkpoint.allow_changed names the term's function",
    exit_code=3,
)
@pytest.mark.parametrize(  # a side term is read by the same code
    "term", [pytest.param("loss", marks=pytest.mark.nightly), "loss.side_terms.own"]
)
def test_another_source_of_a_loss_needs_consent(
    term: str, command: Any, start: Any, tmp_path: Path, notice: Notice
) -> None:
    (tmp_path / "my_terms.py").write_text(OWN_LOSS)
    (tmp_path / "my_scale.py").write_text("SCALE = 2.0\n")
    loss = [f"{term}.function=my_terms:scaled"]
    assert finished(start(command(*loss, "train.num_steps=2")))[0] == 0
    key = f"{term}.function"
    assert manifest(tmp_path / "run", 2)["inputs"].keys() == {key, "data.valid.valid"}
    (tmp_path / "my_scale.py").write_text("SCALE = 3.0\n")
    with notice:
        code, _, errors = finished(start(command(*loss, "train.num_steps=3")))
    assert code == notice.exit_code, errors
    assert f"checkpoint.allow_changed=[{key}]" in errors
    assert "Traceback" not in errors
    code, output, errors = finished(start(command(*loss, "train.num_steps=3", f"checkpoint.allow_changed=[{key}]")))
    assert code == 0, errors
    assert f"from here on {key}: fingerprint " in output
    (change,) = manifest_changes(tmp_path / "run", 3)
    assert (change["step"], change["key"]) == (2, key)


@pytest.mark.fault(
    "input",
    "the teacher of a distillation is another one than before, as a run folder that has moved on",
    happens="resuming is refused until checkpoint.allow_changed names it; a moved teacher is the same one",
    exit_code=3,
)
def test_another_teacher_needs_consent_and_a_moved_one_does_not(
    command: Callable[..., list[str]], start: Any, tmp_path: Path, notice: Notice
) -> None:
    def student(teacher: Path, *arguments: str, run: str = "run", ranks: int = 1) -> tuple[int, str, str]:
        terms = "loss.side_terms={kl: {function: distillation, coefficient: 0.5}}"
        return finished(start(command(terms, f"loss.teacher.checkpoint={teacher}", *arguments, run=run, ranks=ranks)))

    of_teacher = {"run": "teacher"}
    assert finished(start(command("train.seed=7", "train.num_steps=1", **of_teacher)))[0] == 0
    teacher, first = tmp_path / "teacher", tmp_path / "elsewhere" / "first"
    shutil.copytree(teacher, first)
    assert student(teacher, run="straight")[0] == 0
    assert student(teacher, "train.num_steps=2")[0] == 0
    assert finished(start(command("train.seed=7", "train.num_steps=2", **of_teacher)))[0] == 0

    with notice:
        code, _, errors = student(teacher, "train.num_steps=3")
    assert code == notice.exit_code, errors
    assert "checkpoint.allow_changed=[loss.teacher.checkpoint]" in errors
    code, _, errors = student(first, "train.num_steps=4")
    assert code == 0, errors
    assert numbers(tmp_path / "run") == numbers(tmp_path / "straight")[:4], "bit for bit, without consent"
    code, _, errors = student(first, "train.num_steps=5", "layout.tp=2", ranks=2)
    assert code == 0, errors
    code, _, errors = student(teacher, "checkpoint.allow_changed=[loss.teacher.checkpoint]")
    assert code == 0, errors
    (change,) = manifest_changes(tmp_path / "run", 6)
    assert (change["step"], change["key"]) == (5, "loss.teacher.checkpoint")


@pytest.mark.nightly  # old manifests are read by day in tests/compatibility and tests/runs
def test_a_teacher_that_no_checkpoint_knows_is_known_by_its_path(
    command: Callable[..., list[str]], start: Any, tmp_path: Path
) -> None:
    """A run that an earlier program began has such checkpoints."""
    assert finished(start(command("train.num_steps=1", run="teacher")))[0] == 0
    teacher = ["loss.side_terms={kl: {function: distillation}}", f"loss.teacher.checkpoint={tmp_path / 'teacher'}"]
    assert finished(start(command(*teacher, "train.num_steps=2")))[0] == 0
    folder = tmp_path / "run" / "checkpoints" / "step_00000002"
    change_manifest(folder, format=4, inputs={}, valid_measure=None)
    shutil.copytree(tmp_path / "teacher", tmp_path / "moved")
    moved = [*teacher[:1], f"loss.teacher.checkpoint={tmp_path / 'moved'}", "train.num_steps=3"]
    code, _, errors = finished(start(command(*moved)))
    assert code == 6, errors
    assert "loss.teacher.checkpoint had other values" in errors
    code, _, errors = finished(start(command(*teacher, "train.num_steps=3")))
    assert code == 0, errors
    assert "loss.teacher.checkpoint" in manifest(tmp_path / "run", 3)["inputs"]


@pytest.mark.nightly  # by day the training data, in test_changed.py, by the same fingerprints
def test_losses_of_another_validation_set_are_told_apart(command: Any, start: Any, tmp_path: Path) -> None:
    train, first, other = (write_corpus(tmp_path / name, place) for name, place in (("t", 0), ("v", 5), ("w", 9)))
    moved = write_corpus(tmp_path / "there" / "x", 5)

    def run(valid: Path, step: int) -> tuple[str, dict[str, Any]]:
        data = of_corpus(train, extra=[f"data.valid=[{{path: {valid}}}]", f"train.num_steps={step}"])
        code, output, errors = finished(start(command(*data, "valid.at_end=true")))
        assert code == 0, errors
        return output, manifest(tmp_path / "run", step)

    _, one = run(first, 1)
    _, two = run(moved, 2)
    output, three = run(other, 3)
    assert one["valid_loss"] != two["valid_loss"]
    assert one["valid_measure"] == two["valid_measure"]
    assert three["valid_measure"] not in (None, one["valid_measure"])
    assert "from here on data.valid.valid: fingerprint " in output
    assert "the data go on" not in output
    (change,) = records(tmp_path / "run", "change")
    assert (change["step"], change["key"]) == (2, "data.valid.valid")


@pytest.mark.fault(
    "ranks",
    "a rank has another source of the user's loss, or another validation set, than rank 0",
    happens="all ranks end with one message that names the key and the rank",
    exit_code=3,
)
def test_ranks_agree_on_what_they_read(pool: Pool, notice: Notice) -> None:
    layout, key = Layout(dp=2), "loss.function"
    assert pool.run(inputs_ranks.agree, layout, {0: {key: "a", "data.valid.valid": "v"}, 1: {key: "a"}}) == ["", ""]
    with notice:
        found = pool.run(inputs_ranks.agree, layout, {0: {key: "a"}, 1: {key: "b"}})
    (text,) = set(found)
    assert "loss.function differs between rank 1 and rank 0 (fingerprint b, not a)" in text
    assert notice.exit_code == 3


def test_ranks_agree_on_the_checkpoint_that_they_load(pool: Pool, tmp_path: Path) -> None:
    folders = tmp_path / "a", tmp_path / "b"
    for folder in folders:
        save(folder / "checkpoints", 10)
    assert pool.run(inputs_ranks.open_in, Layout(dp=2), folders) == ["", ""]
    change_manifest(folders[1] / "checkpoints" / "step_00000010", tokens=5)
    (text,) = set(pool.run(inputs_ranks.open_in, Layout(dp=2), folders))
    assert "step_00000010 is another checkpoint for rank 1" in text
    assert "give every node the same files" in text
