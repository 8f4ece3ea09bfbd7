"""Opens a checkpoint and verifies every byte of it."""

import contextlib
import functools
import os
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch.distributed as dist

from mtrain.base.errors import DataError, MachineError
from mtrain.base.plain_files import read_plain_file
from mtrain.base.spelling import counted
from mtrain.checkpoint.store.directory import CheckpointEntry, Newest, files_of_reader, reading, verify_files
from mtrain.checkpoint.store.manifest import MANIFEST_NAME, MOST_BYTES, parsed_manifest
from mtrain.core.ranks.init import on_all_ranks, on_first_rank

_MOST_THREADS = 4

Find = Callable[[Mapping[int, str]], Newest]
"""Maps the steps known to be unusable, each with its reason, to the newest other checkpoint."""


@contextlib.contextmanager
def opened_checkpoint(find: Find, tell: Callable[[str], None]) -> Iterator[Newest]:
    """Yields the newest checkpoint that passes; nothing deletes it inside the block. Collective over the world.

    The ranks divide the files and read each once, in about size / (ranks x 1 to 4 GB/s) seconds; loading then finds
    them in the page cache if memory suffices. A checkpoint with a changed byte is skipped for an older one. The first
    rank calls `find`, and `tell` with each line for the user.
    """
    unusable: dict[int, str] = {}
    while True:
        newest = on_first_rank(lambda: find(unusable))  # ranks may see a shared folder in different states
        if newest.entry is not None:
            on_all_ranks(functools.partial(_refuse_another, newest.entry))
        with contextlib.ExitStack() as stack:
            # the same on all ranks, so all of them leave the loop or none
            fault = None if newest.entry is None else _fault(newest.entry, stack, tell)
            if fault is None:
                yield newest
                return
        assert newest.entry is not None
        unusable[newest.entry.step] = fault


def _refuse_another(entry: CheckpointEntry) -> None:
    """Refuses a path at which this rank sees another checkpoint than rank 0, as on nodes without a shared disk."""
    try:
        local_manifest = parsed_manifest(read_plain_file(entry.path / MANIFEST_NAME, MOST_BYTES))
    except (OSError, ValueError):
        return  # verification reports a missing or damaged manifest
    if local_manifest != entry.manifest:
        raise DataError(
            f"{entry.path} is another checkpoint for rank {dist.get_rank()} on {platform.node()} than for rank 0; give "
            "every node the same files"
        )


def num_threads_of(machines: Sequence[str], rank: int, num_cores: int) -> int:
    """Returns how many threads a rank may use on a machine that it shares with other ranks; more than
    `_MOST_THREADS` gain no speed."""
    return max(1, min(_MOST_THREADS, num_cores // machines.count(machines[rank])))


def _fault(entry: CheckpointEntry, stack: contextlib.ExitStack, tell: Callable[[str], None]) -> str | None:
    """Returns why the checkpoint cannot be used, the same on all ranks, or None. Two all-gathers of a text."""
    began, fault = time.monotonic(), None
    rank, world_size = dist.get_rank(), dist.get_world_size()
    files = entry.manifest.files
    machines = [""] * world_size
    dist.all_gather_object(machines, platform.node())
    try:
        if rank == 0:
            stack.enter_context(reading(entry))
        names = files_of_reader(files, rank, world_size)
        verify_files(entry, names, num_threads_of(machines, rank, os.cpu_count() or 1))
    except (DataError, MachineError) as error:
        fault = str(error)
    faults: list[str | None] = [None] * world_size
    dist.all_gather_object(faults, fault)
    first = next((text for text in faults if text is not None), None)  # the lowest rank's
    if first is None and rank == 0:
        size = sum(facts.size_bytes for facts in files.values())
        seconds = time.monotonic() - began
        old = "" if entry.manifest.is_sealed else "; its manifest, of version 0.1.0, has no checksum of itself"
        tell(f"verified {entry.path}: {counted(len(files), 'file')}, {size / 1e9:.3g} GB in {seconds:.1f} s{old}")
    return first
