"""Tokens of text, padding and loss tokens of a finetuning, as a run reports them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from mtrain.config import Config
from mtrain.data.loader import StepLoader
from tests.training.test_trainer import command, finished, records, start

__all__ = ["command", "start"]

LINES = [{"prompt": "a b", "response": "c " * count} for count in (1, 2, 3, 4)]
"""bos, two words, count words and eos: positions with text are one less, count + 1 of them are in the loss."""
TEXT, LOSS, POSITIONS = sum(3 + count for count in (1, 2, 3, 4)), sum(count + 1 for count in (1, 2, 3, 4)), 4 * 16


def test_the_loader_counts_rows_and_what_fills_them_up(
    write_jsonl: Callable[[Sequence[dict[str, Any]]], Path], word_tokenizer: Path, make_config: Callable[..., Config]
) -> None:
    path = str(write_jsonl(LINES))
    data = {"kind": "sft", "train": [{"path": path}], "valid": [{"path": path}], "tokenizer": str(word_tokenizer)}
    config = make_config({**data, "seq_length": 16}, train={"global_batch_size": 4})
    batches = StepLoader(config, 0, 1).batches(0)
    assert sum(batch.num_padding_tokens for batch in batches) == POSITIONS - TEXT
    assert sum(batch.num_loss_tokens for batch in batches) == LOSS
    wider = make_config({**data, "seq_length": 16}, train={"global_batch_size": 8})
    held_out = StepLoader(wider, 0, 1).held_out()
    assert held_out is not None
    (batches,) = held_out.batches()
    assert sum(batch.num_padding_tokens for batch in batches) == 2 * POSITIONS - TEXT, "rows beyond the set are padding"
    assert sum(batch.num_loss_tokens for batch in batches) == LOSS


@pytest.mark.parametrize(("ranks", "layout"), [(1, "layout.tp=1"), (2, "layout.tp=1"), (2, "layout.cp=2")])
def test_a_run_reports_text_and_padding_apart(
    command: Callable[..., list[str]],
    start: Any,
    tmp_path: Path,
    write_jsonl: Callable[[Sequence[dict[str, Any]]], Path],
    word_tokenizer: Path,
    ranks: int,
    layout: str,
) -> None:
    data = [
        "data.kind=sft",
        f"data.tokenizer={word_tokenizer}",
        f"data.train=[{{path: {write_jsonl(LINES)}}}]",
        layout,
    ]
    code, output, errors = finished(start(command(*data, "train.num_steps=2", ranks=ranks)))
    assert code == 0, errors
    code, more, errors = finished(start(command(*data, "train.num_steps=3", ranks=ranks)))
    assert code == 0, errors
    steps = records(tmp_path / "run")
    assert len(steps) == 3
    for step in steps:
        assert (step["tokens"], step["padding_tokens"], step["loss_tokens"]) == (TEXT, POSITIONS - TEXT, LOSS)
        assert step["tokens_per_second"] == pytest.approx(TEXT / step["seconds"])
    assert (output + more).count(f"padding {(POSITIONS - TEXT) / POSITIONS:.1%}") == 3
    manifest = json.loads((tmp_path / "run" / "checkpoints" / "step_00000003" / "mtrain.json").read_text())
    assert manifest["tokens"] == 3 * TEXT, "over both starts"
