"""Scores of the reference model: computed once, before the first step, and kept in the run folder.

The reference is the model that the run begins from, with adapters the frozen model without them; or the one that
loss.reference names. A start that goes on does not need it any more: it reads the scores, and trains on them bit for
bit as before. Those of a named one are kept a second time beside the token cache, under what decides them, its weights
among it, so that another run need not compute them again.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mtrain.base.errors import DataError
from mtrain.base.files import disk_faults, replacing
from mtrain.config import Config
from mtrain.config.schema.data import SftSection
from mtrain.data.batch import Microbatch
from mtrain.data.cache.opening import default_folder
from mtrain.data.loader import HeldOutBatches, RowsOfRank, StepLoader
from mtrain.data.sources import HeldOut
from mtrain.hf.schema.files import CONFIG_NAME
from mtrain.loss.preference.scores import PreferenceLoss, preference_marks
from mtrain.mcore.distributed.groups import Groups
from mtrain.mcore.distributed.init import on_all_ranks, on_first_rank
from mtrain.mcore.engine.rank_model import RankModel
from mtrain.mcore.model.adapters.adapter import adapters_off
from mtrain.mcore.state.base import weights_fingerprint
from mtrain.runs.folder import RunFolder
from mtrain.training.forward import num_microbatches
from mtrain.training.preferences.scoring_pass import sequence_scores
from mtrain.training.resume import initialize, say

_FORMAT = 1
"""Counts the changes of this module that make other scores of the same sequences."""


class _Source(NamedTuple):
    """What the first rank knows of a source, for ranks that read no data."""

    fingerprint: str
    num_sequences: int
    num_passes: int


def use_references(
    model: RankModel,
    folder: RunFolder,
    loss: PreferenceLoss | None,
    loader: StepLoader | None,
) -> None:
    """Gives every sequence of the data its score under the reference model. Collective over the world.

    What is not in the run folder yet is computed from the weights that a run begins from, which are loaded for it.

    Args:
        model: Before anything is loaded into it.
        folder: Gets the scores.
        loss: What is minimised; nothing is done where it is None or needs no reference.
        loader: Of the data; None on ranks that do not read any.

    Raises:
        DataError: Kept scores are damaged, or the weights to start from cannot be loaded.
        MachineError: The disk refuses.
    """
    config, groups = model.config, model.groups
    marks = None if loss is None else preference_marks(loss)
    if marks is None or not marks.needs_reference:
        return
    sources = on_first_rank(lambda: _sources(loader))
    paths = [_path(folder, source, config) for source in sources]
    missing = on_first_rank(lambda: [number for number, path in enumerate(paths) if not path.exists()])
    if missing:
        _load_reference(model)
        # one all-reduce; only where others may have scored under the same weights
        weights = (
            None
            if config.loss.reference is None
            else weights_fingerprint(model.chunks, groups, config.model.vocab_size)
        )
        with nullcontext() if config.adapter is None else adapters_off(model.chunks):
            for number in missing:
                shared = None if weights is None else _shared_path(sources[number], config, weights)
                if shared is not None and on_first_rank(partial(_copied, shared, paths[number])):
                    continue
                _score(model, loader, sources[number], (paths[number], shared))
    on_all_ranks(lambda: _read(loader, sources, paths))


def _sources(loader: StepLoader | None) -> list[_Source]:
    assert loader is not None, "the first rank reads data"
    size = loader.num_slots
    return [
        _Source(fingerprint, len(source), -(-len(source) // size)) for fingerprint, source in loader.preferences.items()
    ]


def _path(folder: RunFolder, source: _Source, config: Config) -> Path:
    """Named by all that decides the scores: sequences, what makes a score of one, the model and where it begins."""
    # without labels as before there were any: what has a head compares with no model
    model = config.model.model_dump_json(exclude={"num_labels"})
    start = [model, config.checkpoint.initialize_from, config.train.seed]
    start += [] if config.loss.reference is None else [config.loss.reference]
    decisive = json.dumps([_FORMAT, source.fingerprint, config.loss.aggregation, *start])
    return folder.references / f"{hashlib.sha256(decisive.encode()).hexdigest()[:32]}.npy"


def _shared_path(source: _Source, config: Config, weights: str) -> Path:
    """Beside the token cache, named by all that decides the scores but the names of files.

    Args:
        source: The sequences.
        config: Of the run.
        weights: Fingerprint of the reference model's.
    """
    assert isinstance(config.data, SftSection), "a rule of the configuration"
    folder = default_folder() if config.data.cache_dir is None else Path(config.data.cache_dir)
    model = config.model.model_dump_json(exclude={"hf", "num_labels"})
    decisive = json.dumps(
        [_FORMAT, source.fingerprint, config.loss.aggregation, model, config.train.precision, weights]
    )
    return folder / "references" / f"{hashlib.sha256(decisive.encode()).hexdigest()[:32]}.npy"


def _copied(shared: Path, path: Path) -> bool:
    """Whether another run's scores were there and whole, and are the run's own now."""
    try:
        content = shared.read_bytes()
    except OSError:
        return False
    if hashlib.sha256(content[32:]).digest() != content[:32]:
        say(f"{shared} holds other scores than were written; they are computed again")
        return False
    say(f"taking scores of the reference model from {shared}")
    _write(path, content)
    return True


def _load_reference(model: RankModel) -> None:
    """Fills the model with the reference's weights; the run's own are loaded afterwards."""
    config = model.config
    if config.loss.reference is None:
        initialize(model)
        return
    named = Path(config.loss.reference)
    is_hf = on_first_rank(lambda: (named / CONFIG_NAME).is_file())
    section = config.model.model_copy(update={"hf": str(named) if is_hf else None})
    start = config.checkpoint.model_copy(update={"initialize_from": None if is_hf else str(named)})
    try:
        # without adapters: they are not the reference's, and keep what they begin with
        changes = {"model": section, "checkpoint": start, "adapter": None}
        initialize(replace(model, config=config.model_copy(update=changes)))
    except DataError as error:
        error.args = (f"loss.reference={named}: {error}", *error.args[1:])
        raise


def _score(model: RankModel, loader: StepLoader | None, source: _Source, paths: Sequence[Path | None]) -> None:
    """Scores all sequences of a source, in passes of as many as a step has, and writes them to these files."""
    config, groups = model.config, model.groups
    if groups.rank == 0:
        say(f"scoring {source.num_sequences:,} sequences under the reference model, once for the run")
    found = np.full(source.num_sequences, np.nan)
    count, size = num_microbatches(config, groups), config.sequences_per_step
    for number, own in enumerate(_passes(config, groups, loader, source)):
        scored = sequence_scores(model, own, count)
        found[np.array(scored.slots, np.int64) + number * size] = scored.scores.numpy()
    on_first_rank(lambda: _write_all(paths, _content(found)))


def _passes(
    config: Config, groups: Groups, loader: StepLoader | None, source: _Source
) -> Iterator[list[Microbatch] | None]:
    if loader is None:
        yield from [None] * source.num_passes
        return
    rows = RowsOfRank(config, groups.dp_rank, groups.layout.dp)
    yield from HeldOutBatches(rows, HeldOut([loader.preferences[source.fingerprint]], None)).batches()


def _content(found: NDArray[np.float64]) -> bytes:
    content = io.BytesIO()
    np.save(content, found)
    # the digest goes in front, so that a flipped bit is noticed
    return hashlib.sha256(content.getvalue()).digest() + content.getvalue()


def _write_all(paths: Sequence[Path | None], content: bytes) -> None:
    for path in paths:
        if path is not None:
            _write(path, content)


def _write(path: Path, content: bytes) -> None:
    with disk_faults(f"write {path}"):
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as new:
            new.write_bytes(content)


def _read(loader: StepLoader | None, sources: Sequence[_Source], paths: Sequence[Path]) -> None:
    """Hands the scores to the data that this rank reads."""
    if loader is None:
        return
    digests = []
    for source, path in zip(sources, paths):
        try:
            content = path.read_bytes()
        except OSError as fault:
            raise DataError(
                f"{path} cannot be read: {fault.strerror or fault}; all ranks need the run folder"
            ) from fault
        digest, array = content[:32], content[32:]
        if hashlib.sha256(array).digest() != digest:
            raise DataError(
                f"{path} holds other scores of the reference model than were written; remove it, and it is made again "
                "from the weights that the run began from"
            )
        loader.preferences[source.fingerprint].references = np.load(io.BytesIO(array), allow_pickle=False)
        digests.append(digest.hex()[:16])
    loader.name_references(digests)
