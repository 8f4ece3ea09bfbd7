"""Readers for files that others wrote: regular files, plain JSON and plain YAML only, up to a size limit.

A folder, device or pipe is refused; reading a pipe would block.
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
"""Errors of `open_plain_file` and `read_plain_file` about the file itself, not the disk."""
_HALF_OF_A_PAIR = re.compile(rb"\\u[dD][89a-fA-F]")
"""Escape sequence that may be half of a surrogate pair."""
_MOST_DEPTH = 100


def open_plain_file(path: Path, follow_link: bool = True) -> BinaryIO:
    """Opens a file for reading, unbuffered; never blocks, not even on a pipe.

    Args:
        follow_link: Whether the path may be a symbolic link.

    Raises:
        OSError: The file cannot be opened; or, with a number of NOT_A_PLAIN_FILE, it is not a regular file.
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
        OSError: The file is not regular, cannot be read, is too large, or grows meanwhile.
    """
    return retried(lambda: _whole(path, most_bytes, follow_link), path)


def _whole(path: Path, most_bytes: int, follow_link: bool) -> bytes:
    with open_plain_file(path, follow_link) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most_bytes:
            raise OSError(errno.EFBIG, f"it has {size} bytes, but at most {most_bytes} are read", str(path))
        parts = []
        while part := file.read(size + 1):  # a read may give less than was asked for
            parts.append(part)
            size -= len(part)
            if size < 0:
                raise OSError(errno.EINVAL, "it grows while it is read", str(path))
        return b"".join(parts)


def parsed_json(raw: bytes) -> Any:
    """Parses JSON text that others wrote.

    Raises:
        ValueError: The text is not standard JSON (NaN, a name twice in an object), is nested too deeply, or holds an
            unusable number or text.
    """
    try:
        content = json.loads(
            raw.decode("utf-8-sig"),
            object_pairs_hook=_without_duplicates,
            parse_constant=_no_number,
            parse_float=_finite_number,
        )
        if _HALF_OF_A_PAIR.search(raw):  # half of a surrogate pair can neither be printed nor be part of a name
            json.dumps(content, ensure_ascii=False).encode()
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except MemoryError:
        raise ValueError("it does not fit into memory") from None
    _check_depth(content)
    return content


def _check_depth(content: Any) -> None:
    """Refuses deep nesting, so that a message can show the value; the parser accepts ten times as much."""
    level = [content]
    for _ in range(_MOST_DEPTH):
        held = (each.values() if isinstance(each, dict) else each for each in level if isinstance(each, dict | list))
        level = [value for values in held for value in values]
        if not level:
            return
    raise ValueError("it is nested too deeply")


def parsed_yaml(raw: bytes) -> Any:
    """Parses YAML text that others wrote.

    Raises:
        ValueError: The text is not YAML, or `read_yaml` refuses it.
    """
    from mtrain.base.yaml_text import read_yaml  # only here: a YAML reader takes longer to load than all the rest

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
    """Maps a file read-only; it may be larger than memory, because only writable pages need memory reserved.

    Raises:
        OSError: `open_plain_file` cannot open it, or the system refuses.
        ValueError: The file is empty.
    """
    with open_plain_file(path) as file:
        # private: some network disks and FUSE have no shared mappings
        return mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ)


class _Bytes:
    """Bytes of a mapped file that numpy takes for a writable array."""

    def __init__(self, content: mmap.mmap) -> None:
        import numpy as np  # only here: the lowest layers load without

        self._held = np.frombuffer(content, np.uint8)
        self.__array_interface__ = {**self._held.__array_interface__, "data": (self._held.ctypes.data, False)}


def bytes_of(content: mmap.mmap) -> Any:
    """Returns a mapped file as a numpy array, which keeps the mapping alive and must not be written to.

    It claims to be writable, because torch has no read-only tensors and would warn of each array.
    """
    import numpy as np

    return np.asarray(_Bytes(content))


def read_ahead(content: mmap.mmap, start: int, stop: int) -> None:
    """Asks the system to read these bytes of a mapped file ahead in large pieces; does not wait.

    Without it each first access to a page waits for its own small read.
    """
    first = start - start % mmap.PAGESIZE
    size = min(stop, len(content)) - first  # a damaged file may end early; its reader reports that
    if size > 0:
        with suppress(OSError):  # where the file system does not support it, the content is the same
            content.madvise(mmap.MADV_WILLNEED, first, size)
