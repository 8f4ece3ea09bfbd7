"""`eval.prompts`: a run answers prompts while it trains, and its numbers do not change."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mtrain.arch.layout import Layout
from mtrain.base.errors import ConfigError, DataError
from mtrain.hf.configuration import load_config
from mtrain.training.sampling.generate import _rewind
from tests.messages import refuses
from tests.pool import Pool
from tests.training.one_process import train_fresh
from tests.training.sampling.test_generate import word_tokenizer
from tests.training.test_trainer import BASE

PROMPTS = ["a user", "assistant"]


def started(pool: Pool, folder: Path, run: str, layout: Layout, *overrides: str) -> list[dict[str, Any]]:
    """Trains, and returns the records of the steps without their times."""
    (folder / "base.yaml").write_text(BASE)
    given = [f"run.dir={folder / run}", "train.num_steps=2", "train.device=cpu", "model.hidden_dropout=0.2"]
    given += [
        f"layout.tp={layout.tp}",
        f"layout.sp={layout.sp}",
        f"data.tokenizer={folder}",
        "metrics.data_ledger=false",
        *overrides,
    ]
    pool.run(train_fresh, layout, load_config([folder / "base.yaml"], given))
    records = [json.loads(line) for line in (folder / run / "metrics.jsonl").read_text().splitlines()]
    timed = ("seconds", "memory_bytes")
    return [{k: v for k, v in each.items() if not k.endswith(timed) and "per_s" not in k} for each in records]


def samples(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(  # answers on layouts are those of test_sampler.py
    "layout", [Layout(), pytest.param(Layout(tp=2, sp=True), marks=pytest.mark.nightly)], ids=str
)
def test_a_run_that_is_asked_trains_as_one_that_is_not(pool: Pool, tmp_path: Path, layout: Layout) -> None:
    """Records agree to the bit, with dropout; a resumed start answers the later steps once."""
    word_tokenizer(tmp_path)
    (tmp_path / "more.txt").write_text(f"{PROMPTS[1]}\n")
    asked = [f"eval.prompts=[{PROMPTS[0]}]", f"eval.prompts_file={tmp_path / 'more.txt'}", "eval.interval_steps=1"]
    asked += ["eval.max_new_tokens=4", "eval.temperature=0.9", "metrics.tensorboard=true"]
    with_prompts = started(pool, tmp_path, "asked", layout, *asked)
    without = started(pool, tmp_path, "silent", layout)
    keys = ("step", "loss", "grad_norm", "terms")
    assert [{k: each[k] for k in keys if k in each} for each in with_prompts] == [
        {k: each[k] for k in keys if k in each} for each in without
    ]
    found = samples(tmp_path / "asked")
    assert [(each["step"], each["prompt"]) for each in found] == [(s, p) for s in (1, 2) for p in PROMPTS]
    assert all(1 <= each["num_tokens"] <= 4 and each["log_prob"] < 0 for each in found)
    assert not (tmp_path / "silent" / "samples.jsonl").exists()
    events = b"".join(path.read_bytes() for path in (tmp_path / "asked" / "tensorboard").iterdir())
    assert b"samples/text_summary" in events
    # as if a start had died after the checkpoint of step 2
    with (tmp_path / "asked" / "samples.jsonl").open("a") as file:
        file.write(json.dumps({"step": 3, "prompt": "of a start that died"}) + '\n{"step": 3, "pro')
    started(pool, tmp_path, "asked", layout, *asked, "train.num_steps=3")
    later = samples(tmp_path / "asked")
    assert later[:4] == found
    assert [each["step"] for each in later[4:]] == [3, 3]


def test_a_damaged_file_of_samples_is_named(tmp_path: Path) -> None:
    (tmp_path / "samples.jsonl").write_text('{"step": 1}\nnothing\n')
    with refuses(DataError, "line 2"):
        _rewind(tmp_path / "samples.jsonl", 2)


@pytest.mark.parametrize(
    ("overrides", "fact"),
    [
        (["eval.prompts=[a]", "data.tokenizer=x"], "eval.prompts"),
        (["eval.prompts=[a]", "eval.interval_steps=1"], "data.tokenizer"),
        (["eval.interval_steps=1"], "eval.interval_steps=1"),
        (
            ["eval.prompts=[a]", "eval.interval_steps=1", "data.tokenizer=x", "model.backend=te"],
            "model.backend=torch",
        ),
    ],
)
def test_prompts_that_cannot_be_answered_are_refused(tmp_path: Path, overrides: list[str], fact: str) -> None:
    (tmp_path / "base.yaml").write_text(BASE)
    with refuses(ConfigError, fact):
        load_config([tmp_path / "base.yaml"], [f"run.dir={tmp_path}", *overrides])
