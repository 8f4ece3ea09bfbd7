"""Every verb takes a run by its steps or by its epochs, and refuses both with one message."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.command_line import call
from tests.config.samples import content
from tests.config.yaml_files import write

_BOTH = "both give the length of the run"
LENGTHS: dict[str, tuple[dict[str, Any], str | None]] = {
    "steps": ({"num_steps": 20}, None),
    "epochs": ({"num_epochs": 2}, None),
    "epochs in place of an earlier file's steps": ({"num_steps": 0, "num_epochs": 0.5}, None),
    "both": ({"num_steps": 20, "num_epochs": 2}, _BOTH),
    "no steps": ({"num_steps": 0}, "train.num_steps: no value is given"),
    "epochs below 0": ({"num_epochs": -1}, "train.num_epochs: input should be greater than 0"),
    "epochs in words": ({"num_epochs": "two"}, "train.num_epochs: input should be a valid number"),
    "steps that are fewer than those of the warm-up": ({"num_steps": 3}, "optimizer.warmup_steps=5 must be below"),
}
VERBS: dict[str, tuple[list[str], str | None]] = {
    "plan": (["plan", "--gpus", "4", "--gpu", "h100"], None),
    "check": (["check", "--without-files", "--world-size", "4"], None),
    "parity": (["verify", "parity", "--layouts", "nonsense"], "nonsense"),
    "resume": (["verify", "resume", "--steps", "3", "--at", "5"], "--at 5 must lie between"),
    "preempt": (["verify", "preempt", "--steps", "2"], "--steps 2 is too few"),
}
"""Verb -> arguments, and the refusal that follows once the configuration is accepted."""


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("verb", VERBS)
def test_a_length_is_accepted_or_refused_by_every_verb(verb: str, length: str, tmp_path: Path) -> None:
    """The data are on another machine; a check then takes random tokens, also where it cannot count epochs."""
    keys, refusal = LENGTHS[length]
    data = {"kind": "indexed", "seq_length": 64, "train": [{"path": str(tmp_path / "elsewhere")}]}
    given = content(data=data, train={"global_batch_size": 8, **keys}, optimizer={"lr": 1e-3, "warmup_steps": 5})
    words, otherwise = VERBS[verb]
    code, text = call(*words, write(tmp_path / "run.yaml", given))
    expected = otherwise if refusal is None else refusal
    assert code == (0 if expected is None else 2), text
    assert (expected or "") in text


def test_a_plan_does_not_depend_on_the_length(tmp_path: Path) -> None:
    found = []
    for keys in ({"num_steps": 20}, {"num_epochs": 2}, {"num_steps": 10**9}, {}):
        given = content(train={"global_batch_size": 8, **keys})
        code, text = call("plan", "--gpus", "4", "--gpu", "h100", "--json", write(tmp_path / "run.yaml", given))
        assert code == 0, text
        found.append(json.loads(text))
    assert found[1:] == found[:1] * 3
