"""The real libraries receive the run: one run id over several starts, numbers at their steps, and no secret."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from mtrain.base.errors import ConfigError
from mtrain.config.schema.run import TrackerName
from mtrain.report.metrics.trackers.open import TrackedRun, refuse_missing, tracked_run, tracker_sink
from tests.messages import refuses
from tests.report.metrics.records import step_record, valid_record

SECRET = "s3cr3t-of-the-user"
PATIENCE_S = 120.0


@dataclass(frozen=True)
class RunNames:
    """The part of section `run` of a configuration that names the run."""

    name: str = "first try"
    notes: str = f"with {SECRET} inside"
    tags: tuple[str, ...] = ("llama", "warm-up")


def start(folder: Path, tracker: TrackerName, steps: range) -> None:
    """Makes one start of a run."""
    sink = tracker_sink(tracker, reported(folder), patience_s=PATIENCE_S)
    for step in steps:
        sink.write(step_record(step, loss=2.0 + step))
    sink.write(valid_record(steps[-1]))
    sink.write_text("samples", f"> after {steps[-1]}\n<b>said", steps[-1])
    sink.close()


def reported(folder: Path) -> TrackedRun:
    return tracked_run(folder, "a project", RunNames(), {"train.lr": 0.5, "hub.api_key": "k"}, {"layout": "tp2"})


def everything_below(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file())


def test_wandb_has_one_run_for_all_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("HF_TOKEN", SECRET)
    start(tmp_path, "wandb", range(1, 4))
    start(tmp_path, "wandb", range(4, 6))
    run_id = json.loads((tmp_path / "trackers.json").read_text())["wandb"]
    files = list((tmp_path / "wandb").glob(f"offline-run-*-{run_id}*/run-{run_id}.wandb"))  # -1 within a second
    assert len(files) == len(list(tmp_path.rglob("*.wandb"))) > 0
    content = everything_below(tmp_path)
    for shown in (
        b"train/loss",
        b"valid/loss",
        b"a project",
        b"first try",
        b"warm-up",
        b"train.lr",
        b"environment.layout",
    ):
        assert shown in content
    pages = [path.read_text() for path in tmp_path.rglob("media/html/samples_*.html")]
    assert all(any(f"after {step}\n&lt;b&gt;said" in page for page in pages) for step in (3, 5))
    assert SECRET.encode() not in content
    assert b"with <redacted> inside" in content
    assert capfd.readouterr().err == ""


def test_mlflow_has_one_run_for_all_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    from mlflow import MlflowClient

    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "server").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("HF_TOKEN", SECRET)
    start(tmp_path, "mlflow", range(1, 4))
    start(tmp_path, "mlflow", range(4, 6))
    client = MlflowClient()
    experiment = client.get_experiment_by_name("a project")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.run_id == json.loads((tmp_path / "trackers.json").read_text())["mlflow"]
    assert (run.info.run_name, run.info.status) == ("first try", "FINISHED")
    assert run.data.params["train.lr"] == "0.5"
    assert run.data.params["hub.api_key"] == "<redacted>"
    assert run.data.tags["mlflow.note.content"] == "with <redacted> inside"
    losses = client.get_metric_history(run.info.run_id, "train/loss")
    texts = [each.path for each in client.list_artifacts(run.info.run_id, "samples")]
    assert texts == ["samples/step_00000003.txt", "samples/step_00000005.txt"]
    assert b"> after 5\n<b>said" in everything_below(tmp_path)
    assert sorted((each.step, each.value) for each in losses) == [(step, 2.0 + step) for step in range(1, 6)]
    assert SECRET.encode() not in everything_below(tmp_path)
    assert "warning: tracker" not in capfd.readouterr().err


def test_a_library_that_is_missing_is_named_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_missing(["wandb", "mlflow"])
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with refuses(ConfigError, "'mtrain[wandb]'"):
        refuse_missing(["wandb"])
