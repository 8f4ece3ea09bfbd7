"""A run of packed rows that goes on with windows of another size."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mtrain.data.ledger import Ledger
from tests.data.conftest import word_tokenizer
from tests.fault_table import Notice
from tests.training.test_trainer import command, finished, records, start

__all__ = ["command", "start", "word_tokenizer"]


@pytest.mark.fault(
    "input",
    "data.packing.window of a run whose steps count rows was changed",
    happens="refused with the former window, rows and batch; set them back, or accept it by checkpoint.allow_changed",
    exit_code=3,
)
def test_another_window_is_refused_with_what_to_set(
    command: Callable[..., list[str]], start: Any, word_tokenizer: Path, tmp_path: Path, notice: Notice
) -> None:
    lines = [{"prompt": "a", "response": " ".join("abcdefgh"[: 1 + number % 8])} for number in range(24)]
    (tmp_path / "samples.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    data = ["data.kind=sft", f"data.train=[{{path: {tmp_path / 'samples.jsonl'}}}]", f"data.tokenizer={word_tokenizer}"]
    data += [f"data.cache_dir={tmp_path / 'cache'}"]
    of_20, of_12 = (f"data.packing={{batch: rows, window: {size}}}" for size in (20, 12))
    code, _, errors = finished(start(command(*data, of_20, "train.num_steps=2")))
    assert code == 0, errors
    with notice:
        code, _, errors = finished(start(command(*data, of_12, "train.num_steps=3")))
    assert code == notice.exit_code, errors
    former = "(data.packing.window=20, train.global_batch_size=4 and rows of 16), but this start gives 12, 4 and 16"
    assert f"has packed rows from windows {former}" in errors
    assert "restore the earlier values" in errors
    assert "keep data.packing.window and add data.packing.later=[{from_step: 2, window: 12}]" in errors
    code, _, errors = finished(start(command(*data, of_20, "data.packing.across_epochs=true", "train.num_steps=3")))
    assert code == notice.exit_code, errors
    assert "this start gives 20, 4 and 16, data.packing.across_epochs=true" in errors
    later = "data.packing.later=[{from_step: 2, window: 12}]"
    given = (*data, of_20, later, "train.num_steps=9", "train.micro_batch_size=1")
    code, _, errors = finished(start(command(*given, ranks=2)))
    assert code == 0, errors
    ledger = Ledger(tmp_path / "run" / "ledger")
    assert not ledger.incomplete_steps()
    first, *others = ledger.epochs()
    assert (first.samples, first.repeated, first.lost) == (24, (), 0), "each sample of the epoch once"
    assert all(epoch.repeated == () for epoch in others)
    consent = "checkpoint.allow_changed=[data.train]"
    code, _, errors = finished(start(command(*data, of_12, "train.num_steps=10", consent)))
    assert code == 0, errors
    assert [record["step"] for record in records(tmp_path / "run")] == [*range(1, 11)]
