"""mtrain.json: what a checkpoint is and which files it consists of; written last, so its presence means complete."""

from pathlib import Path, PurePosixPath
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from mtrain.errors import DataError

MANIFEST_NAME = "mtrain.json"


class FileFacts(BaseModel):
    """What is known about one file."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    size_bytes: int = Field(ge=0)
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")


class GitState(BaseModel):
    """Which state of the program's source was at work."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    commit: str
    dirty: bool
    """Whether tracked files differed from the commit."""


class Facts(BaseModel):
    """What the program that saves knows about a checkpoint."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    step: int = Field(ge=0)
    """Optimizer updates completed."""
    tokens: int = Field(0, ge=0)
    """Positions that training has consumed, padding included."""
    layout: str
    """The layout that saved it, for people and for messages."""
    config_hash: str
    """SHA-256 of the resolved configuration that saved it."""
    versions: dict[str, str]
    """Package -> version."""
    dataset: str | None = None
    """Fingerprint of the training data; None where there were none, as in a conversion."""
    git: GitState | None = None
    """None where the program did not run from a git checkout."""
    valid_loss: float | None = None
    """Of a validation at this step, in nats; None where there was none."""


class Manifest(Facts):
    """The facts of one checkpoint and its files."""

    format: Literal[2] = 2
    """Of this file; a program that does not know the number does not touch the checkpoint."""
    files: dict[str, FileFacts] = Field(min_length=1)
    """Path inside the checkpoint, with forward slashes -> facts; this file left out."""

    @field_validator("files")
    @classmethod
    def files_lie_inside_the_checkpoint(cls, files: dict[str, FileFacts]) -> dict[str, FileFacts]:
        for name in files:
            path = PurePosixPath(name)
            if path.is_absolute() or ".." in path.parts or name in ("", "."):
                raise ValueError(f"file {name!r} does not lie inside the checkpoint")
        return files


def read_manifest(folder: Path) -> Manifest:
    """Reads a published checkpoint's manifest and compares it with what lies there.

    Files are compared by presence and size; `verification` reads their bytes.

    Raises:
        DataError: the manifest is missing or cannot be understood, or a file is missing or has another size.
    """
    try:
        manifest = Manifest.model_validate_json((folder / MANIFEST_NAME).read_bytes())
    except FileNotFoundError:
        raise DataError(f"{folder} has no {MANIFEST_NAME}: it was not completed, or another program wrote it") from None
    except NotADirectoryError:
        raise DataError(f"{folder} is not a folder") from None
    except ValidationError as fault:
        raise DataError(f"{folder / MANIFEST_NAME} cannot be understood: {_first_line(fault)}") from fault
    for name, facts in manifest.files.items():
        path = folder / name
        if path.is_symlink() or not path.is_file():
            raise DataError(f"{path} is missing")
        if (size := path.stat().st_size) != facts.size_bytes:
            raise DataError(f"{path} has {size} bytes, but {facts.size_bytes} were saved")
    return manifest


def _first_line(fault: ValidationError) -> str:
    error = fault.errors()[0]
    return " ".join([".".join(str(part) for part in error["loc"]), error["msg"]]).strip()
