"""Trackers that a run names, each with one run id for all starts, and without the secrets of this machine.

Secrets are known by their names, and by values from the environment.
"""

from __future__ import annotations

import html
import importlib.util
import json
import os
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, assert_never

from mtrain.base.errors import ConfigError
from mtrain.base.files import write_atomically
from mtrain.config.schema.run import TrackerName
from mtrain.report.metrics.trackers.sink import PATIENCE_S, Tracker, TrackerSink

REDACTED = "<redacted>"
_WORD = re.compile(r"apikey|auth|authorization|bearer|credentials?|passphrase|passwd|password|secrets?|token")
_PAIR = re.compile(r"(api|access|private|signing|encryption)_key")
_LOGIN_IN_URL = re.compile(r"(?<=://)[^/@\s]+(?=@)")
_SHORTEST_SECRET = 6
"""Shorter secret values are kept, since they would match ordinary words."""


def is_secret_name(name: str) -> bool:
    """Says whether a key or a variable of this name holds a secret, such as `hub.api_key` or `HF_TOKEN`."""
    words = re.findall(r"[a-z]+", re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower())
    return any(map(_WORD.fullmatch, words)) or _PAIR.search("_".join(words)) is not None


def without_secrets(values: Mapping[str, Any], environment: Mapping[str, str]) -> dict[str, str]:
    """Returns values as text that may be sent to others.

    Args:
        values: Dotted key -> value.
        environment: Environment variables of this process; values of those with a secret name are removed wherever they
            occur.
    """
    secrets = sorted({text for name, text in environment.items() if is_secret_name(name)}, key=len, reverse=True)
    long = [text for text in secrets if len(text) >= _SHORTEST_SECRET]
    return {key: REDACTED if value and is_secret_name(key) else _cleaned(value, long) for key, value in values.items()}


def _cleaned(value: Any, secrets: list[str]) -> str:
    text = _LOGIN_IN_URL.sub(REDACTED, value if isinstance(value, str) else json.dumps(_inside(value), default=str))
    for secret in secrets:
        text = text.replace(secret, REDACTED)
    return text


def _inside(value: Any) -> Any:
    """Replaces the values of secret names in a list or section, at any depth."""
    if isinstance(value, Mapping):
        return {name: REDACTED if each and is_secret_name(str(name)) else _inside(each) for name, each in value.items()}
    return [_inside(each) for each in value] if isinstance(value, list | tuple) else value


@dataclass(frozen=True)
class TrackedRun:
    """Facts about a run for a tracker, without secrets."""

    folder: Path
    project: str
    name: str
    notes: str
    tags: tuple[str, ...]
    config: Mapping[str, str]
    """Dotted key -> value as text."""

    def run_id(self, tracker: TrackerName) -> str | None:
        """Returns the tracker's id of this run from an earlier start; None at the first one."""
        with suppress(OSError, ValueError, AttributeError):
            found = json.loads(self._ids.read_text()).get(tracker)
            if isinstance(found, str) and re.fullmatch(r"[\w-]{1,64}", found):
                return found
        return None

    def keep_run_id(self, tracker: TrackerName, run_id: str) -> None:
        """Saves the tracker's id of this run for later starts."""
        ids: dict[str, str] = {}
        with suppress(OSError, ValueError, TypeError):
            ids = dict(json.loads(self._ids.read_text()))
        write_atomically(self._ids, json.dumps(ids | {tracker: run_id}) + "\n")

    @property
    def _ids(self) -> Path:
        return self.folder / "trackers.json"


def refuse_missing(trackers: Sequence[TrackerName]) -> None:
    """Refuses trackers whose library is not installed, without importing any; the message names all of them."""
    if missing := [name for name in trackers if importlib.util.find_spec(name) is None]:
        names, verb = ", ".join(missing), "are" if len(missing) > 1 else "is"
        raise ConfigError(
            f"metrics.trackers has {names}, which {verb} not installed; pip install 'mtrain[{','.join(missing)}]', or "
            "leave it out"
        )


def tracked_run(
    folder: Path, project: str, run: Any, config: Mapping[str, Any], environment: Mapping[str, str]
) -> TrackedRun:
    """Makes a run's facts for trackers; `config` is dotted key -> value."""
    reported = {**config, **{f"environment.{name}": value for name, value in environment.items()}}
    words = without_secrets({"name": run.name or folder.resolve().name, "notes": run.notes}, os.environ)
    clean = without_secrets(reported, os.environ)
    return TrackedRun(folder, project, words["name"], words["notes"], tuple(run.tags), clean)


def tracker_sink(name: TrackerName, run: TrackedRun, patience_s: float = PATIENCE_S) -> TrackerSink:
    """Makes the sink of a tracker for a run; its `close` waits up to `patience_s` seconds for the tracker."""
    return TrackerSink(name, _opener(name, run), patience_s=patience_s)


def _opener(name: TrackerName, run: TrackedRun) -> Callable[[], Tracker]:
    match name:
        case "wandb":
            return lambda: _Wandb(run)
        case "mlflow":
            return lambda: _MLflow(run)
        case "trackio":
            return lambda: _Trackio(run)
        case _:
            assert_never(name)


class _Wandb:
    """Weights & Biases; WANDB_MODE=offline writes below the run folder, for `wandb sync`."""

    def __init__(self, run: TrackedRun) -> None:
        import wandb

        run_id = run.run_id("wandb") or secrets.token_hex(4)
        run.keep_run_id("wandb", run_id)
        settings = wandb.Settings(
            console="off",  # the console's text and the command line may hold secrets
            disable_code=True,
            disable_git=True,
            disable_job_creation=True,
            silent=True,
            x_disable_meta=True,
            x_disable_machine_info=True,
        )
        self._run = wandb.init(
            project=run.project,
            id=run_id,
            resume="allow",
            name=run.name,
            notes=run.notes or None,
            tags=run.tags,
            config=dict(run.config),
            dir=run.folder,
            settings=settings,
        )
        # its own step must not decrease, but a run that was killed repeats steps
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        self._run.log({**numbers, "step": step})

    def log_text(self, step: int, tag: str, text: str) -> None:
        import wandb

        # not a table, which a resumed run would begin anew; escaped, since a model may write tags
        self._run.log({tag: wandb.Html(f"<pre>{html.escape(text)}</pre>", inject=False), "step": step})

    def finish(self) -> None:
        self._run.finish()


class _MLflow:
    """MLflow, at MLFLOW_TRACKING_URI."""

    _MOST_PARAMETERS = 100
    """Most parameters in one call."""
    _LONGEST_VALUE = 6000

    def __init__(self, run: TrackedRun) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Param, RunTag

        self._client = MlflowClient()
        if (run_id := run.run_id("mlflow")) is None:
            found = self._client.get_experiment_by_name(run.project)
            experiment = self._client.create_experiment(run.project) if found is None else found.experiment_id
            tags = {"mlflow.note.content": run.notes, **{f"tag.{tag}": "true" for tag in run.tags}}
            run_id = self._client.create_run(experiment, run_name=run.name, tags=tags).info.run_id
            run.keep_run_id("mlflow", run_id)
            values = [Param(key, value[: self._LONGEST_VALUE]) for key, value in run.config.items()]
            for first in range(0, len(values), self._MOST_PARAMETERS):
                self._client.log_batch(run_id, params=values[first : first + self._MOST_PARAMETERS])
        else:
            self._client.set_terminated(run_id, "RUNNING")
            layout = run.config.get("environment.layout", "")
            self._client.log_batch(run_id, tags=[RunTag("layout of the latest start", layout)])
        self._run_id = run_id

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        import time

        from mlflow.entities import Metric

        now_ms = int(1000 * time.time())
        self._client.log_batch(
            self._run_id, metrics=[Metric(name, float(value), now_ms, step) for name, value in numbers.items()]
        )

    def log_text(self, step: int, tag: str, text: str) -> None:
        self._client.log_text(self._run_id, text, f"{tag}/step_{step:08d}.txt")

    def finish(self) -> None:
        self._client.set_terminated(self._run_id, "FINISHED")


class _Trackio:
    """Trackio, on this machine or in a Hugging Face space (TRACKIO_SPACE_ID); it identifies runs by name."""

    def __init__(self, run: TrackedRun) -> None:
        import trackio

        run_id = run.run_id("trackio") or secrets.token_hex(4)
        run.keep_run_id("trackio", run_id)
        space = os.environ.get("TRACKIO_SPACE_ID")
        config = {**run.config, "notes": run.notes, "tags": ", ".join(run.tags)}
        name = f"{run.name} {run_id}"
        self._run = trackio.init(run.project, name=name, space_id=space, config=config, resume="allow")

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        self._run.log(dict(numbers), step=step)

    def log_text(self, step: int, tag: str, text: str) -> None:
        """Does nothing: Trackio shows only numbers."""

    def finish(self) -> None:
        self._run.finish()
