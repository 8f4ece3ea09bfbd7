"""Starts a run in its folder, from a checkpoint or other weights; saves and loads for a user's program."""

import contextlib
import functools
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import torch.distributed as dist

from mtrain.base.errors import DataError
from mtrain.checkpoint.state.base import settle_base
from mtrain.checkpoint.state.load import load_checkpoint, load_weights, save_checkpoint
from mtrain.checkpoint.state.start_weights import load_hf_weights, load_megatron_weights, load_peft_adapter
from mtrain.checkpoint.state.verified import opened_checkpoint
from mtrain.checkpoint.store.directory import (
    CheckpointEntry,
    Newest,
    checkpoint_at,
    clean_leftovers,
    newest_good,
    set_aside,
)
from mtrain.checkpoint.store.manifest import NO_BAD_STEPS, BadStepHistory, ChangeInfo
from mtrain.checkpoint.store.megatron_checkpoint import megatron_folder
from mtrain.checkpoint.store.steps import step_name
from mtrain.config import Config
from mtrain.config.load import config_yaml
from mtrain.config.schema.data import SftSection
from mtrain.core.engine.rank_model import RankModel
from mtrain.core.engine.training_state import non_finite_state
from mtrain.core.layers.build import unwrap
from mtrain.core.layers.init_weights import draw_weights
from mtrain.core.ranks.init import on_first_rank
from mtrain.data.encoding.encoder import trained_templates
from mtrain.data.loader import StepLoader
from mtrain.runs.continuation import kept_lines
from mtrain.runs.folder import RunFolder
from mtrain.runs.lock import RunLock
from mtrain.training.changed import changed_inputs, changes_since, going_on, resumable
from mtrain.training.export import clean_staging

_log = logging.getLogger(__name__)


class Progress(NamedTuple):
    """State from which a start or a program continues."""

    step: int
    """Number of completed updates."""
    tokens: int = 0
    """Number of tokens that these updates have read."""
    changes: tuple[ChangeInfo, ...] = ()
    """Changes of the run so far; this start made those of `step`."""
    history: BadStepHistory = NO_BAD_STEPS


def resume_or_initialize(
    model: RankModel, folder: RunFolder, loader: StepLoader | None, inputs: Mapping[str, str] = MappingProxyType({})
) -> Progress:
    """Loads the run's newest good checkpoint, or else the weights it starts from. Collective over the world.

    A checkpoint that is damaged, or holds nan or inf, is set aside, so that its step can be saved again.

    Args:
        folder: Run folder, whose lock the first rank holds.

    Raises:
        DataError: All checkpoints are damaged, the newest good one does not fit, the training data have changed without
            consent, or the weights to start from are not finite.
        RunFolderError: checkpoint.resume=never, but the run has a checkpoint; or a key has changed without consent.
    """
    if model.config.adapter is not None:  # checkpoints of adapters do not contain the frozen model
        load_base(model)
    resumed = load_newest(model, folder, loader, inputs)
    if resumed is None and model.config.adapter is None:
        initialize(model)
    elif resumed is None:
        load_start_adapter(model)
    return resumed or Progress(0)


def load_base(model: RankModel) -> None:
    """Loads or draws the frozen model under the adapters. Collective over the world."""
    _load_start(model)
    settle_base(model)


def load_start_adapter(model: RankModel) -> None:
    """Loads the adapter that a run starts from, if it names one. Collective over the world."""
    adapter = model.config.adapter
    if adapter is None or adapter.path is None:
        return
    source = Path(adapter.path)
    if model.groups.rank == 0:
        _log.info(f"loading {source}")
    load_peft_adapter(source, model)
    _refuse_non_finite(source, model)


def _refuse_non_finite(source: Path, model: RankModel, remedy: str = "restore it, or start from other weights") -> None:
    fault = non_finite_state(model)
    if fault is not None:
        error = DataError(f"{source} cannot be trained from: {fault}; {remedy}")
        error.on_every_rank = True  # `non_finite_state` returns the same on all ranks
        raise error


def initialize(model: RankModel) -> None:
    """Loads the weights that a run starts from, or draws them. Collective over the world."""
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
) -> Progress | None:
    """Loads the newest good checkpoint of the run, and sets damaged ones aside; returns None if the run has none.

    Collective over the world. `passed_over` maps the checkpoints that a rollback must not load to reasons; None at a
    start.
    """
    damaged: dict[int, str] = {}

    def find(unusable: Mapping[int, str]) -> Newest:
        damaged.update(unusable)
        if passed_over is None:
            return resumable(model.config.checkpoint, folder, damaged)
        # checkpoint.resume=never concerns starts, not rollbacks
        return newest_good(folder.checkpoints, {**damaged, **passed_over})

    def find_changes(entry: CheckpointEntry) -> tuple[ChangeInfo, ...]:
        assert loader is not None, "the first rank reads data"
        return changes_since(entry, loader, model.config, folder.path, inputs)

    while True:
        with opened_checkpoint(find, _log.info) as newest:
            entry = _announced(newest)
            if entry is None:
                return None
            # before the load, which takes longer
            changes = on_first_rank(functools.partial(find_changes, entry))
            state = load_checkpoint(entry, model)
            fault = non_finite_state(model)
            if fault is None:
                # only now, so that a failed start moves nothing
                on_first_rank(lambda: [set_aside(folder.checkpoints, step) for step in damaged])
                history = BadStepHistory(entry.manifest.skipped, state.recent)
                return Progress(state.step, entry.manifest.tokens, changes, history)
        damaged[entry.step] = fault  # the next checkpoint overwrites everything that was loaded


def _load_start(model: RankModel) -> Path | None:
    """Loads or draws the weights of a new run; returns the path that they were loaded from, None if they were drawn."""
    config, groups = model.config, model.groups
    if config.checkpoint.initialize_from is not None:
        source = Path(config.checkpoint.initialize_from)
        # ranks may see different states of a shared disk
        megatron = on_first_rank(lambda: megatron_folder(source))
        if megatron is not None:
            if groups.rank == 0:
                _log.info(f"loading {megatron}, which another program wrote without checksums to verify")
            load_megatron_weights(megatron, model)
            return megatron
        with opened(source) as start:
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


@contextlib.contextmanager
def opened(path: Path) -> Iterator[CheckpointEntry]:
    """Yields the checkpoint at a path, or the newest good one of a run, verified. Collective over the world."""
    with opened_checkpoint(lambda unusable: checkpoint_at(path, unusable), _log.info) as newest:
        entry = _announced(newest)
        assert entry is not None, "checkpoint_at raises if it finds none"
        yield entry


def _announced(newest: Newest) -> CheckpointEntry | None:
    """Logs, on the first rank, which checkpoints were skipped and which one is loaded; returns the latter."""
    if dist.get_rank() == 0:
        for warning in newest.warnings:
            _log.warning(f"warning: {warning}")
        if newest.entry is not None:
            _log.info(f"loading {newest.entry.path}")
    return newest.entry


def claim(folder: RunFolder, config: Config, resources: contextlib.ExitStack) -> tuple[RunLock, Config]:
    """Locks a run folder until `resources` closes; writes the resolved configuration and chat templates. On rank 0."""
    folder.create()
    lock = resources.enter_context(folder.locked())
    # under the lock: an unfinished checkpoint belongs to a dead run
    clean_leftovers(folder.checkpoints)
    clean_staging(folder, config.checkpoint.export_hf_every_steps)
    folder.probe()  # after cleaning up, which may have made room
    requested, config = config, going_on(folder, config)
    for line in kept_lines(requested, config):
        _log.info(line)
    folder.write_config(config_yaml(config))
    # now, since the template's file may have changed or gone when the run is exported
    folder.write_chat_templates(trained_templates(config.data) if isinstance(config.data, SftSection) else {})
    return lock, config


def save_at(folder: RunFolder, at: Progress, model: RankModel, inputs: Mapping[str, str]) -> Path:
    """Saves a checkpoint, and returns its path when it is published. Collective over the world."""
    with contextlib.ExitStack() as resources:

        def begin() -> None:
            # locked during the save only, since a program may save into several folders
            claim(folder, model.config, resources)
            try:
                newest = newest_good(folder.checkpoints).entry
            except DataError:  # all of them are damaged, which must not prevent this save
                return
            if newest is not None:
                changed_inputs(newest, inputs, model.config.checkpoint.allow_changed)

        on_first_rank(begin)
        save_checkpoint(folder.checkpoints, model, at.step, at.tokens, inputs)
    return folder.checkpoints / step_name(at.step)


def load_from(path: Path, model: RankModel, inputs: Mapping[str, str]) -> Progress:
    """Loads weights and optimizer of a checkpoint, or of the newest good one of a run. Collective over the world."""
    with opened(path) as entry:
        on_first_rank(lambda: changed_inputs(entry, inputs, model.config.checkpoint.allow_changed))
        state = load_checkpoint(entry, model)
        progress = Progress(state.step, entry.manifest.tokens)
    _refuse_non_finite(path, model, "load another checkpoint")
    return progress
