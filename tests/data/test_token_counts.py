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
"""Samples of bos, two words, count words and eos: positions with text are one less, count + 1 of them are in the
loss."""
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


@pytest.mark.parametrize(  # two ranks that add their counts, and two that share each row, count what one rank does
    # counts of dp: tests/core/engine/test_loss_reduction.py
    ("ranks", "layout"),
    [
        *(pytest.param(ranks, "layout.tp=1", marks=pytest.mark.nightly) for ranks in (1, 2)),
        (2, "layout.cp=2"),
    ],
)
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


@pytest.mark.nightly  # runs/test_ledger_of_runs.py packs on the way; losses: tests/parity/layouts/test_packing.py
def test_a_run_may_be_packed_from_a_checkpoint_on(
    command: Callable[..., list[str]],
    start: Any,
    tmp_path: Path,
    write_jsonl: Callable[[Sequence[dict[str, Any]]], Path],
    word_tokenizer: Path,
) -> None:
    """Other ranks and wider rows give the same samples, losses and norms as without packing, and less padding."""
    path = write_jsonl([*LINES, {"prompt": "a", "response": "b c d e f g"}, {"prompt": "c", "response": "d"}])
    data = [
        "data.kind=sft",
        f"data.tokenizer={word_tokenizer}",
        f"data.train=[{{path: {path}}}]",
        f"data.valid=[{{path: {path}}}]",
        "valid.at_end=true",
        "loss.aggregation=seq-mean-token-mean",
        "checkpoint.interval_steps=1",
    ]
    assert finished(start(command(*data, "train.num_steps=4", run="alone")))[0] == 0
    assert finished(start(command(*data, "train.num_steps=2")))[0] == 0
    packed = ["data.packing.batch=sequences", "train.micro_batch_size=1", "train.tokens_per_micro_batch=24"]
    code, _, errors = finished(start(command(*data, *packed, "layout.tp=2", "train.num_steps=4", ranks=2)))
    assert code == 0, errors
    alone, found = records(tmp_path / "alone"), records(tmp_path / "run")
    assert [each["step"] for each in found] == [1, 2, 3, 4]
    for one, other in zip(alone, found, strict=True):
        assert other["loss"] == pytest.approx(one["loss"], rel=1e-5)
        assert other["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-5)
        assert [other[key] for key in ("tokens", "loss_tokens", "denominator")] == [
            one[key] for key in ("tokens", "loss_tokens", "denominator")
        ]
    assert all(other["padding_tokens"] < one["padding_tokens"] for one, other in zip(alone[2:], found[2:], strict=True))
    valid = [records(tmp_path / run, "valid")[-1] for run in ("alone", "run")]
    assert valid[1]["valid_loss"] == pytest.approx(valid[0]["valid_loss"], rel=1e-5)
    assert valid[1]["samples"] == valid[0]["samples"] == 6
