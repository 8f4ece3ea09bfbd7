"""Files that are hashed while they are written.

Hashing runs in a thread while another writes, as both release the GIL. Another thread starts the writeback of what has
been written so far, so that the sync at the end is short.
"""

import ctypes
import errno
import hashlib
import io
import os
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self, assert_never

from blake3 import blake3

from mtrain.base.steady_files import SteadyFile
from mtrain.checkpoint.store.manifest import DigestAlgorithm, FileInfo

_BEGIN_BYTES = 1 << 24
"""Number of new bytes after which writeback starts."""
_SYNC_FILE_RANGE_WRITE = 2
"""Flag of Linux' `sync_file_range` that starts writeback and does not wait for it."""
_NOT_POSSIBLE = (errno.ENOSYS, errno.EINVAL, errno.ESPIPE, errno.EOPNOTSUPP)
"""Errors of a kernel, file system or file that lacks this call; the final sync then writes everything."""


class WriteBehind:
    """Starts, in a thread, the writeback of a file that grows at its end.

    The caller syncs the complete file, which also reports errors of the disk. A `with` block waits at its end.
    `descriptor` must stay open as long as this object.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor, self._begun_bytes, self._new_bytes = descriptor, 0, 0
        # at most one request is in flight, so none waits for the worker
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="write-behind")
        self._asking: Future[None] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self.close()
        if kind is None:
            self.wait()

    def note(self, num_bytes: int) -> None:
        """Counts new bytes of the file, and starts their writeback once they are enough; raises OSError if an earlier
        writeback failed."""
        self._new_bytes += num_bytes
        if self._new_bytes >= _BEGIN_BYTES and (self._asking is None or self._asking.done()):
            self.wait()
            self._asking = self._worker.submit(begin_writing, self._descriptor, self._begun_bytes, self._new_bytes)
            self._begun_bytes, self._new_bytes = self._begun_bytes + self._new_bytes, 0

    def wait(self) -> None:
        """Waits for the request in flight; raises OSError if it failed."""
        if self._asking is not None:
            self._asking.result()

    def close(self) -> None:
        """Ends the thread after the request in flight."""
        self._worker.shutdown()


def begin_writing(descriptor: int, start: int, num_bytes: int) -> None:
    """Starts the writeback of a range of a file; returns once all of it is queued, not when it is on disk. Unlike
    fdatasync, it neither commits a journal nor flushes the disk's cache."""
    if sys.platform != "linux":  # the final sync writes everything
        return
    library = ctypes.CDLL(None, use_errno=True)
    if library.sync_file_range(
        descriptor, ctypes.c_int64(start), ctypes.c_int64(num_bytes), ctypes.c_uint(_SYNC_FILE_RANGE_WRITE)
    ):
        number = ctypes.get_errno()
        if number not in _NOT_POSSIBLE:
            raise OSError(number, os.strerror(number))


_SMALL_BYTES = 1 << 18
_PIECE_BYTES = 1 << 23
_READ_BYTES = 1 << 20


class HashedFile(io.RawIOBase):
    """New file, written from beginning to end; every method raises OSError if the disk fails."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        # O_EXCL: an existing file belongs to another writer; O_CLOEXEC: no child process keeps the file open
        try:
            self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        except OSError:
            super().close()  # or the garbage collector would close a file that was never opened
            raise
        self._digest, self._size_bytes = blake3(), 0
        # at most one hash is in flight, so none waits for the worker
        self._hasher = ThreadPoolExecutor(1, thread_name_prefix="checkpoint-file")
        self._behind = WriteBehind(self._descriptor)

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._size_bytes

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        # small pieces are the headers of records
        if view.nbytes <= _SMALL_BYTES:
            self._digest.update(view)
            self._write(view)
        else:
            hashing = self._hasher.submit(self._digest.update, view)
            try:
                # in pieces, so that writeback starts in the middle of a large tensor
                for start in range(0, view.nbytes, _PIECE_BYTES):
                    self._write(view[start : start + _PIECE_BYTES])
            finally:
                hashing.result()  # the caller may reuse the memory now
        return view.nbytes

    def finish(self) -> FileInfo:
        """Waits until everything is on disk and returns the file's size and digest."""
        self._behind.wait()
        os.fsync(self._descriptor)
        return FileInfo(size_bytes=self._size_bytes, blake3=self._digest.hexdigest())

    def close(self) -> None:
        """Closes the file; without an earlier `finish`, its end may not be on disk."""
        if not self.closed:
            self._hasher.shutdown()
            self._behind.close()
            os.close(self._descriptor)
        super().close()

    def _write(self, view: memoryview) -> None:
        # a write may be partial, for instance on a nearly full disk
        while view.nbytes:
            written = os.write(self._descriptor, view)
            self._size_bytes += written
            view = view[written:]
            self._behind.note(written)


def write_hashed(path: Path, data: bytes) -> FileInfo:
    """Writes a small file and syncs it."""
    with HashedFile(path) as file:
        file.write(data)
        return file.finish()


def read_facts(path: Path, algorithm: DigestAlgorithm = DigestAlgorithm.SHA256) -> FileInfo:
    """Returns the size and digest of a file; reads all of it."""
    match algorithm:
        case DigestAlgorithm.SHA256:
            digest: Any = hashlib.sha256()
        case DigestAlgorithm.BLAKE3:
            digest = blake3()
        case _:
            assert_never(algorithm)
    buffer = memoryview(bytearray(_READ_BYTES))
    # unbuffered: the piece that is hashed is still in the processor's cache
    with SteadyFile(path) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
        return FileInfo.model_validate({"size_bytes": file.tell(), algorithm.value: digest.hexdigest()})
