"""Runs that go on with other settings, by consent: what is refused, what is recorded, what stays bit for bit."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mtrain.base import fault_points
from mtrain.data.formats.megatron_indexed import writing_corpus
from mtrain.report.compare.report import report_comparison
from tests.fault_table import Notice
from tests.training.test_trainer import command, finished, numbers, records, start

__all__ = ["command", "start"]

CONSENT = "checkpoint.allow_changed=[optimizer.lr]"


def manifest_changes(run: Path, step: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((run / "checkpoints" / f"step_{step:08d}" / "mtrain.json").read_text())[
        "changes"
    ]
    return found


def test_a_change_with_consent_is_recorded_with_its_step(
    command: Any,
    start: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = tmp_path / "run"
    steps = ("train.num_steps=4", "checkpoint.interval_steps=2", "checkpoint.async_save=false")
    assert finished(start(command("train.num_steps=2")))[0] == 0
    shutil.copytree(run, tmp_path / "before")

    # a start that changes something and dies before it saves has left nothing but config.yaml
    monkeypatch.setenv(fault_points.VARIABLE, "kill rank=0 step=4 phase=snapshot")
    code, _, _ = finished(start(command(*steps, CONSENT, "optimizer.lr=0.02")))
    assert code != 0
    monkeypatch.delenv(fault_points.VARIABLE)
    assert [record["step"] for record in records(run, "change")] == [2]

    code, _, errors = finished(start(command(*steps, "optimizer.lr=0.02")))
    assert code == 6, "the checkpoint has the old value, so consent is needed again"
    assert "optimizer.lr had other values" in errors

    code, output, errors = finished(start(command(*steps, CONSENT, "optimizer.lr=0.02")))
    assert code == 0, errors
    assert "from here on optimizer.lr: 0.01 -> 0.02" in output
    change = {"step": 2, "key": "optimizer.lr", "old": "0.01", "new": "0.02"}
    assert records(run, "change") == [{"kind": "change", **change}], "once, whatever was started before"
    assert manifest_changes(run, 4) == [change]
    assert [record["lr"] for record in records(run)] == [0.01, 0.01, 0.02, 0.02]

    code, _, errors = finished(start(command("train.num_steps=5", "optimizer.lr=0.02")))
    assert code == 0, errors
    assert manifest_changes(run, 5) == [change], "it stays in the history"

    report_comparison(run, tmp_path / "before", None, tmp_path)
    assert "run after step 2: optimizer.lr: 0.01 -> 0.02" in capsys.readouterr().out


def test_a_finished_run_says_so(command: Any, start: Any, tmp_path: Path) -> None:
    assert finished(start(command("train.num_steps=2")))[0] == 0
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    code, output, errors = finished(start(command("train.num_steps=2")))
    assert code == 0, errors
    assert (
        f"{tmp_path / 'run'} is finished: its newest checkpoint has completed 2 steps, and train.num_steps=2" in output
    )
    assert "Raise train.num_steps to continue" in output
    assert output.index("is finished") < output.index("loading "), "before weights are read"
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before


def write_corpus(prefix: Path, first: int) -> Path:
    prefix.parent.mkdir(exist_ok=True)
    with writing_corpus(str(prefix), vocab_size=64) as writer:
        for number in range(30):
            writer.add(np.arange(first + number, first + number + 20, dtype=np.int64) % 64)
    return prefix


def of_corpus(*prefixes: Path, extra: Sequence[str] = ()) -> list[str]:
    sources = ", ".join(f"{{path: {prefix}}}" for prefix in prefixes)
    return ["data.kind=indexed", f"data.train=[{sources}]", *extra]


@pytest.mark.fault(
    "input",
    "the corpus of a run was replaced by another one",
    happens="resuming is refused until checkpoint.allow_changed names data.train; a moved corpus is the same one",
    exit_code=3,
)
def test_a_moved_corpus_is_the_same_and_another_one_needs_consent(
    command: Any, start: Any, tmp_path: Path, notice: Notice
) -> None:
    first, moved = write_corpus(tmp_path / "here" / "a", 0), tmp_path / "there" / "b"
    other = write_corpus(tmp_path / "here" / "other", 7)
    moved.parent.mkdir()
    assert finished(start(command(*of_corpus(first), run="straight")))[0] == 0
    assert finished(start(command(*of_corpus(first), "train.num_steps=3")))[0] == 0
    for kind in (".bin", ".idx"):
        first.with_suffix(kind).rename(moved.with_suffix(kind))
    with notice:
        code, _, errors = finished(start(command(*of_corpus(other))))
    assert code == notice.exit_code, errors
    assert "checkpoint.allow_changed=[data.train]" in errors
    code, _, errors = finished(start(command(*of_corpus(moved), "train.num_steps=5")))
    assert code == 0, errors
    assert numbers(tmp_path / "run") == numbers(tmp_path / "straight")[:5], "bit for bit, without consent"

    consent = "checkpoint.allow_changed=[data.train]"
    code, output, errors = finished(start(command(*of_corpus(other, extra=[consent]))))
    assert code == 0, errors
    assert "the data continue with sample 20 of their new order" in output
    (change,) = manifest_changes(tmp_path / "run", 6)
    assert (change["step"], change["key"]) == (5, "data.train")
    assert change["old"].startswith("fingerprint ")
    assert change["old"] != change["new"]
    assert numbers(tmp_path / "run")[:5] == numbers(tmp_path / "straight")[:5]
    assert numbers(tmp_path / "run")[5] != numbers(tmp_path / "straight")[5]
