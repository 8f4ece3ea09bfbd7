"""Several validation sets in one run: each has the loss of exactly its samples, and the first gives the run's loss."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.data.conftest import word_tokenizer
from tests.report.monitor.test_status import text as status_text
from tests.training.test_trainer import command, finished, records, start

__all__ = ["command", "start", "word_tokenizer"]


def test_each_set_has_its_own_loss_and_the_first_one_is_the_runs(
    command: Callable[..., list[str]], start: Any, tmp_path: Path, word_tokenizer: Path
) -> None:
    """One of two tensor-parallel ranks reads no data; the sets have different numbers of passes."""
    for name, words in {"train": "abcd", "long": "abcdefghi", "short": "fgh"}.items():
        lines = [json.dumps({"prompt": word, "response": f"{word} {words[0]}"}) for word in words]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    sets = {"long": "long", "short": "short", "again": "long", "both": "*o*"}
    # half of the samples of a step from each source
    train = ", ".join(f"{{path: {tmp_path}/{name}.jsonl}}" for name in ("train", "short"))
    valid = ", ".join(f"{name}: [{{path: {tmp_path}/{files}.jsonl}}]" for name, files in sets.items())
    arguments = [
        "data.kind=sft",
        f"data.tokenizer={word_tokenizer}",
        f"data.train=[{train}]",
        f"data.valid={{{valid}}}",
        "layout.tp=2",
        "train.num_steps=1",
        "valid.at_end=true",
    ]
    code, output, errors = finished(start(command(*arguments, ranks=2)))
    assert code == 0, errors
    (step,) = records(tmp_path / "run", "step")
    assert list(step["sources"]) == ["train.jsonl", "short.jsonl"]
    for part in ("numerator", "denominator"):
        assert sum(each[part] for each in step["sources"].values()) == pytest.approx(step["terms"]["main"][part])
    shown = "  ".join(f"{name} {each['loss']:.4f}" for name, each in step["sources"].items())
    assert f"sources    {shown}" in status_text(tmp_path / "run")
    (found,) = records(tmp_path / "run", "valid")
    losses = found["valid_sets"]
    assert list(losses) == list(sets)
    assert (found["valid_loss"], found["samples"]) == (losses["long"]["loss"], 9)
    assert losses["again"] == losses["long"]
    assert losses["short"]["loss"] != losses["long"]["loss"]
    assert losses["short"]["denominator"] == 3 * 3, "two words and the end of each answer"
    for part in ("numerator", "denominator"):
        assert losses["both"][part] == pytest.approx(losses["long"][part] + losses["short"][part], rel=1e-6)
    assert f"long {losses['long']['loss']:.4f}  short {losses['short']['loss']:.4f}" in output
    first = (tmp_path / "run" / "first_samples.txt").read_text()
    assert first.startswith("Step 1: ")
    assert "train.jsonl line " in first
    manifest = json.loads((tmp_path / "run" / "checkpoints" / "step_00000001" / "mtrain.json").read_text())
    assert manifest["valid_loss"] == losses["long"]["loss"]
