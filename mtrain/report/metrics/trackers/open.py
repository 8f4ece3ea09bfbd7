"""Trackers of a run, each with one run id for all starts, and without the secrets of this machine.

A tracker cannot stop a run: it has its own thread, and records that it does not accept are dropped. Secrets are
recognised by their names, and by values from the environment.
"""

import html
import importlib.util
import json
import logging
import os
import queue
import re
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol, assert_never

from mtrain.base.background import started
from mtrain.base.errors import ConfigError
from mtrain.base.files import write_atomically
from mtrain.base.spelling import counted
from mtrain.config.schema.run import TrackerName
from mtrain.report.metrics.record import Record, scalars

_log = logging.getLogger(__name__)

REDACTED = "<redacted>"
_WORD = re.compile(r"apikey|auth|authorization|bearer|credentials?|passphrase|passwd|password|secrets?|token")
_PAIR = re.compile(r"(api|access|private|signing|encryption)_key")
_LOGIN_IN_URL = re.compile(r"(?<=://)[^/@\s]+(?=@)")
_SHORTEST_SECRET = 6
"""Shorter secret values are kept, because they would match ordinary words."""


def is_secret_name(name: str) -> bool:
    """Says whether a key or a variable of this name holds a secret, such as `hub.api_key` or `HF_TOKEN`."""
    words = re.findall(r"[a-z]+", re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower())
    return any(map(_WORD.fullmatch, words)) or _PAIR.search("_".join(words)) is not None


def without_secrets(values: Mapping[str, Any], environment: Mapping[str, str]) -> dict[str, str]:
    """Returns values as text that may leave this machine, without secrets and the values of secret variables."""
    secrets = sorted({text for name, text in environment.items() if is_secret_name(name)}, key=len, reverse=True)
    cleaned = {}
    for key, value in values.items():
        text = value if isinstance(value, str) else json.dumps(_clean(value), default=str)
        text = _LOGIN_IN_URL.sub(REDACTED, text)
        for secret in secrets:
            text = text.replace(secret, REDACTED) if len(secret) >= _SHORTEST_SECRET else text
        cleaned[key] = REDACTED if value and is_secret_name(key) else text
    return cleaned


def _clean(value: Any) -> Any:
    """Replaces the values of secret names in lists and sections, at any depth."""
    if isinstance(value, Mapping):
        return {name: REDACTED if item and is_secret_name(str(name)) else _clean(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_clean(item) for item in value]
    return value


@dataclass(frozen=True)
class TrackedRun:
    """Facts about a run for a tracker, without secrets."""

    folder: Path
    project: str
    name: str
    notes: str
    tags: tuple[str, ...]
    config: Mapping[str, str]

    def run_id(self, tracker: TrackerName) -> str | None:
        """Returns the tracker's id of this run from an earlier start; None at the first start."""
        with suppress(OSError, ValueError, AttributeError):
            run_id = json.loads(self._ids.read_text()).get(tracker)
            if isinstance(run_id, str) and re.fullmatch(r"[\w-]{1,64}", run_id):
                return run_id
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


MOST_WAITING = 10_000
"""Most records that wait for a slow tracker; later ones are dropped and counted."""
PATIENCE_S = 10.0


class Tracker(Protocol):
    """Run at a tracker; any method may fail or hang."""

    def log(self, step: int, numbers: Mapping[str, float]) -> None: ...

    def log_text(self, step: int, tag: str, text: str) -> None:
        """Sends a text to show verbatim, if the tracker can show texts."""

    def finish(self) -> None:
        """Ends this start of the run, which later starts may continue."""


class _Text(NamedTuple):
    step: int
    tag: str
    text: str


class TrackerSink:
    """Passes records to a thread, which opens the tracker and sends them."""

    def __init__(
        self, name: str, opened: Callable[[], Tracker], most_waiting: int = MOST_WAITING, patience_s: float = PATIENCE_S
    ) -> None:
        self._name, self._opened, self._patience_s = name, opened, patience_s
        self._waiting: queue.Queue[Record | _Text] = queue.Queue(most_waiting)
        self._closing = threading.Event()
        self._num_written = self._num_sent = 0
        self._has_texts = False
        self._fault: str | None = None
        self._work = started(self._feed, f"tracker {name}")

    def write_text(self, tag: str, text: str, step: int) -> None:
        self._has_texts = True
        self.write(_Text(step, tag, text))

    def write(self, record: Record | _Text) -> None:
        """Passes the record on at once; drops it if the tracker has ended or is too far behind."""
        self._num_written += 1
        if self._work.done():
            return
        try:
            self._waiting.put_nowait(record)
        except queue.Full:
            if self._fault is None:
                self._fault = f"{counted(self._waiting.maxsize, 'record')} wait for it"
                self._tell(f"{self._fault}; it loses later records, metrics.jsonl has them")

    def close(self) -> None:
        """Waits up to `patience_s` seconds for the remaining records, and reports how many the tracker lacks."""
        self._closing.set()
        deadline = time.monotonic() + self._patience_s
        while not self._work.done() and time.monotonic() < deadline:
            time.sleep(0.01)
        if not self._work.done():
            self._tell(f"it has not ended within {self._patience_s:g} s and is abandoned")
        if (missing := self._num_written - self._num_sent) > 0:
            files = "metrics.jsonl and samples.jsonl have" if self._has_texts else "metrics.jsonl has"
            self._tell(f"it lacks {missing} of {counted(self._num_written, 'record')} of this start; {files} them")

    def _feed(self) -> None:
        try:
            tracker = self._opened()
            while not (self._closing.is_set() and self._waiting.empty()):
                try:
                    record = self._waiting.get(timeout=0.1)
                except queue.Empty:
                    continue
                self._log(tracker, record)
            tracker.finish()
        except Exception as fault:  # training continues, no matter what an external library raises
            self._tell(f"{_one_line(fault)}; training continues without it")

    def _log(self, tracker: Tracker, record: Record | _Text) -> None:
        try:
            if isinstance(record, _Text):
                tracker.log_text(*record)
            elif numbers := scalars(record):
                tracker.log(record.step, numbers)
            self._num_sent += 1
        except Exception as fault:  # as above; the next record may succeed
            if self._fault is None:
                self._fault = _one_line(fault)
                self._tell(f"step {record.step}: {self._fault}; training continues")

    def _tell(self, text: str) -> None:
        _log.warning(f"warning: tracker {self._name}: {text}")


def _one_line(fault: Exception) -> str:
    """Formats an error as one line of bounded length, because libraries put whole pages into their errors."""
    return f"{type(fault).__name__}: {' '.join(str(fault).split())[:300]}"


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
    """Makes a run's facts for trackers; `config` has values by dotted key."""
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
        case "swanlab":
            return lambda: _SwanLab(run)
        case "comet_ml":
            return lambda: _Comet(run)
        case "aim":
            return lambda: _Aim(run)
        case _:
            assert_never(name)


class _Wandb:
    """Weights & Biases; WANDB_MODE=offline writes below the run folder, for `wandb sync`."""

    def __init__(self, run: TrackedRun) -> None:
        import wandb

        run_id = run.run_id("wandb") or secrets.token_hex(4)
        run.keep_run_id("wandb", run_id)
        settings = wandb.Settings(
            console="off",  # console output and command line may hold secrets
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
        # wandb's own step must not decrease, but a killed run repeats steps
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        self._run.log({**numbers, "step": step})

    def log_text(self, step: int, tag: str, text: str) -> None:
        import wandb

        # not a table, which a resumed run would begin anew; escaped, because a model may write tags
        self._run.log({tag: wandb.Html(f"<pre>{html.escape(text)}</pre>", inject=False), "step": step})

    def finish(self) -> None:
        self._run.finish()


class _MLflow:
    """MLflow, at MLFLOW_TRACKING_URI."""

    _MOST_PARAMETERS = 100
    _LONGEST_VALUE = 6000

    def __init__(self, run: TrackedRun) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Param, RunTag

        self._client = MlflowClient()
        if (run_id := run.run_id("mlflow")) is None:
            existing = self._client.get_experiment_by_name(run.project)
            experiment = self._client.create_experiment(run.project) if existing is None else existing.experiment_id
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


class _SwanLab:
    """SwanLab; SWANLAB_MODE=offline writes below the run folder, for `swanlab sync`."""

    def __init__(self, run: TrackedRun) -> None:
        import swanlab

        run_id = run.run_id("swanlab") or secrets.token_hex(10)
        run.keep_run_id("swanlab", run_id)
        # console output, packages and the machine may hold secrets
        silent = dict.fromkeys(("hardware", "runtime", "requirements", "git", "swanlab", "monitor"), False)
        self._run = swanlab.init(
            project=re.sub(r"[^0-9a-zA-Z_\-+.]+", "-", run.project),  # it accepts no other letters
            id=run_id,
            resume="allow",
            name=run.name,
            description=run.notes,
            tags=list(run.tags),
            config=dict(run.config),
            log_dir=str(run.folder / "swanlab"),
            settings=swanlab.Settings(interactive=False, probe=silent, terminal={"proxy_type": "none"}),
        )

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        self._run.log(dict(numbers), step=step)

    def log_text(self, step: int, tag: str, text: str) -> None:
        import swanlab

        self._run.log({tag: swanlab.Text(text)}, step=step)

    def finish(self) -> None:
        self._run.finish()


class _Comet:
    """Comet; COMET_START_ONLINE=0 writes archives below the run folder, for `comet upload`."""

    def __init__(self, run: TrackedRun) -> None:
        import comet_ml

        logging.getLogger("comet_ml").setLevel(logging.WARNING)
        earlier = run.run_id("comet_ml")
        run_id = secrets.token_hex(16) if earlier is None else earlier
        run.keep_run_id("comet_ml", run_id)
        # code, console output and the machine may hold secrets
        silent = dict.fromkeys(("log_code", "log_graph", "parse_args", "log_git_metadata", "log_git_patch"), False)
        silent |= dict.fromkeys(("log_env_details", "auto_output_logging", "auto_log_co2"), False)
        options = comet_ml.ExperimentConfig(
            **silent,
            auto_param_logging=False,
            auto_metric_logging=False,
            display_summary_level=0,
            offline_directory=str(run.folder / "comet"),
            name=run.name,
            tags=list(run.tags),
        )
        self._run = comet_ml.start(project=run.project, experiment_key=run_id, experiment_config=options)
        if earlier is None:
            self._run.log_parameters(dict(run.config))
            self._run.log_other("notes", run.notes)

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        self._run.log_metrics(dict(numbers), step=step)

    def log_text(self, step: int, tag: str, text: str) -> None:
        self._run.log_text(text, step=step, metadata={"tag": tag})

    def finish(self) -> None:
        self._run.end()


class _Aim:
    """Aim, in the repository that AIM_REPO names (a folder or aim://HOST:PORT), or in the run folder."""

    def __init__(self, run: TrackedRun) -> None:
        import aim

        earlier = run.run_id("aim")
        repository = os.environ.get("AIM_REPO", str(run.folder))
        # console output and the machine may hold secrets
        silent: dict[str, Any] = {"system_tracking_interval": None, "log_system_params": False}
        self._run = aim.Run(
            earlier,
            repo=repository,
            experiment=run.project,
            force_resume=earlier is not None,  # a killed start leaves a lock
            capture_terminal_logs=False,
            **silent,
        )
        run.keep_run_id("aim", self._run.hash)
        self._run.name, self._run.description = run.name, run.notes
        if earlier is None:
            self._run["config"] = dict(run.config)
            for tag in run.tags:
                self._run.add_tag(tag)

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        for name, value in numbers.items():
            self._run.track(float(value), name=name, step=step)

    def log_text(self, step: int, tag: str, text: str) -> None:
        import aim

        self._run.track(aim.Text(text), name=tag, step=step)

    def finish(self) -> None:
        self._run.close()
