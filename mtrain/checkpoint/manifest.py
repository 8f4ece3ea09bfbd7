"""mtrain.json: what a checkpoint is and which files it consists of; written last, so its presence means complete."""

import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from mtrain.errors import DataError

MANIFEST_NAME = "mtrain.json"


class FileFacts(BaseModel):
    """What is known about one file."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    size_bytes: int = Field(ge=0)


class Manifest(BaseModel):
    """The facts of one checkpoint."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal[1] = 1
    """Of this file; a program that does not know the number does not touch the checkpoint."""
    step: int = Field(ge=0)
    """Optimizer updates completed."""
    layout: str
    """The layout that saved it, for people and for messages."""
    config_hash: str
    """Of the configuration that saved it."""
    versions: dict[str, str]
    """Package -> version."""
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


def measured_files(folder: Path) -> dict[str, FileFacts]:
    """Every file below the folder, except the manifest, with its size."""
    return {path.relative_to(folder).as_posix(): FileFacts(size_bytes=path.stat().st_size) for path in _files(folder)}


def read_manifest(folder: Path) -> Manifest:
    """Reads a published checkpoint's manifest and compares it with what lies there.

    Files are compared by presence and size; their bytes are not read.

    Raises:
        DataError: the manifest is missing or cannot be understood, or a file is missing or has another size.
    """
    try:
        manifest = Manifest.model_validate_json((folder / MANIFEST_NAME).read_bytes())
    except FileNotFoundError:
        raise DataError(f"{folder} has no {MANIFEST_NAME}: it was not completed") from None
    except ValidationError as fault:
        raise DataError(f"{folder / MANIFEST_NAME} cannot be understood: {_first_line(fault)}") from fault
    for name, facts in manifest.files.items():
        path = folder / name
        if path.is_symlink() or not path.is_file():
            raise DataError(f"{path} is missing")
        if (size := path.stat().st_size) != facts.size_bytes:
            raise DataError(f"{path} has {size} bytes, but {facts.size_bytes} were saved")
    return manifest


def _files(folder: Path) -> Iterator[Path]:
    for parent, _, names in os.walk(folder):
        for name in sorted(names):
            path = Path(parent, name)
            if path != folder / MANIFEST_NAME:
                yield path


def _first_line(fault: ValidationError) -> str:
    error = fault.errors()[0]
    return " ".join([".".join(str(part) for part in error["loc"]), error["msg"]]).strip()
