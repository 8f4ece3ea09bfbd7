"""Self-test of checkpoints (`checkpoint.self_test`): saves and loads before the first step, and reports the cost."""

import logging
import resource
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mtrain.base.errors import DataError
from mtrain.checkpoint.state.load import load_checkpoint
from mtrain.checkpoint.state.save import Saver
from mtrain.checkpoint.state.verified import opened_checkpoint
from mtrain.checkpoint.store.directory import checkpoint_at, clean_leftovers
from mtrain.checkpoint.store.retention import Keep, Retention
from mtrain.checkpoint.store.steps import step_name
from mtrain.core.engine.training_state import local_shards
from mtrain.core.ranks.init import on_all_ranks, on_first_rank
from mtrain.core.state.shard import Shard
from mtrain.training.build import Run

_log = logging.getLogger(__name__)


def run_self_test(run: Run, checkpoints: Path) -> None:
    """Saves the state, wipes it, loads it and compares every bit; leaves run and folder unchanged. Collective over the
    world."""
    # the name marks it as unfinished: if the run dies here, the next start deletes it
    root, step = checkpoints / ".tmp-self-test", run.start_step
    on_first_rank(lambda: clean_leftovers(checkpoints))
    memory, began = _peak_memory_bytes(run), time.monotonic()
    before = [part._replace(data=part.data.detach().cpu().clone()) for part in local_shards(run.model)]
    saver = Saver(run.model, Retention(root, Keep.of(run.model.config.checkpoint)))
    saver.save(step)
    waited = time.monotonic() - began
    saver.finish()
    saved = time.monotonic()
    _wipe(run)
    with opened_checkpoint(lambda _: checkpoint_at(root / step_name(step)), _log.info) as newest:
        assert newest.entry is not None, "checkpoint_at raises where there is none"
        load_checkpoint(newest.entry, run.model)
        loaded = time.monotonic()
        # a difference on one rank must end all of them, or the others would wait in the next collective
        on_all_ranks(lambda: _compare(before, local_shards(run.model)))
        size = sum(facts.size_bytes for facts in newest.entry.manifest.files.values())
    on_first_rank(lambda: clean_leftovers(checkpoints))
    peak = _peak_memory_bytes(run)
    if run.model.groups.rank == 0:
        _log.info(
            f"self-test: {size / 1e9:.3g} GB saved in {saved - began:.1f} s (training waited {waited:.2f} s), verified "
            f"and loaded in {loaded - saved:.1f} s, every bit the same on all ranks; peak memory of a rank on the host "
            f"{peak[0] / 1e9:.3g} GB ({memory[0] / 1e9:.3g} before), on the GPU {peak[1] / 1e9:.3g} GB "
            f"({memory[1] / 1e9:.3g} before)"
        )


@torch.no_grad()
def _wipe(run: Run) -> None:
    """Overwrites weights and optimizer state, and advances the random generator; only a load can restore them."""
    for part in local_shards(run.model):
        part.data.zero_()
    torch.rand(1)


def _compare(before: Sequence[Shard], after: Sequence[Shard]) -> None:
    assert [shard[:3] for shard in before] == [shard[:3] for shard in after]
    for one, other in zip(before, after):
        # as bytes: nan is not equal to itself
        saved, loaded = one.data.contiguous().flatten(), other.data.detach().cpu().contiguous().flatten()
        if not torch.equal(saved.view(torch.uint8), loaded.view(torch.uint8)):
            raise DataError(
                f"the self-test loaded other values of {one.key} at {list(one.at.offset)} than it saved; check the "
                "disk and the memory of this machine"
            )


def _peak_memory_bytes(run: Run) -> Any:
    """Returns the peak memory so far in bytes, (host, GPU), of the rank with the most of each. One all-reduce."""
    device = run.model.groups.device
    on_gpu = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    peaks = torch.tensor([1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, on_gpu], device=device)
    dist.all_reduce(peaks, dist.ReduceOp.MAX)
    return peaks.tolist()
