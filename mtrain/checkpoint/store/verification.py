"""Verification of every byte of a checkpoint before any of it is used."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from mtrain.base.background import mapped
from mtrain.base.errors import DataError
from mtrain.base.files import disk_faults
from mtrain.checkpoint.format.hashed_file import read_facts
from mtrain.checkpoint.store.directory import CheckpointEntry
from mtrain.checkpoint.store.manifest import FileInfo


def files_of_reader(files: Mapping[str, FileInfo], reader: int, num_readers: int) -> list[str]:
    """Returns the files that one of several readers verifies; each gets about the same number of bytes.

    The largest file left goes to the reader with the fewest bytes. Every file has exactly one reader.
    """
    loads, by_reader = [0] * num_readers, [list[str]() for _ in range(num_readers)]
    # Sorted by size and then by name: every rank computes the same lists from the manifest, without communication.
    for name, facts in sorted(files.items(), key=lambda item: (-item[1].size_bytes, item[0])):
        least = loads.index(min(loads))
        loads[least] += facts.size_bytes
        by_reader[least].append(name)
    return by_reader[reader]


def verify_files(entry: CheckpointEntry, names: Collection[str], num_threads: int = 1) -> None:
    """Reads files of a checkpoint and compares their digests with the manifest's.

    Args:
        entry: The checkpoint, whose sizes have been compared.
        num_threads: Number of files hashed at the same time; one thread does 1 to 3 GB/s.

    Raises:
        DataError: A file holds other bytes than were saved; names all such files.
        MachineError: A file cannot be read.
    """
    with disk_faults(f"read the checkpoint {entry.path}"):
        # threads suffice: both algorithms release the interpreter's lock while they hash
        saved = entry.manifest.files
        found = mapped(lambda name: read_facts(entry.path / name, saved[name].algorithm), names, num_threads)
    changed = [name for name, facts in zip(names, found, strict=True) if facts != saved[name]]
    if changed:
        shown = saved[changed[0]].algorithm.shown
        raise DataError(f"{_shown(entry, changed)} was saved with other bytes ({shown} differs)")


def _shown(entry: CheckpointEntry, names: Sequence[str]) -> str:
    more = f" (and {len(names) - 1} more files)" if len(names) > 1 else ""
    return f"{entry.path / names[0]}{more}"
