"""mtrain.json, the facts and files of a checkpoint, and training_state.json, the run's counters.

mtrain.json is written last, so its presence means that the checkpoint is complete. Its last line is the SHA-256 of the
bytes before it, which reveals any changed bit, and lets later versions with more fields verify old manifests.
"""

import errno
import hashlib
import os
import re
import stat
from collections.abc import Mapping
from enum import Enum
from pathlib import Path, PurePosixPath
from typing import Any, Literal, NamedTuple, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    ValidationError,
    field_validator,
    model_serializer,
    model_validator,
)

from mtrain.base.errors import DataError
from mtrain.base.files import write_atomically
from mtrain.base.plain_files import NOT_A_PLAIN_FILE, read_plain_file
from mtrain.core.state.loss_scaler import LossScaler

STATE_NAME = "training_state.json"
_MOST_STATE_BYTES = 1 << 20
_MOST_COUNT = 1 << 53
"""Largest count of steps, samples, tokens or bytes; still exact as a float64."""


class RecentUpdates(BaseModel):
    """Latest updates, the oldest first, which train.on_spike compares with the next step."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    losses: tuple[float, ...] = ()
    grad_norms: tuple[float, ...] = ()


class TrainingState(BaseModel):
    """State of a run besides its tensors."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal[1] = 1
    step: int = Field(ge=0, le=_MOST_COUNT)
    """Optimizer updates completed, as the run counts them."""
    consumed_samples: int = Field(ge=0)
    adam_step: int = Field(ge=0)
    """Number of updates that changed the weights; an fp16 overflow or an empty batch does not count."""
    loss_scaler: LossScaler | None
    """None unless the run uses fp16."""
    layout: str
    device: str
    """cpu or cuda; random states of one mean nothing to the other."""
    vocab_size: int = Field(gt=0)
    """Number of embedding rows that are tokens; further rows are padding, which depends on the layout."""
    recent: RecentUpdates | None = None
    """None unless train.on_spike is set."""


def write_state(folder: Path, state: TrainingState) -> None:
    """Writes the state into a checkpoint's folder; raises OSError if the disk fails."""
    # without an atomic rename: the whole folder is published later, with this file's digest in the manifest
    # without `recent` if it is None, so that versions that do not know the key can read the file
    absent = {"recent"} if state.recent is None else set[str]()
    (folder / STATE_NAME).write_text(state.model_dump_json(indent=1, exclude=absent) + "\n", encoding="utf-8")


def read_state(folder: Path) -> TrainingState:
    path = folder / STATE_NAME
    try:
        state = TrainingState.model_validate_json(read_plain_file(path, _MOST_STATE_BYTES))
    except OSError as fault:
        raise DataError(f"{path} cannot be read: {fault.strerror or fault}") from fault
    except ValidationError as fault:
        # truncated, because pydantic repeats its input, which can be anything in a damaged file
        raise DataError(f"{path} cannot be understood: {fault.errors()[0]['msg'][:500]}") from fault
    # each value is valid alone, but together they would give Adam an impossible bias correction
    if state.adam_step > state.step:
        raise DataError(f"{path} cannot be understood: adam_step={state.adam_step} is larger than step={state.step}")
    return state


MANIFEST_NAME = "mtrain.json"
CONFIG_NAME = "config.yaml"
"""File with a run's resolved configuration."""
_CONFIG_NAMES = (CONFIG_NAME, "model.yaml")
"""Files of a run and of an import whose SHA-256 is `config_hash`."""
MOST_BYTES = 1 << 26
"""Largest manifest; it has one entry per file."""
_SEAL = b',\n "sha256": "%s"\n}\n'
# only at the very end, because a value of the manifest may contain the same text
_SEALED = re.compile(re.escape(_SEAL).replace(b"%s", b"([0-9a-f]{64})") + rb"\Z")
_DIGEST = r"^[0-9a-f]{64}$"
_DELETED_ON_NFS = ".nfs"
"""Prefix of files that NFS keeps for a process that had them open when they were deleted."""


class DigestAlgorithm(Enum):
    """Cryptographic hash of a file's bytes, 256 bits."""

    SHA256 = "sha256"
    BLAKE3 = "blake3"

    @property
    def shown(self) -> str:
        return {DigestAlgorithm.SHA256: "SHA-256", DigestAlgorithm.BLAKE3: "BLAKE3"}[self]


class FileInfo(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    size_bytes: int = Field(ge=0, le=_MOST_COUNT)
    sha256: str | None = Field(None, pattern=_DIGEST)
    """SHA-256 of small files, and of all files in formats up to 3."""
    blake3: str | None = Field(None, pattern=_DIGEST)
    """BLAKE3 of files that are hashed as they are written; 12 times as fast on a CPU without SHA-256 instructions."""

    @model_validator(mode="after")
    def has_one_digest(self) -> Self:
        if (self.sha256 is None) == (self.blake3 is None):
            raise ValueError("a file needs its sha256 or its blake3, and not both")
        return self

    @model_serializer(mode="wrap")
    def without_the_other_digest(self, fields: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {name: value for name, value in fields(self).items() if value is not None}

    @property
    def algorithm(self) -> DigestAlgorithm:
        return DigestAlgorithm.SHA256 if self.blake3 is None else DigestAlgorithm.BLAKE3


class GitState(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    commit: str
    dirty: bool
    """Whether tracked files differed from the commit."""


class ChangeInfo(BaseModel):
    """Configuration key that a start changed, with the user's consent, from its checkpoint's value."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    step: int = Field(ge=0, le=_MOST_COUNT)
    """Number of updates before the change; later ones use the new value."""
    key: str
    old: str | None
    """Old value as JSON; None if the key was missing."""
    new: str | None


class SkippedInfo(BaseModel):
    """Step whose batch the run skips."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    step: int = Field(gt=0, le=_MOST_COUNT)
    """Number of the step, from 1; after a rollback it may be later than the checkpoint."""
    reason: str
    is_margin: bool = False
    """Whether the step is only near a bad one."""


class BaseInfo(BaseModel):
    """Frozen model of an adapter checkpoint, which does not contain it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    origin: str
    """Source of the model: a Hugging Face folder, a checkpoint, or a sentence if it was randomly initialized."""
    fingerprint: str = Field(pattern=r"^[0-9a-f]{16}$")
    """Fingerprint of its bits (checkpoint/format/fingerprint.py), the same under every layout and from every origin."""


class MetricInfo(BaseModel):
    """Value of the tasks' metric that valid.metric names."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    """`task/metric`, with the options of the tasks; only values of the same name compare."""
    value: float
    is_better_if_higher: bool


class CheckpointInfo(BaseModel):
    """Facts about a checkpoint, without its files."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    step: int = Field(ge=0, le=_MOST_COUNT)
    """Optimizer updates completed."""
    tokens: int = Field(0, ge=0)
    """Tokens of text that training has consumed."""
    layout: str
    """Layout that saved the checkpoint, as messages show it."""
    config_hash: str
    """SHA-256 of the resolved configuration, which the checkpoint has as config.yaml (model.yaml of an import)."""
    versions: dict[str, str]
    """Package -> version."""
    dataset: str | None = None
    """Fingerprint of the training data; None without training data, as in a conversion."""
    git: GitState | None = None
    """State of the program's source; None outside a git checkout."""
    inputs: dict[str, str] = {}
    """Configuration key -> fingerprint of what it names, for the run's inputs besides its training data: source code of
    the user's loss functions, teacher, validation sets; `org/name@commit` of a `model.hf` in the hub's cache."""
    valid_loss: float | None = None
    """Validation loss at this step in nats, of the set that valid.metric names; None without a validation."""
    valid_measure: str | None = None
    """Fingerprint of the samples and loss function of `valid_loss`; only losses with the same one compare. None without
    a validation, and in checkpoints from before this field."""
    task_metric: MetricInfo | None = None
    """Value at this step of the metric of eval.tasks that valid.metric names; None if it names none."""
    changes: tuple[ChangeInfo, ...] = ()
    """Changes to the configuration up to this step, in order."""
    skipped: tuple[SkippedInfo, ...] = ()
    """Steps that train.on_nonfinite and train.on_spike have skipped, ascending."""
    base: BaseInfo | None = None
    """Frozen model of an adapter checkpoint; None for a whole model."""
    reference: str | None = None
    """Value of `loss.reference`, the reference model whose scores are part of `dataset`. None for a run whose reference
    is its initial model, and for one without a reference."""


class Manifest(CheckpointInfo):
    format: Literal[2, 3, 4] = 4
    """Format of this file; a program that does not know the number does not touch the checkpoint. Format 2 lacks the
    SHA-256 of the manifest; up to format 3, every file has a SHA-256."""
    files: dict[str, FileInfo] = Field(min_length=1)
    """Path inside the checkpoint, with forward slashes -> facts of every file except the manifest."""

    @field_validator("files")
    @classmethod
    def files_lie_inside_the_checkpoint(cls, files: dict[str, FileInfo]) -> dict[str, FileInfo]:
        for name in files:
            path = PurePosixPath(name)
            # "a//b" and "./a/b" would be compared as different files
            if path.is_absolute() or ".." in path.parts or path.as_posix() != name or name == "." or "\0" in name:
                raise ValueError(f"file {name[:255]!r} is not inside the checkpoint")
        return files

    @model_validator(mode="after")
    def config_hash_is_of_the_configuration(self) -> Self:
        for name in _CONFIG_NAMES:
            if name in self.files and self.files[name].sha256 != self.config_hash:
                raise ValueError(f"config_hash={self.config_hash[:64]} is not the SHA-256 of {name}")
        return self

    @property
    def is_sealed(self) -> bool:
        """Whether the manifest has a SHA-256 of itself."""
        return self.format > 2


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Writes the manifest with its own SHA-256, atomically; raises OSError if the disk fails."""
    # a metric of None is left out, so that older versions can read the file
    absent = {"task_metric"} if manifest.task_metric is None else set[str]()
    body = manifest.model_dump_json(indent=1, exclude=absent).encode()
    seal = _SEAL % hashlib.sha256(body).hexdigest().encode()
    write_atomically(folder / MANIFEST_NAME, (body.removesuffix(b"\n}") + seal).decode())


def parsed_manifest(raw: bytes) -> Manifest:
    """Parses the bytes of a manifest's file; raises ValueError if they have changed since it was written, or are not a
    valid manifest."""
    sealed = _SEALED.search(raw)
    body = raw if sealed is None else raw[: sealed.start()] + b"\n}"
    # before parsing, so that a damaged manifest is never interpreted
    if sealed is not None and hashlib.sha256(body).hexdigest().encode() != sealed[1]:
        raise ValueError("it has changed since it was written (its SHA-256 differs)")
    manifest = Manifest.model_validate_json(body)
    # a damaged seal may no longer look like one
    if manifest.is_sealed != (sealed is not None):
        raise ValueError("its last line, its own SHA-256, is damaged")
    return manifest


def read_manifest(folder: Path) -> Manifest:
    """Reads a published checkpoint's manifest, and compares it with the files in the folder by name and size.

    Refuses a file that the manifest does not list, because it could not be verified. `verify_files` reads the bytes.

    Raises:
        DataError: The manifest is missing or not valid, or a file is missing, has another size, is a link or a device,
            or is not in the manifest.
    """
    path = folder / MANIFEST_NAME
    try:
        # a link could name the manifest of another checkpoint
        manifest = parsed_manifest(read_plain_file(path, MOST_BYTES, follow_link=False))
    except FileNotFoundError:
        raise DataError(f"{folder} has no {MANIFEST_NAME}: it was not completed, or another program wrote it") from None
    except NotADirectoryError:
        raise DataError(f"{folder} is not a folder") from None
    except OSError as fault:
        # a disk error does not mean that the checkpoint is damaged
        if fault.errno not in NOT_A_PLAIN_FILE:
            raise
        reason = "it is a link" if fault.errno == errno.ELOOP else fault.strerror or fault
        raise DataError(f"{path} is not a manifest: {reason}") from fault
    except ValidationError as fault:
        raise DataError(f"{path} cannot be understood: {_first_line(fault)}") from fault
    except (ValueError, MemoryError) as fault:
        raise DataError(f"{path} cannot be understood: {fault}") from fault
    try:
        _compare(folder, manifest.files)
    except FileNotFoundError:
        raise DataError(f"{folder} changed while it was read: it is being deleted") from None
    return manifest


def _compare(folder: Path, files: Mapping[str, FileInfo]) -> None:
    sizes = _sizes_below(folder)
    for name, facts in files.items():
        if name not in sizes:
            raise DataError(f"{folder / name[:255]} is missing")
        if sizes[name] != facts.size_bytes:
            raise DataError(f"{folder / name} has {sizes[name]} bytes, but {facts.size_bytes} were saved")
    if unknown := sorted(sizes.keys() - files.keys() - {MANIFEST_NAME}):
        raise DataError(
            f"{folder / unknown[0]} is not listed in {MANIFEST_NAME}, so it cannot be verified; move it elsewhere"
        )


def _sizes_below(folder: Path) -> dict[str, int]:
    """Returns path inside the folder -> size in bytes of all files; refuses links, devices and pipes."""
    sizes: dict[str, int] = {}
    left = [folder]
    while left:
        # scandir needs one stat per file; `exists` and `stat` by name would cost two round trips on a network disk
        with os.scandir(left.pop()) as entries:
            for entry in entries:
                # the link itself, because its target may change while the checkpoint does not
                facts = entry.stat(follow_symlinks=False)
                if stat.S_ISDIR(facts.st_mode):
                    left.append(Path(entry.path))
                elif not stat.S_ISREG(facts.st_mode):
                    raise DataError(f"{entry.path} is a link, a device or a pipe, but the file itself is needed")
                elif not entry.name.startswith(_DELETED_ON_NFS):
                    sizes[Path(entry.path).relative_to(folder).as_posix()] = facts.st_size
    return sizes


def _first_line(fault: ValidationError) -> str:
    error = fault.errors()[0]
    return " ".join([".".join(str(part) for part in error["loc"]), error["msg"]]).strip()[:500]


class BadStepHistory(NamedTuple):
    """Skipped steps of a run, and the updates that train.on_spike compares with the next step."""

    skipped: tuple[SkippedInfo, ...] = ()
    """Skipped steps, ascending."""
    recent: RecentUpdates | None = None
    """None unless train.on_spike is set."""


NO_BAD_STEPS = BadStepHistory()
