"""mtrain.json: facts and files of a checkpoint; and training_state.json: the counters of the run, next to the tensors.

mtrain.json is written last, so its presence means that the checkpoint is complete. Its last line is the SHA-256 of the
bytes before it, so any changed bit is found, and a later version with more fields can still verify an old manifest.
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
"""Largest count: more steps, samples, tokens or bytes than there will be, and still exact in torch."""


class RecentUpdates(BaseModel):
    """Latest updates, by which train.on_spike judges the next step; the oldest first."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    losses: tuple[float, ...] = ()
    grad_norms: tuple[float, ...] = ()


class TrainingState(BaseModel):
    """State of a run in a checkpoint besides its tensors."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal[1] = 1
    step: int = Field(ge=0, le=_MOST_COUNT)
    """Optimizer updates completed, as the run counts them."""
    consumed_samples: int = Field(ge=0)
    adam_step: int = Field(ge=0)
    """Number of updates that changed the weights: after an overflow of fp16 or an empty batch it stays."""
    loss_scaler: LossScaler | None
    """Loss scaler of an fp16 run; else None."""
    layout: str
    device: str
    """Kind of device, cpu or cuda: random states of one are meaningless to the other."""
    vocab_size: int = Field(gt=0)
    """Number of embedding rows that are tokens; the others are padding, which depends on the layout."""
    recent: RecentUpdates | None = None
    """Latest updates where train.on_spike is set; else None."""


def write_state(folder: Path, state: TrainingState) -> None:
    """Writes the state into a checkpoint's folder; raises OSError where the disk refuses."""
    # in place: the folder is published as a whole, and the manifest has the digest of this file
    # left out where it is None: versions that do not know the key can read the rest
    absent = {"recent"} if state.recent is None else set[str]()
    (folder / STATE_NAME).write_text(state.model_dump_json(indent=1, exclude=absent) + "\n", encoding="utf-8")


def read_state(folder: Path) -> TrainingState:
    path = folder / STATE_NAME
    try:
        state = TrainingState.model_validate_json(read_plain_file(path, _MOST_STATE_BYTES))
    except OSError as fault:
        raise DataError(f"{path} cannot be read: {fault.strerror or fault}") from fault
    except ValidationError as fault:
        # cut: pydantic repeats its input, which can be anything in a damaged file
        raise DataError(f"{path} cannot be understood: {fault.errors()[0]['msg'][:500]}") from fault
    # each value is valid alone, but together they would give Adam a bias correction that no run had
    if state.adam_step > state.step:
        raise DataError(
            f"{path} cannot be understood: adam_step={state.adam_step}, but only {state.step} steps were made"
        )
    return state


MANIFEST_NAME = "mtrain.json"
CONFIG_NAME = "config.yaml"
"""Configuration that a run resolved."""
_CONFIG_NAMES = (CONFIG_NAME, "model.yaml")
"""Files whose SHA-256 is `config_hash`: of a run, or of an import, which has only a part."""
MOST_BYTES = 1 << 26
"""Largest size of a manifest; it has one line per file."""
_SEAL = b',\n "sha256": "%s"\n}\n'
# Only at the very end: the same text inside a value of the manifest is no seal.
_SEALED = re.compile(re.escape(_SEAL).replace(b"%s", b"([0-9a-f]{64})") + rb"\Z")
_DIGEST = r"^[0-9a-f]{64}$"
_DELETED_ON_NFS = ".nfs"
"""Prefix of files that NFS keeps because a process has them open while they are deleted."""


class DigestAlgorithm(Enum):
    """Cryptographic hash of a file's bytes, of 256 bits."""

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
    """BLAKE3 of files that are hashed as they are written: 12 times as fast on a CPU without SHA-256 instructions."""

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
    """Configuration key that a start changed from its checkpoint's value, with consent."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    step: int = Field(ge=0, le=_MOST_COUNT)
    """Number of updates before the change; later ones use the new value."""
    key: str
    old: str | None
    """Old value as JSON; None if the key was missing."""
    new: str | None


class SkippedInfo(BaseModel):
    """Step whose batch is left out of the run."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    step: int = Field(gt=0, le=_MOST_COUNT)
    """Number of the step, from 1; after a rollback it may lie beyond the checkpoint."""
    reason: str
    is_margin: bool = False
    """Whether the step is only near a bad one."""


class BaseInfo(BaseModel):
    """Frozen model that a checkpoint of adapters does not hold."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    origin: str
    """Source of the model: a Hugging Face folder, a checkpoint, or a sentence where it was randomly initialized."""
    fingerprint: str = Field(pattern=r"^[0-9a-f]{16}$")
    """Fingerprint of its bits (checkpoint/format/fingerprint.py), the same under every layout and from every origin."""


class CheckpointInfo(BaseModel):
    """Facts of a checkpoint that the saving program knows."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    step: int = Field(ge=0, le=_MOST_COUNT)
    """Optimizer updates completed."""
    tokens: int = Field(0, ge=0)
    """Tokens of text that training has consumed."""
    layout: str
    """Layout that saved the checkpoint, for people and for messages."""
    config_hash: str
    """SHA-256 of the resolved configuration that saved it, stored with it as config.yaml (model.yaml of an import)."""
    versions: dict[str, str]
    """Package -> version."""
    dataset: str | None = None
    """Fingerprint of the training data; None without any, as in a conversion."""
    git: GitState | None = None
    """State of the program's source; None outside a git checkout."""
    inputs: dict[str, str] = {}
    """Key of the configuration -> fingerprint of what it named, for what a run reads besides its training data: source
    of the user's own loss functions, teacher, validation sets."""
    valid_loss: float | None = None
    """Loss of a validation at this step, in nats, if any."""
    valid_measure: str | None = None
    """Fingerprint of what `valid_loss` measures, samples and loss function; only losses with the same one compare. None
    without a validation, and in checkpoints from before this field."""
    changes: tuple[ChangeInfo, ...] = ()
    """Changes of the configuration up to this step, in order."""
    skipped: tuple[SkippedInfo, ...] = ()
    """Steps that train.on_nonfinite and train.on_spike left out of the run, ascending."""
    base: BaseInfo | None = None
    """Frozen model of an adapter checkpoint; None for a whole model."""
    reference: str | None = None
    """Value of `loss.reference`: the model that answers were compared with, whose scores are part of `dataset`. None if
    that was the model that the run began from, or if nothing was compared."""


class Manifest(CheckpointInfo):
    format: Literal[2, 3, 4] = 4
    """Format of this file; a program that does not know the number does not touch the checkpoint. 2 has no
    SHA-256 of itself; up to 3 every file has a SHA-256."""
    files: dict[str, FileInfo] = Field(min_length=1)
    """Path inside the checkpoint, with forward slashes -> facts; the manifest itself is left out."""

    @field_validator("files")
    @classmethod
    def files_lie_inside_the_checkpoint(cls, files: dict[str, FileInfo]) -> dict[str, FileInfo]:
        for name in files:
            path = PurePosixPath(name)
            # "a//b" and "./a/b" would be compared as different files
            if path.is_absolute() or ".." in path.parts or path.as_posix() != name or name == "." or "\0" in name:
                raise ValueError(f"file {name[:255]!r} does not lie inside the checkpoint")
        return files

    @model_validator(mode="after")
    def config_hash_is_of_the_configuration(self) -> Self:
        for name in _CONFIG_NAMES:
            if name in self.files and self.files[name].sha256 != self.config_hash:
                raise ValueError(f"config_hash={self.config_hash[:64]} is not the SHA-256 of {name}")
        return self

    @property
    def is_sealed(self) -> bool:
        """Whether the manifest's own bytes were compared with a SHA-256."""
        return self.format > 2


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Writes the manifest with its own SHA-256, whole or not at all; raises OSError if the disk refuses."""
    body = manifest.model_dump_json(indent=1).encode()
    seal = _SEAL % hashlib.sha256(body).hexdigest().encode()
    write_atomically(folder / MANIFEST_NAME, (body.removesuffix(b"\n}") + seal).decode())


def parsed_manifest(raw: bytes) -> Manifest:
    """Parses the bytes of a manifest's file; raises ValueError if they were changed after writing, or cannot be
    understood."""
    sealed = _SEALED.search(raw)
    body = raw if sealed is None else raw[: sealed.start()] + b"\n}"
    # before the content is parsed: a damaged manifest is not interpreted
    if sealed is not None and hashlib.sha256(body).hexdigest().encode() != sealed[1]:
        raise ValueError("it was changed after it was written (its SHA-256 differs)")
    manifest = Manifest.model_validate_json(body)
    # a damaged seal may no longer look like one
    if manifest.is_sealed != (sealed is not None):
        raise ValueError("its last line, the SHA-256 of itself, is damaged")
    return manifest


def read_manifest(folder: Path) -> Manifest:
    """Reads a published checkpoint's manifest and compares it with the files in the folder, by presence and size.

    `verification` reads their bytes. A file that the manifest does not name cannot be verified, so it is not allowed.

    Raises:
        DataError: The manifest is missing or cannot be understood, or a file is missing, has another size, is a link or
            a device, or is not named.
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
        # a fault of the disk does not make the checkpoint damaged
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
            f"{folder / unknown[0]} is not named in {MANIFEST_NAME}, so it cannot be verified; move it elsewhere"
        )


def _sizes_below(folder: Path) -> dict[str, int]:
    """Returns path inside the folder -> size in bytes of all files; refuses what is neither a file nor a folder."""
    sizes: dict[str, int] = {}
    left = [folder]
    while left:
        # one stat per file: `exists` and `stat` by name cost two round trips each on a network disk
        with os.scandir(left.pop()) as entries:
            for entry in entries:
                # a link itself counts: its target may change without the checkpoint changing
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
    """Skipped steps of a run, and the updates by which the next step is judged."""

    skipped: tuple[SkippedInfo, ...] = ()
    """Steps that were left out, ascending."""
    recent: RecentUpdates | None = None
    """Latest updates if train.on_spike is set, else None."""


NO_BAD_STEPS = BadStepHistory()
