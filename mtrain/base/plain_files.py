"""Readers of untrusted files: only regular files with plain JSON or YAML, up to a size limit.

Folders, devices and pipes are refused; reading a pipe would block.
"""

import errno
import json
import math
import mmap
import os
import re
import stat
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from mtrain.base.steady_files import retried

NOT_A_PLAIN_FILE = frozenset(
    {errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.EINVAL, errno.EFBIG, errno.ENXIO, errno.ENOENT, errno.ENOTDIR}
)
"""Numbers of errors in `open_plain_file` and `read_plain_file` that concern the file itself, not the disk."""
_HALF_OF_A_PAIR = re.compile(rb"\\u[dD][89a-fA-F]")
"""Escape sequence that may be half a surrogate pair."""
_MOST_DEPTH = 100


def open_plain_file(path: Path, follow_link: bool = True) -> BinaryIO:
    """Opens a file for reading, unbuffered; never blocks, not even on a pipe.

    Args:
        follow_link: Whether the path may be a symbolic link.

    Raises:
        OSError: The file cannot be opened, or is not a regular file (an errno of NOT_A_PLAIN_FILE).
    """
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (0 if follow_link else os.O_NOFOLLOW)
    try:
        descriptor = retried(lambda: os.open(path, flags), path)
    except ValueError:
        raise OSError(errno.EINVAL, "its name cannot be the name of a file") from None
    try:
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, "it is a folder", str(path))
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "it is a device or a pipe, but a file is needed", str(path))
    except OSError:
        os.close(descriptor)
        raise
    return os.fdopen(descriptor, "rb", buffering=0)


def read_plain_file(path: Path, most_bytes: int, follow_link: bool = True) -> bytes:
    """Reads the whole content of a small file.

    Args:
        most_bytes: Largest size; a larger file is not read.
        follow_link: Whether the path may be a symbolic link.

    Raises:
        OSError: The file is not regular, cannot be read, is too large, or grows during the read.
    """
    return retried(lambda: _whole(path, most_bytes, follow_link), path)


def _whole(path: Path, most_bytes: int, follow_link: bool) -> bytes:
    with open_plain_file(path, follow_link) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most_bytes:
            raise OSError(errno.EFBIG, f"it has {size} bytes, but at most {most_bytes} are read", str(path))
        parts = []
        while part := file.read(size + 1):  # a read may return fewer bytes
            parts.append(part)
            size -= len(part)
            if size < 0:
                raise OSError(errno.EINVAL, "it grows while it is read", str(path))
        return b"".join(parts)


def parsed_json(raw: bytes) -> Any:
    """Parses untrusted JSON.

    Raises:
        ValueError: The text is not standard JSON (such as NaN, or a name twice in an object), is nested too deeply, or
            contains an unusable number or text.
    """
    try:
        content = json.loads(
            raw.decode("utf-8-sig"),
            object_pairs_hook=_without_duplicates,
            parse_constant=_no_number,
            parse_float=_finite_number,
        )
        if _HALF_OF_A_PAIR.search(raw):  # half a surrogate pair can neither be printed nor be part of a file name
            json.dumps(content, ensure_ascii=False).encode()
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except MemoryError:
        raise ValueError("it does not fit into memory") from None
    _check_depth(content)
    return content


def _check_depth(content: Any) -> None:
    """Refuses deep nesting, so that messages can show the value; the parser itself accepts ten times as much."""
    level = [content]
    for _ in range(_MOST_DEPTH):
        containers = [value for value in level if isinstance(value, dict | list)]
        level = [item for value in containers for item in (value.values() if isinstance(value, dict) else value)]
        if not level:
            return
    raise ValueError("it is nested too deeply")


def parsed_yaml(raw: bytes) -> Any:
    """Parses untrusted YAML.

    Raises:
        ValueError: The text is not YAML, or `read_yaml` refuses it.
    """
    from mtrain.base.yaml_text import read_yaml  # here, because a YAML reader takes long to load

    return read_yaml(raw.decode("utf-8-sig")).content


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) != len(pairs):
        twice = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        raise ValueError(f"{twice[:100]!r} appears twice")
    return content


def _no_number(name: str) -> float:
    raise ValueError(f"{name} is not a number")


def _finite_number(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:100]} is too large for a number")
    return number


def map_plain_file(path: Path) -> mmap.mmap:
    """Maps a file read-only; the file may be larger than memory, since only writable pages reserve memory.

    Raises:
        OSError: `open_plain_file` cannot open the file, or the system cannot map it.
        ValueError: The file is empty.
    """
    with open_plain_file(path) as file:
        # private: some network disks and FUSE have no shared mappings
        return mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ)


class _Bytes:
    """Bytes of a mapped file, presented to numpy as a writable array."""

    def __init__(self, content: mmap.mmap) -> None:
        import numpy as np  # here, because the lowest packages load without numpy

        self._array = np.frombuffer(content, np.uint8)
        self.__array_interface__ = {**self._array.__array_interface__, "data": (self._array.ctypes.data, False)}


def bytes_of(content: mmap.mmap) -> Any:
    """Returns a mapped file as a uint8 numpy array, which keeps the mapping alive and must not be written to.

    The array claims to be writable, because torch has no read-only tensors and would warn of each array.
    """
    import numpy as np

    return np.asarray(_Bytes(content))


def read_ahead(content: mmap.mmap, start: int, stop: int) -> None:
    """Asks the system to read bytes [start, stop) of a mapped file ahead in large pieces; does not wait.

    Otherwise each first access to a page waits for its own small read.
    """
    first = start - start % mmap.PAGESIZE
    size = min(stop, len(content)) - first  # a damaged file may end early, which its reader reports
    if size > 0:
        with suppress(OSError):  # only a hint, which some file systems do not support
            content.madvise(mmap.MADV_WILLNEED, first, size)
