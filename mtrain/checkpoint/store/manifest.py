"""mtrain.json: what a checkpoint is and which files it consists of; written last, so its presence means complete.

Its last line is the SHA-256 of all that stands before it. The bytes themselves are hashed, not what they mean, so that
any changed bit is found, and a later version with more fields still knows what this one wrote.
"""

import errno
import hashlib
import os
import re
import stat
from collections.abc import Mapping
from enum import Enum
from pathlib import Path, PurePosixPath
from typing import Any, Literal, Self

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

MANIFEST_NAME = "mtrain.json"
CONFIG_NAME = "config.yaml"
"""The configuration that a run resolved."""
_CONFIG_NAMES = (CONFIG_NAME, "model.yaml")
"""Of the file whose SHA-256 is `config_hash`: of a run, or of an import, which knows a part only."""
_MOST_BYTES = 1 << 26
"""Of a manifest; one line a file."""
_MOST_COUNT = 1 << 53
"""More steps, tokens or bytes than there will be."""
_SEAL = b',\n "sha256": "%s"\n}\n'
# Only at the very end: the same text inside a value of the manifest is no seal.
_SEALED = re.compile(re.escape(_SEAL).replace(b"%s", b"([0-9a-f]{64})") + rb"\Z")
_DIGEST = r"^[0-9a-f]{64}$"
_DELETED_ON_NFS = ".nfs"
"""Begins the name of what another process holds open while it is deleted."""


class DigestAlgorithm(Enum):
    """How the bytes of a file become a digest of 256 bits that nobody can aim at."""

    SHA256 = "sha256"
    BLAKE3 = "blake3"

    @property
    def shown(self) -> str:
        """For messages."""
        return {DigestAlgorithm.SHA256: "SHA-256", DigestAlgorithm.BLAKE3: "BLAKE3"}[self]


class FileInfo(BaseModel):
    """What is known about one file."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    size_bytes: int = Field(ge=0, le=_MOST_COUNT)
    sha256: str | None = Field(None, pattern=_DIGEST)
    """Of small files, and of all that format 3 and those before it name."""
    blake3: str | None = Field(None, pattern=_DIGEST)
    """Of what is hashed while it is written: 12 times as fast where the processor has no instructions for SHA-256."""

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
        """Of its digest."""
        return DigestAlgorithm.SHA256 if self.blake3 is None else DigestAlgorithm.BLAKE3


class GitState(BaseModel):
    """Which state of the program's source was at work."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    commit: str
    dirty: bool
    """Whether tracked files differed from the commit."""


class ChangeInfo(BaseModel):
    """A key that a start gave another value than its checkpoint had, with consent."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    step: int = Field(ge=0, le=_MOST_COUNT)
    """Updates made before it; those that follow are made with the new value."""
    key: str
    """Dotted."""
    old: str | None
    """As JSON; None where the key was missing."""
    new: str | None


class SkippedInfo(BaseModel):
    """A step whose batch is left out of the run."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    step: int = Field(gt=0, le=_MOST_COUNT)
    """Counted from 1; it may lie beyond the checkpoint, which a rollback went back to."""
    reason: str
    is_margin: bool = False
    """Whether it only lies near a bad one."""


class BaseInfo(BaseModel):
    """The frozen model that a checkpoint of adapters does not hold."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    origin: str
    """What the run was given: a folder of Hugging Face, a checkpoint, or a sentence where it was drawn."""
    fingerprint: str = Field(pattern=r"^[0-9a-f]{16}$")
    """Of its bits (checkpoint/format/fingerprint.py), the same under every layout and from every origin."""


class CheckpointInfo(BaseModel):
    """What the program that saves knows about a checkpoint."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    step: int = Field(ge=0, le=_MOST_COUNT)
    """Optimizer updates completed."""
    tokens: int = Field(0, ge=0)
    """Tokens of text that training has consumed; what version 0.1.0 counted of them has padding in it."""
    layout: str
    """The layout that saved it, for people and for messages."""
    config_hash: str
    """SHA-256 of the resolved configuration that saved it, which lies beside it as config.yaml (model.yaml of an
    import)."""
    versions: dict[str, str]
    """Package -> version."""
    dataset: str | None = None
    """Fingerprint of the training data; None where there were none, as in a conversion."""
    git: GitState | None = None
    """None where the program did not run from a git checkout."""
    valid_loss: float | None = None
    """Of a validation at this step, in nats; None where there was none."""
    changes: tuple[ChangeInfo, ...] = ()
    """Of the run up to this step, in order."""
    skipped: tuple[SkippedInfo, ...] = ()
    """Steps that were left out of the run as train.on_nonfinite and train.on_spike say, ascending."""
    base: BaseInfo | None = None
    """None where the checkpoint holds a whole model."""
    reference: str | None = None
    """What `loss.reference` named: the model that answers were compared with, whose scores are part of `dataset`. None
    where that was the one the run began from, or where nothing was compared."""


class Manifest(CheckpointInfo):
    """The facts of one checkpoint and its files."""

    format: Literal[2, 3, 4] = 4
    """Of this file; a program that does not know the number does not touch the checkpoint. 2, of version 0.1.0, has no
    SHA-256 of itself; up to 3 every file has a SHA-256."""
    files: dict[str, FileInfo] = Field(min_length=1)
    """Path inside the checkpoint, with forward slashes -> facts; this file left out."""

    @field_validator("files")
    @classmethod
    def files_lie_inside_the_checkpoint(cls, files: dict[str, FileInfo]) -> dict[str, FileInfo]:
        for name in files:
            path = PurePosixPath(name)
            # one spelling for each file: "a//b" and "./a/b" would be compared as files of their own
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
        """Whether its own bytes were compared with a SHA-256."""
        return self.format > 2


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Writes it with its own SHA-256, whole or not at all; OSError as the disk gives it."""
    # not sorted or formatted anew: what is hashed are the very bytes that are written
    body = manifest.model_dump_json(indent=1).encode()
    seal = _SEAL % hashlib.sha256(body).hexdigest().encode()
    write_atomically(folder / MANIFEST_NAME, (body.removesuffix(b"\n}") + seal).decode())


def parsed_manifest(raw: bytes) -> Manifest:
    """A manifest from the bytes of its file.

    Raises:
        ValueError: They are not what was written, or cannot be understood.
    """
    sealed = _SEALED.search(raw)
    body = raw if sealed is None else raw[: sealed.start()] + b"\n}"
    # before the content is parsed: a damaged one is not interpreted
    if sealed is not None and hashlib.sha256(body).hexdigest().encode() != sealed[1]:
        raise ValueError("it was changed after it was written (its SHA-256 differs)")
    manifest = Manifest.model_validate_json(body)
    # else a damaged seal, which no longer looks like one, would go unnoticed
    if manifest.is_sealed != (sealed is not None):
        raise ValueError("its last line, the SHA-256 of itself, is damaged")
    return manifest


def read_manifest(folder: Path) -> Manifest:
    """Reads a published checkpoint's manifest and compares it with what lies there.

    Files are compared by presence and size; `verification` reads their bytes. A file that the manifest does not name
    has no SHA-256 to be compared with, so it is not allowed.

    Raises:
        DataError: the manifest is missing or cannot be understood, or a file is missing, has another size, is a link or
            a device, or is not named.
    """
    path = folder / MANIFEST_NAME
    try:
        # a link could name the manifest of another checkpoint, whose files would then be compared with this folder's
        manifest = parsed_manifest(read_plain_file(path, _MOST_BYTES, follow_link=False))
    except FileNotFoundError:
        raise DataError(f"{folder} has no {MANIFEST_NAME}: it was not completed, or another program wrote it") from None
    except NotADirectoryError:
        raise DataError(f"{folder} is not a folder") from None
    except OSError as fault:
        # a fault of the disk says nothing of the checkpoint: it must not be passed over as damaged
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
    """Path inside the folder -> size in bytes, of all files.

    Raises:
        DataError: There is something that is neither a file nor a folder.
    """
    sizes: dict[str, int] = {}
    left = [folder]
    while left:
        # one pass with one stat a file: `exists` and `stat` by name cost two round trips each on a network disk
        with os.scandir(left.pop()) as entries:
            for entry in entries:
                # a link is judged itself: what it names may change without the checkpoint changing
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
