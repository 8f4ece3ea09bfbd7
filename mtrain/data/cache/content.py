"""Content of files, known without reading them at every start.

The SHA-256 of a file is remembered with its size, inode, mtime and ctime. ctime is what makes that safe: programs set
mtime back (cp -p, rsync -t, tar), but nobody sets ctime. A file that was changed within _SETTLED_NS before it was
hashed is not remembered, since clocks of file systems are coarse: a second change in the same tick would leave no
trace.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from mtrain.base.errors import DataError
from mtrain.base.signals import leave_if_stopped
from mtrain.base.steady_files import SteadyFile

_SETTLED_NS = 10 * 10**9
"""Time that is longer than the ticks of file systems in use (2 s at most), and than the clocks of nodes differ by."""
_BLOCK_BYTES = 1 << 22


@dataclass(frozen=True)
class FileState:
    """Properties of a file that change with every write."""

    bytes: int
    inode: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def of(cls, path: Path) -> FileState:
        """Reads the state of a file.

        Raises:
            DataError: The file cannot be looked at.
        """
        try:
            found = os.stat(path)
        except OSError as fault:
            raise DataError(f"{path} cannot be read: {fault.strerror or fault}; check the path") from fault
        return cls(found.st_size, found.st_ino, found.st_mtime_ns, found.st_ctime_ns)


@dataclass(frozen=True)
class FileContent:
    """Content of a file at one moment."""

    path: Path
    state: FileState
    sha256: str

    def check_unchanged(self) -> None:
        """Refuses a file that has been written to since.

        Raises:
            DataError: The file has been written to since.
        """
        if FileState.of(self.path) != self.state:
            raise DataError(f"{self.path} was changed while it was read; start again when nothing writes to it")


def content_of(path: Path, memory: Path, reads_all: bool) -> FileContent:
    """Finds the content of a file, from memory where that is safe.

    Args:
        path: Path of the file.
        memory: Folder in which digests are remembered; where it cannot be written, nothing is remembered.
        reads_all: Whether the file is hashed in any case.

    Raises:
        DataError: The file cannot be read, or changes meanwhile.
    """
    state = FileState.of(path)
    note = memory / f"{hashlib.sha256(os.fsencode(path.absolute())).hexdigest()}.json"
    if not reads_all and (known := _remembered(note, state)) is not None:
        return FileContent(path, state, known)
    began_ns = time.time_ns()
    content = FileContent(path, state, _hashed(path))
    content.check_unchanged()
    if max(state.mtime_ns, state.ctime_ns) < began_ns - _SETTLED_NS:
        with contextlib.suppress(OSError):  # a folder that cannot be written costs time, not correctness
            memory.mkdir(parents=True, exist_ok=True)
            new = note.with_suffix(f".{secrets.token_hex(4)}")
            new.write_text(json.dumps(asdict(state) | {"sha256": content.sha256}))
            new.replace(note)  # not synced: half a note is none
    return content


def _remembered(note: Path, state: FileState) -> str | None:
    try:
        known = json.loads(note.read_bytes())
        digest = str(known.pop("sha256"))
        return digest if known == asdict(state) and len(digest) == hashlib.sha256().digest_size * 2 else None
    except (OSError, ValueError, KeyError, AttributeError):
        return None


def _hashed(path: Path) -> str:
    try:
        digest = hashlib.sha256()
        with SteadyFile(path) as file:
            while block := file.read(_BLOCK_BYTES):
                leave_if_stopped("the data were read")
                digest.update(block)
        return digest.hexdigest()
    except OSError as fault:
        raise DataError(f"{path} cannot be read: {fault.strerror or fault}; check the path") from fault
