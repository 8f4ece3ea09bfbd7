"""A program, or a notebook, whose training a signal has stopped: it sees that, after the save."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.data.conftest import word_tokenizer
from tests.fault_table import Notice
from tests.training.test_trainer import command, finished
from tests.warm import Command, program_environment

__all__ = ["command", "word_tokenizer"]

LOSS = """
import os
from mtrain.core.loss.functions.likelihood import next_token_loss

count = 0


def stopping(inputs, number, at):
    global count
    count += 1
    if count == at:
        os.kill(os.getpid(), number)
    return next_token_loss(inputs)
"""
PROGRAM = """
import json, os, signal, sys
from mtrain import load_config
from mtrain.base.signals import StopSignal
from mtrain.training.trainer import train
import stopping_loss

base, folder, data = sys.argv[1:]

def run(name, number, *more, at=3):
    stopping_loss.count = 0
    own = ["loss.function=stopping_loss:stopping", f"loss.options={{number: {int(number)}, at: {at}}}"]
    try:
        return train(load_config([base], [f"run.dir={folder}/{name}", *own, *more]))
    except BaseException as error:
        return [type(error).__name__, str(error)]

found = {
    "interrupt": run("interrupt", signal.SIGINT),
    "handler": signal.getsignal(signal.SIGINT) is signal.default_int_handler,
    "term": run("term", signal.SIGTERM),
    "whole": run("whole", signal.SIGINT, "train.num_steps=1", at=99),
    "at_end": run("at_end", signal.SIGINT, "train.num_steps=1", at=2),
}
with StopSignal() as held:
    found["held"] = run("held", signal.SIGTERM)
    found["received"] = held.received.name
    found["counting"] = run("counting", signal.SIGTERM, data, "train.num_steps=0", "train.num_epochs=1")
print(json.dumps(found))
"""


@pytest.mark.fault(
    "signals",
    "Ctrl-C, a notebook's interrupt or SIGTERM in a program that has called the trainer",
    happens="after the save KeyboardInterrupt, or StopRequestedError: the program does not go on as if all were done",
    exit_code=None,
)
def test_a_program_sees_that_its_training_was_stopped(
    command: Callable[..., list[str]], word_tokenizer: Path, tmp_path: Path, notice: Notice
) -> None:
    command()
    (tmp_path / "stopping_loss.py").write_text(LOSS)
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "samples.jsonl").write_text(json.dumps({"prompt": "a", "response": "b"}) + "\n")
    source = f"train: [{{path: {tmp_path / 'samples.jsonl'}}}]"
    data = f"data={{kind: sft, seq_length: 16, {source}, tokenizer: {word_tokenizer}, cache_dir: {tmp_path / 'cache'}}}"
    arguments = [sys.executable, "program.py", str(tmp_path / "base.yaml"), str(tmp_path), data]
    with notice:
        code, output, errors = finished(Command(arguments, tmp_path, program_environment(tmp_path)))
    assert code == 0, errors
    found = json.loads(output.splitlines()[-1])
    assert found == {
        "interrupt": ["KeyboardInterrupt", "stopped by a signal after step 3"],
        "handler": True,
        "term": ["StopRequestedError", "stopped by a signal after step 3"],
        "whole": True,
        "at_end": ["KeyboardInterrupt", "stopped by a signal when the run was done"],
        "held": False,
        "received": "SIGTERM",
        "counting": False,
    }
    for name, step in {"interrupt": 3, "term": 3, "held": 3, "whole": 1, "at_end": 1}.items():
        assert (tmp_path / name / "checkpoints" / f"step_{step:08d}" / "mtrain.json").exists(), name
    assert (tmp_path / "counting" / "REQUEUE").exists()
