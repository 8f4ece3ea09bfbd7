"""The run folder: everything that a run leaves behind, and the lock that keeps a second run out of it."""

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
from mtrain.runs.lock import Patience, RunLock, locked
from mtrain.runs.starts import new_number

_MAX_BYTES = 2**20
"""Of config.yaml and environment.json, as the reader of YAML takes them."""


@dataclass(frozen=True)
class RunFolder:
    """Where each thing of a run lies; every rank may hold one, one rank writes."""

    path: Path

    @property
    def config(self) -> Path:
        """The resolved configuration, sufficient to repeat the run."""
        return self.path / "config.yaml"

    @property
    def environment(self) -> Path:
        """What the latest start ran on: versions, device, layout; names no machine and no person."""
        return self.path / "environment.json"

    @property
    def metrics(self) -> Path:
        """One JSON object a line, one line a step."""
        return self.path / "metrics.jsonl"

    @property
    def samples(self) -> Path:
        """Answers to `eval.prompts`, one JSON object a line."""
        return self.path / "samples.jsonl"

    @property
    def events(self) -> Path:
        """One JSON object a line: starts, saves, ends and alarms."""
        return self.path / "events.jsonl"

    @property
    def checkpoints(self) -> Path:
        """One folder a saved step."""
        return self.path / "checkpoints"

    @property
    def first_samples(self) -> Path:
        """What the run's first step trains, for people."""
        return self.path / "first_samples.txt"

    @property
    def references(self) -> Path:
        """Scores of the reference model, where a loss compares with one."""
        return self.path / "references"

    @property
    def exports(self) -> Path:
        """One folder of Hugging Face for each exported step."""
        return self.path / "exports"

    @property
    def logs(self) -> Path:
        """Text of the ranks."""
        return self.path / "logs"

    @property
    def ledger(self) -> Path:
        """What was trained in each step, one file for each data-parallel rank."""
        return self.path / "ledger"

    @property
    def heartbeats(self) -> Path:
        """What each rank is doing, one file a rank."""
        return self.path / "heartbeats"

    @property
    def starts(self) -> Path:
        """What became of each start, one file a start (`mtrain.runs.starts`)."""
        return self.path / "starts"

    @property
    def profile(self) -> Path:
        """Traces and tables of profiled steps."""
        return self.path / "profile"

    @property
    def tensorboard(self) -> Path:
        """Event files."""
        return self.path / "tensorboard"

    @property
    def _written_to(self) -> tuple[Path, ...]:
        return self.path, self.checkpoints, self.logs

    @property
    def requeue_marker(self) -> Path:
        """Present when the run stopped early on a signal and wants to be started again."""
        return self.path / "REQUEUE"

    @property
    def save_time(self) -> Path:
        """Seconds that the latest save took until it was on disk, as text: who asks Slurm for a signal reads it."""
        return self.path / "save_seconds"

    @property
    def lock_file(self) -> Path:
        """Held by the run that works here; its text says who that is or was."""
        return self.path / ".lock"

    def create(self) -> None:
        """Makes the folders.

        Raises:
            MachineError: the place cannot be created.
        """
        with disk_faults(f"write the run folder {self.path}"):
            for folder in self._written_to:
                folder.mkdir(parents=True, exist_ok=True)

    def probe(self) -> None:
        """Proves that the folders can be written; when what a dead run left is gone, which may have filled the disk.

        Raises:
            MachineError: one cannot be written, or the disk is full.
        """
        with disk_faults(f"write the run folder {self.path}"):
            for folder in self._written_to:
                probe = folder / f".probe-{secrets.token_hex(4)}"
                try:
                    probe.write_bytes(b"probe")
                finally:
                    probe.unlink(missing_ok=True)

    def write_config(self, text: str) -> None:
        """Puts the resolved configuration in place, whole or not at all."""
        with disk_faults(f"write {self.config}"):
            write_atomically(self.config, text)

    @property
    def chat_templates(self) -> Path:
        """Holds the chat templates that conversations were written by, under the names they have beside a tokenizer."""
        return self.path / "chat_templates"

    def write_chat_templates(self, files: Mapping[str, str]) -> None:
        """Keeps the chat templates of this start: exports carry them, wherever they came from.

        Args:
            files: Path inside the folder -> text.
        """
        with disk_faults(f"write {self.chat_templates}"):
            if self.chat_templates.exists():
                remove(self.chat_templates)
            for name, text in files.items():
                (self.chat_templates / name).parent.mkdir(parents=True, exist_ok=True)
                write_atomically(self.chat_templates / name, text)

    def saved_chat_templates(self) -> dict[str, str]:
        """What the latest start kept; empty where it wrote no conversations.

        Raises:
            MachineError: A file cannot be read.
        """
        with disk_faults(f"read {self.chat_templates}"):
            files = sorted(path for path in self.chat_templates.rglob("*") if path.is_file())
            return {
                path.relative_to(self.chat_templates).as_posix(): path.read_text(encoding="utf-8") for path in files
            }

    def saved_config(self) -> str | None:
        """The configuration that an earlier start left here, as YAML of sections; None where there was none.

        Raises:
            DataError: the file is damaged.
            MachineError: it cannot be read.
        """
        from mtrain.base.yaml_text import read_yaml  # only here, as it takes longer than all the rest of a run folder

        data = _content(self.config)
        if data is None:
            return None
        try:
            text = data.decode()
            if not isinstance(read_yaml(text).content, dict):
                raise ValueError("it holds no sections")
        except ValueError as fault:
            raise _damaged(self.config, " ".join(str(fault).split())) from None
        return text

    def write_environment(self, environment: Mapping[str, str]) -> None:
        """Puts down what this start runs on, whole or not at all."""
        with disk_faults(f"write {self.environment}"):
            write_atomically(self.environment, json.dumps(environment, indent=2) + "\n")

    def saved_environment(self) -> dict[str, str] | None:
        """What the latest start ran on; None where it did not say.

        Raises:
            DataError: the file is damaged.
            MachineError: it cannot be read.
        """
        data = _content(self.environment)
        if data is None:
            return None
        try:
            return {str(name): str(value) for name, value in parsed_json(data).items()}
        except (ValueError, AttributeError) as fault:
            raise _damaged(self.environment, f"not a JSON object: {fault}") from None

    def set_requeue(self, reason: str) -> None:
        """Leaves the marker; `reason` is for people, e.g. "SIGUSR1 at step 120"."""
        with disk_faults(f"write {self.requeue_marker}"):
            write_atomically(self.requeue_marker, reason + "\n")

    def clear_requeue(self) -> None:
        """Removes the marker, if there is one."""
        with disk_faults(f"remove {self.requeue_marker}"):
            self.requeue_marker.unlink(missing_ok=True)

    def note_save(self, seconds: float) -> None:
        """Puts down how long a save took; a disk that refuses costs the note alone, as the checkpoint is there."""
        with suppress(OSError):
            write_atomically(self.save_time, f"{seconds:.1f}\n")

    def save_seconds(self) -> float | None:
        """How long the latest save took; None where none has said so."""
        try:
            return float(self.save_time.read_text())
        except (OSError, ValueError):
            return None

    @contextmanager
    def locked(self, patience: Patience = Patience()) -> Iterator[RunLock]:  # noqa: B008
        """Keeps other runs out inside the `with` block, as `mtrain.runs.lock` does; the folder must exist.

        Raises:
            RunFolderError: another process works here; names it.
            MachineError: the lock file cannot be written.
        """
        with locked(self.lock_file, patience, lambda: new_number(self.starts)) as lock:
            with disk_faults(f"clean {self.path}"):
                self._clean()
            yield lock

    def _clean(self) -> None:
        """Removes what a killed run was about to put in place."""
        for leftover in [*self.path.glob(".new-*"), *self.path.glob(".probe-*")]:
            remove(leftover)


def _content(path: Path) -> bytes | None:
    """Of a small file; None where there is none.

    Raises:
        DataError: something else lies there.
        MachineError: it cannot be read.
    """
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
