"""Certificates of `mtrain verify backend`: how layers of other libraries compare with ours on one machine."""

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
VARIABLE = "MTRAIN_CERTIFICATES"
NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")
"""File with the version of this machine's GPU driver; missing without a driver."""


@dataclass(frozen=True)
class Comparison:
    """Result of one candidate: a library's layers, compared with ours for every kind of layer in a model."""

    passed: bool
    ms: float
    """Milliseconds of a forward and backward pass, summed over the kinds of layer, weighted by their numbers."""
    own_ms: float
    """Milliseconds of our torch layers, measured alternately with the candidate's."""
    cases: tuple[Mapping[str, Any], ...] = ()
    """Shapes, times, and every tensor's tolerance and both errors, for each kind of layer."""
    error: str | None = None
    """Reason why the candidate did not finish; None if it did."""

    @property
    def is_faster(self) -> bool:
        """Whether the candidate takes less time than our layers."""
        return self.ms < self.own_ms


@dataclass(frozen=True)
class Certificate:
    """Result of one `mtrain verify backend`."""

    created: str
    """UTC time, ISO 8601."""
    machine: Mapping[str, str]
    """GPU, driver, and versions of packages that can change numbers or times."""
    layers: Mapping[str, Any]
    """Configuration keys that the layers depend on, with their values."""
    candidates: Mapping[str, Comparison]

    @property
    def name(self) -> str:
        """File name, which follows from the machine and the layers."""
        content = json.dumps([self.machine, self.layers], sort_keys=True)
        return f"backend-{hashlib.sha256(content.encode()).hexdigest()[:16]}.json"

    def save(self, folder: Path) -> Path:
        """Writes the certificate, replacing an earlier one of the same machine and layers, and returns its path.

        Raises:
            MachineError: The folder cannot be written.
        """
        path = folder / self.name
        with disk_faults(f"write {path}"):
            folder.mkdir(parents=True, exist_ok=True)
            write_atomically(path, json.dumps({"format": FORMAT, **asdict(self)}, indent=1) + "\n")
        return path


def certificates(folder: Path) -> Iterator[Certificate]:
    """Yields the valid certificates of a folder; skips other files."""
    for path in sorted(folder.glob("backend-*.json")):
        try:
            content = json.loads(path.read_text())
            if content.pop("format") == FORMAT:
                candidates = {name: _comparison(comparison) for name, comparison in content.pop("candidates").items()}
                yield Certificate(candidates=candidates, **content)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            continue


def _comparison(content: dict[str, Any]) -> Comparison:
    return Comparison(**{**content, "cases": tuple(content["cases"])})


def certificate_folder() -> Path:
    """Returns the folder in the variable MTRAIN_CERTIFICATES, by default `certificates` in the user's cache folder.

    Raises:
        MachineError: The user has no home folder.
    """
    folder = os.environ.get(VARIABLE)
    return Path(folder) if folder else cache_folder(f"certificates; set {VARIABLE}") / "certificates"


def cache_folder(purpose: str) -> Path:
    """Returns `$XDG_CACHE_HOME/mtrain`, by default `~/.cache/mtrain`.

    Args:
        purpose: End of the error message: the purpose of the folder, and the alternative.

    Raises:
        MachineError: The user has no home folder.
    """
    folder = os.environ.get("XDG_CACHE_HOME")
    if folder and Path(folder).is_absolute():  # the XDG specification says to ignore relative paths
        return Path(folder) / "mtrain"
    try:
        return Path.home() / ".cache" / "mtrain"
    except RuntimeError as fault:
        raise MachineError(f"this user has no home folder for {purpose}") from fault
