"""`valid.metric` and `valid.patience`: best checkpoints, and runs that end early."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest

from mtrain.arch.layout import Layout
from mtrain.base.errors import ConfigError
from mtrain.checkpoint.store.manifest import MetricInfo
from mtrain.config.schema.train import EvalSection, ValidSection
from mtrain.hf.configuration import load_config
from mtrain.report.metrics.record import ChangeRecord, Record, TaskRecord, TermRecord, ValidRecord, to_json_line
from mtrain.runs.events import EventKind, read_events
from mtrain.runs.folder import RunFolder
from mtrain.training.best import Metric, Patience
from tests.messages import refuses
from tests.pool import Pool
from tests.training.one_process import train_fresh
from tests.training.test_trainer import BASE

NEVER_BETTER = ["train.num_steps=6", "valid.interval_steps=1", "valid.min_improvement=100"]


def valid(step: int, loss: float, **sets: float) -> ValidRecord:
    terms = {name: TermRecord(loss=value, numerator=value, denominator=1) for name, value in sets.items()}
    return ValidRecord(step=step, valid_loss=loss, denominator=1, samples=1, seconds=0, valid_sets=terms)


def tasks(step: int, **values: float) -> TaskRecord:
    return TaskRecord(step=step, tasks={name.replace("__", "/"): value for name, value in values.items()}, seconds=0)


def test_the_metric_is_found_in_the_results_of_a_step() -> None:
    results: list[ValidRecord | TaskRecord] = [valid(1, 0.5, first=0.5, second=0.7), tasks(1, quiz__acc=0.25)]
    assert [Metric(name).of(results) for name in (None, "first", "second", "quiz/acc")] == [0.5, 0.5, 0.7, 0.25]
    assert Metric("valid").of([valid(1, 0.5)]) == 0.5, "a single set"
    assert [Metric(None).of(results[1:]), Metric("quiz/acc").of(results[:1])] == [None, None]
    with refuses(ConfigError, "quiz/f1", "quiz/acc"):
        Metric("quiz/f1").of(results)


@pytest.mark.parametrize("is_higher", [False, True])
def test_patience_counts_as_the_definition_says(tmp_path: Path, is_higher: bool) -> None:
    """Drawn results, some at once and the others from the file that an earlier start left; among them nan."""
    draw = random.Random(7)
    for number in range(40):
        values = [draw.choice([0.1, 0.2, 0.3, 0.5, float("nan")]) for _ in range(draw.randint(1, 9))]
        section = ValidSection(patience=draw.randint(1, 4), min_improvement=draw.choice([0.0, 0.15]))
        path, saved = tmp_path / f"{number}.jsonl", draw.randint(0, len(values))
        path.write_text(
            "".join(to_json_line(tasks(step, quiz__acc=value)) for step, value in enumerate(values[:saved]))
        )
        patience = Patience(Metric("quiz/acc", is_higher), section)
        patience.read(path)
        for step, value in enumerate(values[saved:], saved):
            patience.add(step, value)
        best, waited = -math.inf if is_higher else math.inf, 0
        for value in values:
            better = value > best + section.min_improvement if is_higher else value < best - section.min_improvement
            best, waited = (value, 0) if better else (best, waited + 1)
        assert (patience.num_waited, patience.is_over) == (waited, waited >= (section.patience or 0)), values


def test_results_before_other_data_do_not_count(tmp_path: Path) -> None:
    changed = ChangeRecord(step=2, key="data.valid.valid", old="a", new="b")
    records: list[Record] = [valid(1, 0.1), valid(2, 0.2), changed, valid(3, 0.9), valid(4, 0.8)]
    (tmp_path / "metrics.jsonl").write_text("".join(map(to_json_line, records)))
    patience = Patience(Metric(None), ValidSection(patience=1))
    patience.read(tmp_path / "metrics.jsonl")
    assert (patience.best, patience.num_waited) == ((4, 0.8), 0)


def start(pool: Pool, folder: Path, layout: Layout, *overrides: str) -> list[dict[str, Any]]:
    """Trains, and returns the records of the steps."""
    (folder / "base.yaml").write_text(BASE)
    given = [f"run.dir={folder / 'run'}", "train.device=cpu", "metrics.data_ledger=false", *NEVER_BETTER, *overrides]
    pool.run(train_fresh, layout, load_config([folder / "base.yaml"], given))
    records = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    return [record for record in records if record["kind"] == "step"]


def test_a_run_ends_early_and_does_not_go_on(pool: Pool, tmp_path: Path) -> None:
    """The run leaves a checkpoint and no marker; a start with more patience goes on, with the results of all starts."""
    layout = Layout(dp=2)
    assert [each["step"] for each in start(pool, tmp_path, layout, "valid.patience=2")] == [1, 2, 3]
    run = tmp_path / "run"
    assert (run / "checkpoints" / "step_00000003").is_dir()
    assert not (run / "REQUEUE").exists()
    assert read_events(RunFolder(run).events)[-1].kind is EventKind.FINISH
    assert len(start(pool, tmp_path, layout, "valid.patience=2")) == 3
    assert len(start(pool, tmp_path, layout, "valid.patience=4")) == 5
    assert len(start(pool, tmp_path, layout, "valid.patience=null", "valid.min_improvement=0")) == 6


def test_the_name_of_a_metric_says_how_it_was_measured() -> None:
    metric = Metric("quiz/acc", is_better_if_higher=True)
    asked = EvalSection(tasks=("quiz",), num_fewshot=0, limit=5)
    assert metric.info(0.5, asked) == MetricInfo(
        name="quiz/acc num_fewshot=0 limit=5", value=0.5, is_better_if_higher=True
    )


@pytest.mark.parametrize(
    ("overrides", "fact"),
    [
        (["valid.metric=other", "valid.interval_steps=1"], "other"),
        (["valid.metric=quiz/acc", "valid.interval_steps=1"], "eval.tasks"),
        (["valid.patience=2", "valid.at_end=true"], "valid.interval_steps"),
        (["valid.min_improvement=0.1", "valid.interval_steps=1"], "patience"),
        (["eval.tasks=[quiz]", "eval.interval_steps=1"], "data.tokenizer"),
        (["eval.tasks=[quiz]", "data.tokenizer=x"], "eval.interval_steps"),
        (["eval.limit=5"], "eval.tasks"),
    ],
)
def test_metrics_that_nothing_measures_are_refused(tmp_path: Path, overrides: list[str], fact: str) -> None:
    (tmp_path / "base.yaml").write_text(BASE)
    with refuses(ConfigError, fact):
        load_config([tmp_path / "base.yaml"], [f"run.dir={tmp_path}", *overrides])
