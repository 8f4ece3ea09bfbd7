"""Run folder: the paths of a run's files, and the lock that keeps other runs out."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from mtrain.base.errors import DataError
from mtrain.base.files import disk_faults, remove, write_atomically
from mtrain.base.plain_files import NOT_A_PLAIN_FILE, parsed_json, read_plain_file
from mtrain.runs.goodput import new_number
from mtrain.runs.lock import Patience, RunLock, locked

_MAX_BYTES = 2**20
"""Size limit of config.yaml and environment.json; the YAML reader has the same limit."""


class _Inside:
    """Descriptor for the path of a file or folder inside the run folder."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, folder: RunFolder, owner: type[RunFolder]) -> Path:
        return folder.path / self._name


@dataclass(frozen=True)
class RunFolder:
    """Paths of a run's files, and how to read and write them; every rank may have one, but only one rank writes."""

    path: Path

    config = _Inside("config.yaml")
    """Resolved configuration, sufficient to repeat the run."""
    environment = _Inside("environment.json")
    """Facts about the latest start: versions, device, layout; no names of machines or people."""
    metrics = _Inside("metrics.jsonl")
    """Metrics: one JSON object per line and step."""
    samples = _Inside("samples.jsonl")
    """Answers to `eval.prompts`, one JSON object per line."""
    events = _Inside("events.jsonl")
    """Starts, saves, ends and alarms, one JSON object per line."""
    checkpoints = _Inside("checkpoints")
    """Folder with one subfolder per saved step."""
    first_samples = _Inside("first_samples.txt")
    """Samples of the run's first step, for people."""
    references = _Inside("references")
    """Scores of the reference model, if the loss has one."""
    exports = _Inside("exports")
    """Folder with one Hugging Face folder per exported step."""
    logs = _Inside("logs")
    """Folder with the text output of the ranks."""
    ledger = _Inside("ledger")
    """Folder with the samples trained in each step, one file per data-parallel rank."""
    heartbeats = _Inside("heartbeats")
    """Folder with the state of each rank, one file per rank."""
    starts = _Inside("starts")
    """Folder with one file per start (`mtrain.runs.goodput`)."""
    profile = _Inside("profile")
    """Folder with traces and tables of profiled steps."""
    tensorboard = _Inside("tensorboard")
    """Folder with event files for TensorBoard."""
    requeue_marker = _Inside("REQUEUE")
    """Present when the run stopped early on a signal and wants to be restarted."""
    save_time = _Inside("save_seconds")
    """Seconds until the latest save was on disk, as text; job scripts derive the time of Slurm's signal from it."""
    lock_file = _Inside(".lock")
    """File that the current run locks; its text names that run, or the last one."""
    chat_templates = _Inside("chat_templates")
    """Folder with the run's chat templates, under their names in a tokenizer's folder."""

    @property
    def _written_to(self) -> tuple[Path, ...]:
        return self.path, self.checkpoints, self.logs

    def create(self) -> None:
        with disk_faults(f"write the run folder {self.path}"):
            for folder in self._written_to:
                folder.mkdir(parents=True, exist_ok=True)

    def probe(self) -> None:
        """Checks that folders can be written; call it after `locked` has removed leftovers, which may fill the disk."""
        with disk_faults(f"write the run folder {self.path}"):
            for folder in self._written_to:
                probe = folder / f".probe-{secrets.token_hex(4)}"
                try:
                    probe.write_bytes(b"probe")
                finally:
                    probe.unlink(missing_ok=True)

    def write_config(self, text: str) -> None:
        with disk_faults(f"write {self.config}"):
            write_atomically(self.config, text)

    def write_chat_templates(self, files: Mapping[str, str]) -> None:
        """Replaces the saved chat templates, path in the folder -> text; exports contain them."""
        with disk_faults(f"write {self.chat_templates}"):
            if self.chat_templates.exists():
                remove(self.chat_templates)
            for name, text in files.items():
                (self.chat_templates / name).parent.mkdir(parents=True, exist_ok=True)
                write_atomically(self.chat_templates / name, text)

    def saved_chat_templates(self) -> dict[str, str]:
        """Reads the latest start's chat templates, path in the folder -> text; empty without any."""
        with disk_faults(f"read {self.chat_templates}"):
            files = sorted(path for path in self.chat_templates.rglob("*") if path.is_file())
            return {
                path.relative_to(self.chat_templates).as_posix(): path.read_text(encoding="utf-8") for path in files
            }

    def saved_config(self) -> str | None:
        """Reads the configuration of an earlier start, as YAML of sections; None without one."""
        from mtrain.base.yaml_text import read_yaml  # here, because a YAML reader takes long to load

        data = _content(self.config)
        if data is None:
            return None
        try:
            text = data.decode()
            if not isinstance(read_yaml(text).content, dict):
                raise ValueError("it contains no sections")
        except ValueError as fault:
            raise _damaged(self.config, " ".join(str(fault).split())) from None
        return text

    def write_environment(self, environment: Mapping[str, str]) -> None:
        with disk_faults(f"write {self.environment}"):
            write_atomically(self.environment, json.dumps(environment, indent=2) + "\n")

    def saved_environment(self) -> dict[str, str] | None:
        """Reads the environment of the latest start; None without a file."""
        data = _content(self.environment)
        if data is None:
            return None
        try:
            return {str(name): str(value) for name, value in parsed_json(data).items()}
        except (ValueError, AttributeError) as fault:
            raise _damaged(self.environment, f"not a JSON object: {fault}") from None

    def set_requeue(self, reason: str) -> None:
        """Writes the marker; `reason` is for people, such as "SIGUSR1 at step 120"."""
        with disk_faults(f"write {self.requeue_marker}"):
            write_atomically(self.requeue_marker, reason + "\n")

    def clear_requeue(self) -> None:
        with disk_faults(f"remove {self.requeue_marker}"):
            self.requeue_marker.unlink(missing_ok=True)

    def note_save(self, seconds: float) -> None:
        """Records the duration of a save; if the disk fails, only this note is lost."""
        with suppress(OSError):
            write_atomically(self.save_time, f"{seconds:.1f}\n")

    def save_seconds(self) -> float | None:
        """Reads the duration of the latest save; None if unknown."""
        try:
            return float(self.save_time.read_text())
        except (OSError, ValueError):
            return None

    @contextmanager
    def locked(self, patience: Patience = Patience()) -> Iterator[RunLock]:  # noqa: B008
        """Keeps other runs out inside the `with` block (`mtrain.runs.lock`), and removes leftovers of a killed run; the
        folder must exist."""
        with locked(self.lock_file, patience, lambda: new_number(self.starts)) as lock:
            with disk_faults(f"clean {self.path}"):
                # temporary files of a killed run
                for leftover in [*self.path.glob(".new-*"), *self.path.glob(".probe-*")]:
                    remove(leftover)
            yield lock


def _content(path: Path) -> bytes | None:
    """Reads a small file; None if it does not exist."""
    with disk_faults(f"read {path}"):
        try:
            return read_plain_file(path, _MAX_BYTES)
        except FileNotFoundError:
            return None
        except OSError as fault:
            if fault.errno not in NOT_A_PLAIN_FILE:
                raise
            raise _damaged(path, str(fault.strerror)) from None


def _damaged(path: Path, why: str) -> DataError:
    return DataError(f"{path}, which an earlier start wrote, is damaged ({why}); restore or remove it")
