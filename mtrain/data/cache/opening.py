"""Opens the token cache of a source, or builds it while other processes wait.

The cache holds `entries/KEY/`, one for each source and way of tokenising, and `files/`, where digests of files are
remembered. KEY depends on the content of the files, not on their paths. An entry appears in one move when it is
complete and is never written again; any of them may be removed while no run starts.

The SHA-256 of a file is remembered with its size, inode, mtime and ctime. Programs set mtime back (cp -p, rsync -t,
tar), but not ctime. A file that changed shortly before it was hashed is not remembered (file_state.py).
"""

import contextlib
import fcntl
import hashlib
import json
import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from mtrain.base.certificate import cache_folder
from mtrain.base.errors import DataError
from mtrain.base.fault_points import fault_point
from mtrain.base.files import LockOutcome, disk_faults, remove, sync_file, try_lock
from mtrain.base.heartbeat import tick
from mtrain.base.signals import leave_if_stopped
from mtrain.base.spelling import counted
from mtrain.base.steady_files import SteadyFile
from mtrain.data.cache.encoding_workers import TOKENISING, EncodingJob, encoded_chunks
from mtrain.data.cache.entry import FORMAT, LARGE, ArrayWriter, DamagedEntryError, EntryFacts, TokenCache
from mtrain.data.cache.images import ImageFile
from mtrain.data.formats.file_state import is_settled, state_of
from mtrain.data.formats.record_files import RecordFile

_BLOCK_BYTES = 1 << 22


@dataclass(frozen=True)
class FileContent:
    path: Path
    state: Mapping[str, int]
    sha256: str

    def check_unchanged(self) -> None:
        """Refuses a file that has been written to since it was hashed."""
        if state_of(self.path) != self.state:
            raise DataError(f"{self.path} was changed while it was read; start again when nothing writes to it")


def content_of(path: Path, memory: Path, reads_all: bool) -> FileContent:
    """Returns a file's state and digest; remembers the digest in the folder `memory` if safe and writable."""
    state = state_of(path)
    note = memory / f"{hashlib.sha256(os.fsencode(path.absolute())).hexdigest()}.json"
    if not reads_all and (known := _remembered(note, state)) is not None:
        return FileContent(path, state, known)
    began_ns = time.time_ns()
    content = FileContent(path, state, _hashed(path))
    content.check_unchanged()
    if is_settled(state, began_ns):
        with contextlib.suppress(OSError):  # a folder that cannot be written costs time, not correctness
            memory.mkdir(parents=True, exist_ok=True)
            new = note.with_suffix(f".{secrets.token_hex(4)}")
            new.write_text(json.dumps(state | {"sha256": content.sha256}))
            new.replace(note)  # not synced: a truncated note is ignored
    return content


def _remembered(note: Path, state: dict[str, int]) -> str | None:
    try:
        known = json.loads(note.read_bytes())
        digest = str(known.pop("sha256"))
        return digest if known == state and len(digest) == hashlib.sha256().digest_size * 2 else None
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


_LINE_S = 10.0


class Progress:
    """Progress line, printed every few seconds."""

    def __init__(self, num_bytes: int, first_file: Path, say: Callable[[str], None]) -> None:
        self._what, self._say = f"{first_file} ({num_bytes / 1e6:,.0f} MB)", say
        self._began = self._printed = time.monotonic()

    def update(self, num_records: int, num_tokens: int) -> None:
        """Prints the progress, unless the last line is recent."""
        now = time.monotonic()
        if now - self._printed >= _LINE_S:
            self._printed = now
            self._line("tokenising", num_records, num_tokens, now)

    def finish(self, num_records: int, num_tokens: int) -> None:
        self._line("tokenised", num_records, num_tokens, time.monotonic())

    def _line(self, verb: str, num_records: int, num_tokens: int, now: float) -> None:
        seconds = max(now - self._began, 1e-3)
        rate = f"{num_records / seconds:,.0f} records/s"
        self._say(
            f"{verb} {self._what}: {counted(num_records, 'record', ',')}, {counted(num_tokens, 'token', ',')}, {rate}"
        )


def build_entry(staging: Path, job: EncodingJob, num_workers: int, stops_at_bad: bool, progress: Progress) -> None:
    """Fills an empty folder with an entry; the same records give the same bytes whatever the number of workers."""
    facts = EntryFacts()
    with ArrayWriter(staging) as writer:
        for number, chunk in enumerate(encoded_chunks(job, num_workers)):
            fault_point("tokenise", 0, number)
            leave_if_stopped(TOKENISING)
            if chunk.bad and stops_at_bad:
                record, why = chunk.bad[0]
                raise DataError(f"{job.files[chunk.file].place(record)}: {why}")
            writer.add(chunk, facts.first_of_file(chunk))
            facts.add(chunk)
            progress.update(facts.num_records, writer.num_tokens)
            tick()
        if writer.num_samples == 0:
            first_bad = "".join(f"; {job.files[file].place(record)}: {why}" for file, record, why in facts.bad[:1])
            raise DataError(
                f"{job.files[0].path} holds no sample ({facts.num_bad} of {counted(facts.num_records, 'record')} "
                f"{'is' if facts.num_bad == 1 else 'are'} bad{first_bad}); give a file that holds samples"
            )
        writer.flush()
    for name in LARGE:
        if (staging / name).exists():
            sync_file(staging / name)  # after a crash, opening the entry notices an array that is not whole
    facts.write(staging, writer.facts(), len(job.files))
    progress.finish(facts.num_records, writer.num_tokens)


_POLL_S = 0.2
_WAITING_LINE_S = 30.0
_BUILDING = ".building-"


@dataclass(frozen=True)
class CacheOptions:
    folder: Path
    reads_all: bool = False
    """Whether every file is hashed at every start."""
    num_workers: int | None = None
    """Number of tokenising processes; None: one per 4 MiB of data, up to the processors of this process."""
    stops_at_bad: bool = True
    say: Callable[[str], None] = lambda line: None


def default_folder() -> Path:
    """Returns the default of `data.cache_dir`: `$XDG_CACHE_HOME/mtrain`, else `~/.cache/mtrain`."""
    return cache_folder("the token cache; set data.cache_dir")


def token_cache(job: EncodingJob, fingerprint: str, options: CacheOptions) -> TokenCache:
    """Opens the tokens of a source; builds the entry unless a usable one exists.

    Args:
        fingerprint: Text that changes with anything besides the files that decides the tokens, or which records are
            bad.
    """
    contents = [content_of(file.path, options.folder / "files", options.reads_all) for file in job.files]
    digests = tuple(content.sha256 for content in contents)
    key = hashlib.sha256(json.dumps([FORMAT, fingerprint, *digests]).encode()).hexdigest()
    entry = options.folder / "entries" / key

    def opened() -> TokenCache | None:
        return _opened(entry, job.files, digests, options)

    if (cache := opened()) is not None:
        return cache
    with disk_faults(f"write the token cache {options.folder} (data.cache_dir)"):
        entry.parent.mkdir(parents=True, exist_ok=True)
        with _locked(entry, options.say) as outcome:
            # another process may have built it while this one waited
            cache = opened()
            if cache is None:
                if outcome is LockOutcome.TAKEN:
                    _clean(entry.parent)
                _build(entry, job, contents, options, lambda: opened() is not None)
                cache = TokenCache(entry, job.files, digests)
    return cache


def _opened(
    entry: Path, files: tuple[RecordFile, ...], digests: tuple[str, ...], options: CacheOptions
) -> TokenCache | None:
    """Opens an entry; None if it does not exist or cannot be used."""
    if not entry.is_dir():
        return None
    try:
        cache = TokenCache(entry, files, digests)
        for file in () if cache.images is None else cache.images.files:
            _check_image(file, options.reads_all)
        return cache
    except DamagedEntryError as fault:
        options.say(f"the token cache {entry} cannot be used ({fault}); it is rebuilt")
        return None


def _check_image(file: ImageFile, reads_all: bool) -> None:
    """Refuses an entry if an image has changed since it was built."""
    try:
        is_known = not reads_all and file.state is not None and state_of(file.path) == file.state
        is_same = is_known or _hashed(file.path) == file.sha256
    except DataError as fault:
        raise DamagedEntryError(str(fault)) from fault
    if not is_same:
        raise DamagedEntryError(f"the image {file.path} was changed")


def _build(
    entry: Path, job: EncodingJob, contents: Sequence[FileContent], options: CacheOptions, is_usable: Callable[[], bool]
) -> None:
    staging = entry.with_name(f"{_BUILDING}{entry.name}-{secrets.token_hex(4)}")
    size = sum(content.state["bytes"] for content in contents)
    progress = Progress(size, contents[0].path, options.say)
    num_workers = options.num_workers
    if num_workers is None:
        num_workers = max(1, min(len(os.sched_getaffinity(0)), size // _BYTES_A_WORKER))
    staging.mkdir()
    try:
        build_entry(staging, job, num_workers, options.stops_at_bad, progress)
        for content in contents:
            content.check_unchanged()  # else the key would belong to other content
        _publish(staging, entry, is_usable)
    finally:
        with suppress(FileNotFoundError):
            remove(staging)


def _publish(staging: Path, entry: Path, is_usable: Callable[[], bool]) -> None:
    """Moves a finished folder into place unless a usable entry exists.

    A usable entry comes from another node on a file system without locks; it stays, since its builder may be opening
    it.
    """
    if entry.exists() and not is_usable():
        replaced = entry.with_name(f"{_BUILDING}{entry.name}-{secrets.token_hex(4)}")
        with suppress(OSError):  # another process was faster
            entry.rename(replaced)
            remove(replaced)
    try:
        staging.rename(entry)
    except OSError:
        if not entry.is_dir():
            raise


_BYTES_A_WORKER = 4 << 20
"""Tokenising this much takes about as long as starting a process."""


@contextmanager
def _locked(entry: Path, say: Callable[[str], None]) -> Iterator[LockOutcome]:
    """Holds the lock of an entry while it is built.

    Without file locks two processes may build it at once, each in its own folder; the first one to finish wins.
    """
    descriptor = os.open(_lock_file(entry), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        began = last_line = time.monotonic()
        while (outcome := try_lock(descriptor, fcntl.LOCK_EX)) is LockOutcome.BUSY:
            now = time.monotonic()
            if now - last_line >= _WAITING_LINE_S:
                say(f"waiting since {now - began:.0f} s for another process that tokenises the same data")
                last_line = now
            leave_if_stopped(TOKENISING)
            time.sleep(_POLL_S)
        yield outcome
    finally:
        os.close(descriptor)  # and with it the lock


def _lock_file(entry: Path) -> Path:
    return entry.with_name(f".lock-{entry.name}")


def _clean(entries: Path) -> None:
    """Removes the folders of killed builders; running builders hold their locks."""
    for left in entries.glob(f"{_BUILDING}*"):
        key = left.name.removeprefix(_BUILDING).partition("-")[0]
        descriptor = os.open(_lock_file(entries / key), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            if try_lock(descriptor, fcntl.LOCK_EX) is LockOutcome.TAKEN:
                with suppress(FileNotFoundError):
                    remove(left)
        finally:
            os.close(descriptor)
