"""Certificates of `mtrain verify backend`: how layers of other libraries compared with ours on one machine."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mtrain.base.errors import MachineError
from mtrain.base.files import disk_faults, write_atomically

FORMAT = 1
"""Version of the file; raised when a field changes its meaning."""
VARIABLE = "MTRAIN_CERTIFICATES"
"""Environment variable that names the folder of the certificates."""


@dataclass(frozen=True)
class Comparison:
    """What was found of one candidate: layers of one library, for all kinds of layers of a model."""

    passed: bool
    """Whether every error is within its tolerance."""
    ms: float
    """Time of forward and backward pass of one layer of each kind, weighed by their numbers, in milliseconds."""
    own_ms: float
    """Time of our torch layers, measured in turn with the candidate's."""
    cases: tuple[Mapping[str, Any], ...] = ()
    """Shapes, times, and of every tensor both errors and the tolerance, by kind of layer."""
    error: str | None = None
    """Reason why the candidate could not be run to its end; None if it could."""

    @property
    def is_faster(self) -> bool:
        """Says whether the candidate takes less time than our layers."""
        return self.ms < self.own_ms


@dataclass(frozen=True)
class Certificate:
    """Result of one `mtrain verify backend`."""

    created: str
    """Time, ISO 8601, UTC."""
    machine: Mapping[str, str]
    """GPU, driver, and versions of the packages that can change numbers or times."""
    layers: Mapping[str, Any]
    """Part of the configuration that the layers depend on."""
    candidates: Mapping[str, Comparison]
    """Comparison of each candidate by its name."""

    @property
    def name(self) -> str:
        """Returns the file name, the same for one machine and one kind of layers."""
        content = json.dumps([self.machine, self.layers], sort_keys=True)
        return f"backend-{hashlib.sha256(content.encode()).hexdigest()[:16]}.json"

    def save(self, folder: Path) -> Path:
        """Writes the certificate, in the place of an earlier one of the same machine and layers.

        Raises:
            MachineError: The folder cannot be written.
        """
        path = folder / self.name
        with disk_faults(f"write {path}"):
            folder.mkdir(parents=True, exist_ok=True)
            write_atomically(path, json.dumps({"format": FORMAT, **asdict(self)}, indent=1) + "\n")
        return path


def certificates(folder: Path) -> Iterator[Certificate]:
    """Yields the certificates of a folder; files that are no certificates of this format certify nothing."""
    for path in sorted(folder.glob("backend-*.json")):
        try:
            content = json.loads(path.read_text())
            if content.pop("format") == FORMAT:
                found = {name: _comparison(each) for name, each in content.pop("candidates").items()}
                yield Certificate(candidates=found, **content)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            continue


def _comparison(content: dict[str, Any]) -> Comparison:
    return Comparison(**{**content, "cases": tuple(content["cases"])})


def certificate_folder() -> Path:
    """Returns the folder that MTRAIN_CERTIFICATES names; by default `certificates` in the user's cache folder.

    Raises:
        MachineError: The user has no home folder.
    """
    given = os.environ.get(VARIABLE)
    return Path(given) if given else cache_folder(f"certificates; set {VARIABLE}") / "certificates"


def cache_folder(purpose: str) -> Path:
    """Returns the user's cache folder, `$XDG_CACHE_HOME/mtrain`, by default `~/.cache/mtrain`.

    Args:
        purpose: End of the message where there is none: what the folder is for, and what to do.

    Raises:
        MachineError: The user has no home folder.
    """
    given = os.environ.get("XDG_CACHE_HOME")
    if given and Path(given).is_absolute():  # other values are to be ignored, as the XDG specification says
        return Path(given) / "mtrain"
    try:
        return Path.home() / ".cache" / "mtrain"
    except RuntimeError as fault:
        raise MachineError(f"this user has no home folder for {purpose}") from fault
