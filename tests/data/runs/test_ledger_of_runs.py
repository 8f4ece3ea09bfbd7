"""The data ledger of real runs that were killed and went on with other ranks, rows and packing."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from mtrain.base import fault_points
from mtrain.data.ledger import Ledger
from tests.training.test_trainer import command, finished, start

__all__ = ["command", "start"]

WORDS = "abcdefghij"


def test_a_run_repeats_and_loses_nothing_whatever_changes_on_its_way(
    command: Callable[..., list[str]],
    start: Any,
    word_tokenizer: Path,
    write_jsonl: Callable[[Sequence[dict[str, Any]]], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers = [{"prompt": WORDS[number % 10], "response": " ".join(WORDS[: 1 + number % 7])} for number in range(11)]
    path = write_jsonl(answers)
    data = ["data.kind=sft", f"data.train=[{{path: {path}}}]", f"data.tokenizer={word_tokenizer}"]
    data += ["checkpoint.interval_steps=1", "checkpoint.async_save=false"]
    assert finished(start(command(*data, "train.num_steps=6", run="straight")))[0] == 0

    # one rank, killed between the checkpoints of steps 2 and 3
    monkeypatch.setenv(fault_points.VARIABLE, "kill rank=0 step=3 phase=snapshot")
    assert finished(start(command(*data, "train.num_steps=6")))[0] != 0
    monkeypatch.delenv(fault_points.VARIABLE)
    assert max(Ledger(tmp_path / "run" / "ledger").steps) == 3, "trained, but not saved"
    for steps, ranks, changes in (
        (5, 2, ["data.packing={batch: sequences}", "train.micro_batch_size=1"]),  # dp 1 -> 2
        (6, 1, ["train.micro_batch_size=4"]),
    ):
        code, _, errors = finished(start(command(*data, *changes, f"train.num_steps={steps}", ranks=ranks)))
        assert code == 0, errors
    straight, run = (Ledger(tmp_path / name / "ledger") for name in ("straight", "run"))
    assert [run.step(step) for step in range(1, 7)] == [straight.step(step) for step in range(1, 7)]
    assert len(run.steps[4]) == 2, "each rank wrote its own part"
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    counted = [(sum(part.tokens for part in run.step(each["step"]).sources), each["tokens"]) for each in records]
    assert all(ours == theirs for ours, theirs in counted), "by another way of counting"
    inspect = [*command()[:3], "inspect", "data", str(tmp_path / "run")]
    code, output, errors = finished(start(inspect))
    assert code == 0, errors
    assert "6 steps: each sample of an epoch once" in output
    assert finished(start([*inspect, "--step", "4"]))[1].startswith("step 4: digest of the trained samples ")
    # a second copy of one rank's part is what a repeated step looks like
    (tmp_path / "run" / "ledger" / "dp_00009.jsonl").write_bytes(
        (tmp_path / "run" / "ledger" / "dp_00001.jsonl").read_bytes()
    )
    code, output, _ = finished(start(inspect))
    assert code == 1
    assert "step 4 has 6 of 4 samples" in output
    assert "samples were repeated or lost" in output
