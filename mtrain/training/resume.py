"""Where a run begins: at its newest good checkpoint, at the weights of another run, or at the start."""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

from mtrain.base.errors import DataError
from mtrain.checkpoint.store.directory import CheckpointEntry, Newest, checkpoint_at, newest_good, set_aside
from mtrain.checkpoint.store.history import NO_BAD_STEPS, BadStepHistory
from mtrain.checkpoint.store.manifest import ChangeInfo
from mtrain.checkpoint.store.megatron_checkpoint import megatron_folder
from mtrain.config import Config
from mtrain.data.loader import StepLoader
from mtrain.mcore.distributed.init import on_first_rank
from mtrain.mcore.engine.rank_model import RankModel
from mtrain.mcore.model.build import unwrap
from mtrain.mcore.model.init_weights import draw_weights
from mtrain.mcore.state.base import settle_base
from mtrain.mcore.state.import_hf import load_hf_weights
from mtrain.mcore.state.import_megatron import load_megatron_weights
from mtrain.mcore.state.import_peft import load_peft_adapter
from mtrain.mcore.state.load import load_checkpoint, load_weights
from mtrain.mcore.state.shards import non_finite_state
from mtrain.mcore.state.verified import opened_checkpoint
from mtrain.runs.folder import RunFolder
from mtrain.training.changed import changes_since, resumable


class Resumed(NamedTuple):
    """Where a start goes on."""

    step: int
    """Completed updates."""
    changes: tuple[ChangeInfo, ...] = ()
    """Of the run so far; those of this very step come with this start."""
    history: BadStepHistory = NO_BAD_STEPS


def resume_or_initialize(model: RankModel, folder: RunFolder, loader: StepLoader | None) -> Resumed:
    """Loads the run's newest good checkpoint, else the weights it starts from. Collective over the world.

    A checkpoint that is passed over because of its bytes, or as it holds nan or inf, is set aside, so that its step can
    be saved again.

    Args:
        model: Takes what is loaded.
        folder: The run folder, whose lock the first rank holds.
        loader: Of the training data; None on ranks that do not read any.

    Returns:
        What was found; step 0 where the run begins.

    Raises:
        DataError: No checkpoint is good, it does not fit, or the training data are others without consent; the weights
            to start from are not finite.
        RunFolderError: checkpoint.resume=never, but there is a checkpoint; or a key has changed without consent.
    """
    # a checkpoint of its own goes first: initialize_from says where a run began, not where it is
    if model.config.adapter is not None:  # its checkpoints do not hold the frozen model
        load_base(model)
    resumed = load_newest(model, folder, loader)
    if resumed is None and model.config.adapter is None:
        initialize(model)
    elif resumed is None:
        load_start_adapter(model)
    return resumed or Resumed(0)


def load_base(model: RankModel) -> None:
    """Loads or draws the model that adapters stand beside. Collective over the world.

    Raises:
        DataError: It is missing, damaged, of another model or not finite.
    """
    _load_start(model)
    settle_base(model)


def load_start_adapter(model: RankModel) -> None:
    """Loads the adapter that a run starts from, where it names one. Collective over the world.

    Raises:
        DataError: It is missing, damaged, another one than the run's or not finite.
    """
    adapter = model.config.adapter
    if adapter is None or adapter.path is None:
        return
    source = Path(adapter.path)
    if model.groups.rank == 0:
        say(f"loading {source}")
    load_peft_adapter(source, model)
    _refuse_non_finite(source, model)


def _refuse_non_finite(source: Path, model: RankModel) -> None:
    fault = non_finite_state(model)
    if fault is not None:
        error = DataError(f"{source} cannot be trained from: {fault}; restore it, or start from other weights")
        # `non_finite_state` has gathered the finding, so all ranks raise the same
        error.on_every_rank = True
        raise error


def initialize(model: RankModel) -> None:
    """Loads the weights that a run starts from, or draws them. Collective over the world.

    Raises:
        DataError: They are missing, damaged, of another model or not finite.
    """
    if model.config.adapter is not None:
        load_base(model)
        load_start_adapter(model)
        return
    source = _load_start(model)
    if source is not None:
        _refuse_non_finite(source, model)


def load_newest(
    model: RankModel,
    folder: RunFolder,
    loader: StepLoader | None,
    passed_over: Mapping[int, str] | None = None,
) -> Resumed | None:
    """Goes on from the newest good checkpoint of the run; None where it has none. Collective over the world.

    What is found damaged is set aside.

    Args:
        model: Takes what is loaded.
        folder: The run folder.
        loader: As for `resume_or_initialize`.
        passed_over: Of a run that goes back: step -> why, of checkpoints that are not to be loaded.

    Raises:
        DataError, RunFolderError: As `resume_or_initialize`.
    """
    damaged: dict[int, str] = {}

    def find(unusable: Mapping[int, str]) -> Newest:
        damaged.update(unusable)
        if passed_over is None:
            return resumable(model.config, folder, damaged)
        # checkpoint.resume=never means a start
        return newest_good(folder.checkpoints, {**damaged, **passed_over})

    while True:
        with opened_checkpoint(find, say) as newest:
            entry = announced(newest)
            if entry is None:
                return None
            # the first rank reads data; the comparison is before the load, which takes long
            changes = on_first_rank(functools.partial(_changes, entry, loader, model.config, folder))
            state = load_checkpoint(entry, model)
            fault = non_finite_state(model)
            if fault is None:
                # only now that another one is known to be good: nothing is moved where the start fails
                on_first_rank(lambda: [set_aside(folder.checkpoints, step) for step in damaged])
                return Resumed(state.step, changes, BadStepHistory(entry.manifest.skipped, state.recent))
        damaged[entry.step] = fault  # the next one overwrites all that was loaded


def _load_start(model: RankModel) -> Path | None:
    """Where the weights of a new run were loaded from; None where they were drawn."""
    config, groups = model.config, model.groups
    if config.checkpoint.initialize_from is not None:
        source = Path(config.checkpoint.initialize_from)
        # one rank looks and all take its answer: a shared disk may show ranks different states
        megatron = on_first_rank(lambda: megatron_folder(source))
        if megatron is not None:
            if groups.rank == 0:
                say(f"loading {megatron}, which another program wrote: there are no checksums to verify it by")
            load_megatron_weights(megatron, model)
            return megatron
        with opened_checkpoint(lambda unusable: checkpoint_at(source, unusable), say) as newest:
            start = announced(newest)
            assert start is not None, "checkpoint_at raises where there is none"
            load_weights(start, model)
            return start.path
    if config.model.hf is not None:
        if groups.rank == 0:
            say(f"loading {config.model.hf}")
        load_hf_weights(Path(config.model.hf), model)
        return Path(config.model.hf)
    for chunk in model.chunks:
        draw_weights(unwrap(chunk), config, groups)
    model.optimizer.take_weights()
    return None


def _changes(
    entry: CheckpointEntry, loader: StepLoader | None, config: Config, folder: RunFolder
) -> tuple[ChangeInfo, ...]:
    """Resuming at step k is starting at k only with the same settings on the same samples. On the first rank."""
    assert loader is not None, "the first rank reads data"
    return changes_since(entry, loader, config, folder.path)


def announced(newest: Newest) -> CheckpointEntry | None:
    """Tells the user, on the first rank, of every checkpoint that was passed over, and which one is taken."""
    if dist.get_rank() == 0:
        for warning in newest.warnings:
            print(f"warning: {warning}", file=sys.stderr, flush=True)
        if newest.entry is not None:
            say(f"loading {newest.entry.path}")
    return newest.entry


def say(text: str) -> None:
    """One line for the user."""
    print(text, flush=True)
