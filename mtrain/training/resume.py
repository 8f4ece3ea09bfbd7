"""Start of a run: from its newest good checkpoint, from given weights, or from drawn ones."""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import torch.distributed as dist

from mtrain.base.errors import DataError
from mtrain.checkpoint.state.base import settle_base
from mtrain.checkpoint.state.load import load_checkpoint, load_weights
from mtrain.checkpoint.state.start_weights import load_hf_weights, load_megatron_weights, load_peft_adapter
from mtrain.checkpoint.state.verified import opened_checkpoint
from mtrain.checkpoint.store.directory import CheckpointEntry, Newest, checkpoint_at, newest_good, set_aside
from mtrain.checkpoint.store.manifest import NO_BAD_STEPS, BadStepHistory, ChangeInfo
from mtrain.checkpoint.store.megatron_checkpoint import megatron_folder
from mtrain.config import Config
from mtrain.core.engine.rank_model import RankModel
from mtrain.core.engine.training_state import non_finite_state
from mtrain.core.layers.build import unwrap
from mtrain.core.layers.init_weights import draw_weights
from mtrain.core.ranks.init import on_first_rank
from mtrain.data.loader import StepLoader
from mtrain.runs.folder import RunFolder
from mtrain.training.changed import changes_since, resumable

_log = logging.getLogger(__name__)


class Resumed(NamedTuple):
    """State from which a start continues."""

    step: int
    """Number of completed updates."""
    changes: tuple[ChangeInfo, ...] = ()
    """Changes of the run so far; those of `step` were made by this start."""
    history: BadStepHistory = NO_BAD_STEPS


def resume_or_initialize(
    model: RankModel, folder: RunFolder, loader: StepLoader | None, inputs: Mapping[str, str] = MappingProxyType({})
) -> Resumed:
    """Loads the run's newest good checkpoint, or else the weights it starts from. Collective over the world.

    A checkpoint that is damaged, or holds nan or inf, is set aside, so that its step can be saved again.

    Args:
        folder: Run folder, whose lock the first rank holds.

    Returns:
        State of the checkpoint; step 0 if the run begins.

    Raises:
        DataError: No checkpoint is good, it does not fit, or the training data have changed without consent; the
            weights to start from are not finite.
        RunFolderError: checkpoint.resume=never, but there is a checkpoint; or a key has changed without consent.
    """
    if model.config.adapter is not None:  # checkpoints of adapters do not hold the frozen model
        load_base(model)
    resumed = load_newest(model, folder, loader, inputs)
    if resumed is None and model.config.adapter is None:
        initialize(model)
    elif resumed is None:
        load_start_adapter(model)
    return resumed or Resumed(0)


def load_base(model: RankModel) -> None:
    """Loads or draws the frozen model under the adapters. Collective over the world.

    Raises:
        DataError: The weights are missing, damaged, of another model or not finite.
    """
    _load_start(model)
    settle_base(model)


def load_start_adapter(model: RankModel) -> None:
    """Loads the adapter that a run starts from, if it names one. Collective over the world.

    Raises:
        DataError: The adapter is missing, damaged, not finite, or differs from that of the configuration.
    """
    adapter = model.config.adapter
    if adapter is None or adapter.path is None:
        return
    source = Path(adapter.path)
    if model.groups.rank == 0:
        _log.info(f"loading {source}")
    load_peft_adapter(source, model)
    _refuse_non_finite(source, model)


def _refuse_non_finite(source: Path, model: RankModel) -> None:
    fault = non_finite_state(model)
    if fault is not None:
        error = DataError(f"{source} cannot be trained from: {fault}; restore it, or start from other weights")
        error.on_every_rank = True  # `non_finite_state` has gathered the result
        raise error


def initialize(model: RankModel) -> None:
    """Loads the weights that a run starts from, or draws them. Collective over the world.

    Raises:
        DataError: The weights are missing, damaged, of another model or not finite.
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
    inputs: Mapping[str, str],
    passed_over: Mapping[int, str] | None = None,
) -> Resumed | None:
    """Loads the newest good checkpoint of the run; returns None if it has none. Collective over the world.

    Damaged checkpoints are set aside.

    Args:
        passed_over: Reason by step, for checkpoints that a rollback must not load; None at a start.

    Raises:
        DataError, RunFolderError: See `resume_or_initialize`.
    """
    damaged: dict[int, str] = {}

    def find(unusable: Mapping[int, str]) -> Newest:
        damaged.update(unusable)
        if passed_over is None:
            return resumable(model.config.checkpoint, folder, damaged)
        # checkpoint.resume=never concerns starts, not rollbacks
        return newest_good(folder.checkpoints, {**damaged, **passed_over})

    while True:
        with opened_checkpoint(find, _log.info) as newest:
            entry = announced(newest)
            if entry is None:
                return None
            # before the load, which takes long
            changes = on_first_rank(functools.partial(_changes, entry, loader, model.config, folder, inputs))
            state = load_checkpoint(entry, model)
            fault = non_finite_state(model)
            if fault is None:
                # only now: a start that fails moves nothing
                on_first_rank(lambda: [set_aside(folder.checkpoints, step) for step in damaged])
                return Resumed(state.step, changes, BadStepHistory(entry.manifest.skipped, state.recent))
        damaged[entry.step] = fault  # the next checkpoint overwrites everything that was loaded


def _load_start(model: RankModel) -> Path | None:
    """Loads or draws the weights of a new run; returns where they were loaded from, None if they were drawn."""
    config, groups = model.config, model.groups
    if config.checkpoint.initialize_from is not None:
        source = Path(config.checkpoint.initialize_from)
        # a shared disk may show ranks different states
        megatron = on_first_rank(lambda: megatron_folder(source))
        if megatron is not None:
            if groups.rank == 0:
                _log.info(f"loading {megatron}, which another program wrote: there are no checksums to verify it by")
            load_megatron_weights(megatron, model)
            return megatron
        with opened_checkpoint(lambda unusable: checkpoint_at(source, unusable), _log.info) as newest:
            start = announced(newest)
            assert start is not None, "checkpoint_at raises where there is none"
            load_weights(start, model)
            return start.path
    if config.model.hf is not None:
        if groups.rank == 0:
            _log.info(f"loading {config.model.hf}")
        load_hf_weights(Path(config.model.hf), model)
        return Path(config.model.hf)
    for chunk in model.chunks:
        draw_weights(unwrap(chunk), config, groups)
    model.optimizer.take_weights()
    return None


def _changes(
    entry: CheckpointEntry,
    loader: StepLoader | None,
    config: Config,
    folder: RunFolder,
    inputs: Mapping[str, str],
) -> tuple[ChangeInfo, ...]:
    assert loader is not None, "the first rank reads data"
    return changes_since(entry, loader, config, folder.path, inputs)


def announced(newest: Newest) -> CheckpointEntry | None:
    """Reports on the first rank which checkpoints were skipped and which one is loaded; returns the latter."""
    if dist.get_rank() == 0:
        for warning in newest.warnings:
            _log.warning(f"warning: {warning}")
        if newest.entry is not None:
            _log.info(f"loading {newest.entry.path}")
    return newest.entry
