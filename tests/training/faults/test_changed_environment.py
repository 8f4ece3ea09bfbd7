"""Changes around a run: the machine's clock while it trains, the tokenizer between two starts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from mtrain.arch.layout import Layout
from mtrain.runs.goodput import goodput_of_run
from tests.core.state.test_save_and_load import configured
from tests.data.conftest import word_tokenizer
from tests.fault_table import Notice
from tests.pool import Pool
from tests.training.faults import environment_ranks, numeric_fault_ranks
from tests.training.faults.test_bad_steps import steps_of

__all__ = ["word_tokenizer"]


@pytest.mark.fault(
    "ranks",
    "the wall clock jumps by a day, forwards and backwards, at every look",
    happens="nothing waits by it: the run trains, saves and ends with the same numbers; times in its records are wrong",
    exit_code=None,
)
def test_a_wall_clock_that_jumps_changes_no_number(pool: Pool, tmp_path: Path, notice: Notice) -> None:
    changes = {"train.num_steps": 4, "checkpoint.interval_steps": 2, "train.process_group_timeout_s": 60}
    changes |= {"model.num_layers": 1, "train.micro_batch_size": 2}
    sound, jumping = (configured(**{"run.dir": str(tmp_path / name), **changes}) for name in ("sound", "jumping"))
    for ending in pool.run(numeric_fault_ranks.run, Layout(dp=2), sound):
        assert ending.exit_code == 0, ending.message
    with notice:
        endings = pool.run(environment_ranks.run_with_jumping_clock, Layout(dp=2), jumping)
    for found in endings:
        assert found.ending.exit_code == 0, found.ending.message
        assert found.looks > 10, "the run has looked at it"
    numbers = [[(r.step, r.loss, r.grad_norm) for r in steps_of(tmp_path / name)] for name in ("sound", "jumping")]
    assert len(numbers[0]) == 4
    assert numbers[0] == numbers[1]
    assert all(record.seconds < 3600 for record in steps_of(tmp_path / "jumping"))
    goodput = goodput_of_run(tmp_path / "jumping")
    assert goodput is not None
    assert 0 < goodput.effective_s < 3600


@pytest.mark.fault(
    "input",
    "the tokenizer of a run was replaced by another one of the same size",
    happens="resuming is refused: the samples are others than those that the run was trained on",
    exit_code=3,
)
def test_another_tokenizer_is_other_data(pool: Pool, tmp_path: Path, word_tokenizer: Path, notice: Notice) -> None:
    tokenizer = tmp_path / "tokenizer"
    shutil.copytree(word_tokenizer, tokenizer)
    lines = [json.dumps({"prompt": word, "response": f"{word} a"}) for word in "abcdefgh"]
    (tmp_path / "train.jsonl").write_text("\n".join(lines) + "\n")
    given = {
        "run.dir": str(tmp_path / "run"),
        "data.kind": "sft",
        "data.tokenizer": str(tokenizer),
        "data.cache_dir": str(tmp_path / "cache"),
        "data.train": [{"path": str(tmp_path / "train.jsonl")}],
        "optimizer.schedule": "constant",
        "model.num_layers": 1,
    }
    ending, *_ = pool.run(numeric_fault_ranks.run, Layout(), configured(**given, **{"train.num_steps": 1}))
    assert ending.exit_code == 0, ending.message
    content = json.loads((tokenizer / "tokenizer.json").read_text())
    words = content["model"]["vocab"]
    words["a"], words["b"] = words["b"], words["a"]
    (tokenizer / "tokenizer.json").write_text(json.dumps(content))
    with notice:
        ending, *_ = pool.run(numeric_fault_ranks.run, Layout(), configured(**given, **{"train.num_steps": 2}))
    assert ending.exit_code == notice.exit_code
    assert "checkpoint.allow_changed=[data.train]" in ending.message
    assert [record.step for record in steps_of(tmp_path / "run")] == [1]
