"""Notebooks: the examples run and their pages show what they show; a cell has one bar and one sentence, not a log."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests.docs.notebooks import PAGES, cells_of, code, executed, page_of, text_of, without_numbers
from tests.paths import ROOT
from tests.warm import program_environment

SETTINGS = """
import os, signal, mtrain
from mtrain import TermInputs, weigh
settings = {
    "run": {"dir": "run"},
    "model": {"num_layers": 1, "hidden_size": 16, "ffn_hidden_size": 16, "num_attention_heads": 2, "vocab_size": 64},
    "train": {"num_steps": 30, "global_batch_size": 2, "micro_batch_size": 1, "precision": "fp32"},
    "optimizer": {"lr": 1e-2},
    "data": {"kind": "mock", "seq_length": 8},
    "valid": {"interval_steps": 15},
}
away = {"run": {"dir": "away"}, "checkpoint": {"initialize_from": "nowhere"}}
config = mtrain.load_config(settings)
"""
INTERRUPTED = """
calls = 0
def stopping(inputs: TermInputs):
    global calls
    calls += 1
    if calls == 5:
        os.kill(os.getpid(), signal.SIGINT)
    return weigh(inputs.logits.cross_entropy(inputs.labels), inputs)
own = [settings, {"run": {"dir": "own"}, "train": {"num_steps": 8}, "loss": {"function": stopping}}]
mtrain.train(mtrain.load_config(own))
"""
INTERRUPTED_RANKS = """
import threading, time
from pathlib import Path
def interrupt():
    while not Path("long/metrics.jsonl").exists():
        time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGINT)
threading.Thread(target=interrupt).start()
mtrain.launch(mtrain.load_config([settings, {"run": {"dir": "long"}, "train": {"num_steps": 100000}}]), ranks=2)
"""
FAULTY_RANKS = """
Path("faulty.py").write_text("def loss(inputs): return 1 / 0")
mtrain.launch(mtrain.load_config([settings, {"run": {"dir": "b"}, "loss": {"function": "faulty:loss"}}]), ranks=1)
"""
OPEN_ENGINE = "engine = mtrain.Engine(config)"
MISTAKES = {
    "mtrain.load_config([settings, {'train': {'num_step': 5}}])": "ConfigError: train.num_step: ",
    "mtrain.train('run.yaml')": "ConfigError: train needs a Config from load_config, but got a str",
    "mtrain.plot('nowhere')": "DataError: nowhere/metrics.jsonl does not exist",
    "mtrain.launch(config, ranks=3)": "ConfigError: ",
    FAULTY_RANKS: "MtrainError: ZeroDivisionError: division by zero",
    "mtrain.launch(mtrain.load_config(own), ranks=1)": "ConfigError: loss.function=__main__:stopping is defined in",
    "mtrain.train(mtrain.load_config([settings, away]))": "DataError: ",
    "mtrain.train(mtrain.load_config([settings, {'layout': {'tp': 2}}]))": "ConfigError: ",
    f"{OPEN_ENGINE}; mtrain.train(config)": "ConfigError: train opens torch.distributed, but it is already open",
    "engine.forward_backward([])": "DataError: the batch has no sample",
    "mtrain.close_all(); mtrain.train(mtrain.load_config([settings, {'train': {'seed': 5}}]))": "RunFolderError: ",
}


@pytest.mark.parametrize("name", PAGES)
def test_an_example_runs_and_its_page_shows_its_outputs(name: str, tmp_path: Path) -> None:
    cells = cells_of(ROOT / "examples" / name)
    outputs = executed(cells, tmp_path)
    programs = [cell for cell in cells if cell["cell_type"] == "code"]
    may_fail = ["raises-exception" in cell["metadata"].get("tags", []) for cell in programs]
    failed = [any(output["output_type"] == "error" for output in each) for each in outputs]
    assert failed == may_fail, "\n".join(map(text_of, outputs))
    page = page_of(cells, outputs, tmp_path / f"notebook_{Path(name).stem}.png")
    assert without_numbers(page) == without_numbers((ROOT / PAGES[name]).read_text()), "python -m tests.docs.notebooks"


def test_a_cell_shows_one_bar_one_sentence_and_the_state_after_an_interrupt(tmp_path: Path) -> None:
    environment = {**program_environment(tmp_path), "FORCE_COLOR": "1"}  # as a kernel sets it
    launched = "mtrain.launch(mtrain.load_config([settings, {'run': {'dir': 'other'}}]), ranks=1)"
    cells = code(SETTINGS, "config", "mtrain.train(config)", INTERRUPTED, "mtrain.train(mtrain.load_config(own))")
    found = executed([*cells, *code(launched, INTERRUPTED_RANKS, *MISTAKES)], tmp_path, environment)
    _, table, (bar, result), interrupted, continued, streamed, stopped, *mistakes = found

    assert re.search(r"^train\.num_steps +30$", text_of(table), re.MULTILINE)
    assert "model.norm" not in text_of(table), "no defaults"
    assert '<th style="text-align: left">train.num_steps</th>' in table[0]["data"]["text/html"]

    assert (bar["output_type"], result["output_type"]) == ("display_data", "execute_result")
    assert bar["data"]["text/plain"].startswith("train 30/30  loss ")
    assert re.findall(r"step (\d+)/30  valid_loss", bar["data"]["text/plain"]) == ["15", "30"]
    assert '<progress value="30" max="30">' in bar["data"]["text/html"]
    assert re.match(r"run run; state finished; step 30 of 30; last step loss ", text_of([result]))

    said = text_of(interrupted)
    (step,) = set(re.findall(r"stopped by a signal after step (\d)", said))
    assert f"stopped by a signal after step {step}; everything is saved, and the same call continues" in said
    assert f"state stopped for requeue: stopped by a signal after step {step}; step {step} of 8" in said
    assert (tmp_path / "own" / "checkpoints" / f"step_0000000{step}" / "mtrain.json").exists()
    assert "state finished; step 8 of 8" in text_of(continued)

    lines = text_of(streamed)
    assert "\x1b" not in lines
    assert re.findall(r"^step (\d+)/30  loss", lines, re.MULTILINE) == [str(step) for step in range(1, 31)]
    assert "run other; state finished" in lines

    said = text_of(stopped)
    (step,) = re.findall(r"^stopped at step (\d+) of 100000; the same command resumes$", said, re.MULTILINE)
    assert "stopped; everything is saved, and the same call continues the run" in said
    assert f"run long; state stopped for requeue: stopped by a signal after step {step}; step {step} of 100000" in said
    assert (tmp_path / "long" / "checkpoints" / f"step_{int(step):08d}" / "mtrain.json").exists()

    for outputs, (source, message) in zip(mistakes, MISTAKES.items(), strict=True):
        *others, error = outputs
        assert others == [] or "launch" in source, "ranks have written lines of their own"
        (line,) = error["traceback"]
        assert line.startswith(message)
        assert os.linesep not in line
