"""A real stop signal to a run that tokenizes its data."""

from __future__ import annotations

import json
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mtrain.base import fault_points
from tests.data.conftest import word_tokenizer
from tests.fault_table import Notice
from tests.training.test_trainer import DEADLINE_S, command, finished, records, running_ranks, start

__all__ = ["command", "start", "word_tokenizer"]


@pytest.mark.fault(
    "signals",
    "a stop signal while a start tokenises its data",
    happens="the build is left within a second or two and never read; REQUEUE, and the same command resumes",
    exit_code=0,
)
def test_a_start_that_tokenises_is_stopped_at_once(
    command: Callable[..., list[str]],
    start: Any,
    word_tokenizer: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    notice: Notice,
) -> None:
    lines = [{"prompt": "a", "response": " ".join("abcdefgh"[: 1 + number % 8])} for number in range(40)]
    (tmp_path / "samples.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    data = ["data.kind=sft", f"data.train=[{{path: {tmp_path / 'samples.jsonl'}}}]", f"data.tokenizer={word_tokenizer}"]
    data += [f"data.cache_dir={tmp_path / 'cache'}", "train.micro_batch_size=1", "train.num_steps=2"]
    # rank 0 or 1 builds; it stops at its first chunk until it gets a signal, and the other one waits for it
    monkeypatch.setenv(fault_points.VARIABLE, "await_stop rank=0 step=0 phase=tokenise")
    monkeypatch.setenv(fault_points.REACHED, str(tmp_path / "reached"))
    with notice:
        process = start(command(*data, ranks=2))
        deadline = time.monotonic() + DEADLINE_S
        while not (tmp_path / "reached").exists():
            assert time.monotonic() < deadline, "nobody tokenises"
            time.sleep(0.02)
        for rank in running_ranks(tmp_path / "run", 2):
            rank.send_signal(signal.SIGUSR1)
        code, _, errors = finished(process)
    assert code == notice.exit_code, errors
    # the other rank, which may have printed these, waits for the builder or still reads the file to know its content
    written = (tmp_path / "run" / "REQUEUE").read_text()
    assert re.search("stopped by a signal while the data were (tokenised|read)", written), written
    assert records(tmp_path / "run") == []
    left = [found.name for found in (tmp_path / "cache" / "entries").iterdir() if not found.name.startswith(".lock")]
    assert left == []
    monkeypatch.delenv(fault_points.VARIABLE)
    code, _, errors = finished(start(command(*data, ranks=2)))
    assert code == 0, errors
    assert len(records(tmp_path / "run")) == 2
    assert not (tmp_path / "run" / "REQUEUE").exists()
