"""Scores of the reference model: computed once, before the first step, and kept in the run folder.

The reference is the model that the run begins from, with the adapter that it names; or the one that loss.reference
names. A start that goes on does not need it any more: it reads the scores, and trains on them bit for bit as before,
whatever has become of the weights. Those of a named one are kept a second time beside the token cache, under what
decides them, its weights among it, so that another run need not compute them again.
"""

from __future__ import annotations

import gc
import hashlib
import io
import json
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from mtrain.base.errors import DataError
from mtrain.base.files import disk_faults, replacing
from mtrain.checkpoint.store.steps import published_steps
from mtrain.config import Config
from mtrain.config.schema.data import SftSection
from mtrain.data.batch import Microbatch
from mtrain.data.cache.opening import default_folder
from mtrain.data.loader import HeldOutBatches, RowsOfRank, StepLoader
from mtrain.data.sources import HeldOut
from mtrain.loss.preference.scores import PreferenceLoss, preference_marks
from mtrain.mcore.distributed.groups import Groups
from mtrain.mcore.distributed.init import on_all_ranks, on_first_rank
from mtrain.mcore.engine.rank_model import RankModel
from mtrain.runs.folder import RunFolder
from mtrain.training.forward import num_microbatches
from mtrain.training.preferences.reference_model import Reference, built_apart
from mtrain.training.preferences.scoring_pass import sequence_scores
from mtrain.training.resume import say

_FORMAT = 1
"""Counts the changes of this module that make other scores of the same sequences."""


class _Source(NamedTuple):
    """What the first rank knows of a source, for ranks that read no data."""

    fingerprint: str
    num_sequences: int
    num_passes: int


class _Kept(NamedTuple):
    """What the first rank finds in the run folder."""

    goes_on: bool
    """There is a checkpoint, so that the scores that are there are those that the run began with."""
    paths: tuple[Path | None, ...]
    """Of each source's scores; None where they are still to be computed."""


class References:
    """The scores that a run needs before its first step."""

    def __init__(
        self, config: Config, folder: RunFolder, groups: Groups, loss: PreferenceLoss | None, loader: StepLoader | None
    ) -> None:
        """Looks for what is in the run folder already. Collective over the world.

        Args:
            config: Of the run.
            folder: Gets the scores.
            groups: The process groups.
            loss: What is minimised; nothing is needed where it is None or has no reference.
            loader: Of the data; None on ranks that do not read any.

        Raises:
            ConfigError: A named reference and the run's layout do not go together.
            DataError: A named reference is missing or damaged.
        """
        self._config, self._folder, self._groups, self._loader = config, folder, groups, loader
        marks = None if loss is None else preference_marks(loss)
        self._is_needed = marks is not None and marks.needs_reference
        self._reference: Reference | None = None
        if self._is_needed:
            self._sources = on_first_rank(lambda: _sources(loader))
            self._kept = on_first_rank(lambda: _kept(folder, self._sources, config))
            # a run that begins looks at the weights, too: scores of before its first checkpoint may be of others
            if not self._kept.goes_on or None in self._kept.paths:
                self._reference = Reference.of(config)

    def score_apart(self) -> None:
        """Computes what is missing by a model of its own, where the run's cannot hold the reference. Collective.

        To be called before the run's own model takes its memory.

        Raises:
            DataError: Weights of the reference cannot be loaded.
            MachineError: The disk refuses.
        """
        if self._reference is not None and not self._reference.fits(self._config):
            self._score_with(self._reference, built_apart(self._reference.config, self._groups))
            self._reference = None
            # hooks and buffers of DistributedDataParallel refer to each other; the run's own model needs the room now
            gc.collect()
            if self._groups.device.type == "cuda":
                torch.cuda.empty_cache()

    def use(self, model: RankModel) -> None:
        """Gives every sequence of the data its score. Collective over the world.

        What is missing is computed from the reference's weights, which are loaded into the model for it.

        Args:
            model: The run's, before anything is loaded into it.

        Raises:
            DataError: Kept scores are damaged, or the weights of the reference cannot be loaded.
            MachineError: The disk refuses.
        """
        if not self._is_needed:
            return
        if self._reference is not None:
            self._score_with(self._reference, model)
        paths = [path for path in self._kept.paths if path is not None]
        on_all_ranks(lambda: _read(self._loader, self._sources, paths))

    def _score_with(self, reference: Reference, model: RankModel) -> None:
        config = self._config
        with reference.loaded(model) as (identity, scoring):
            self._kept = on_first_rank(lambda: _of_identity(self._kept, self._folder, self._sources, config, identity))
            paths = list(self._kept.paths)
            for number, source in enumerate(self._sources):
                if paths[number] is not None:
                    continue
                paths[number] = path = _path(self._folder, source, config, identity)
                shared = None if config.loss.reference is None else _shared_path(source, config, identity)
                if shared is None or not on_first_rank(partial(_copied, shared, path)):
                    self._score(scoring, source, (path, shared))
            on_first_rank(lambda: _remove_others(self._folder, paths))
            self._kept = self._kept._replace(paths=tuple(paths))

    def _score(self, model: RankModel, source: _Source, paths: Sequence[Path | None]) -> None:
        """Scores all sequences of a source, in passes of as many as a step has, and writes them to these files.

        Args:
            model: Holds the reference.
            source: The sequences.
            paths: Of the files.
        """
        config, groups = model.config, model.groups
        if groups.rank == 0:
            say(f"scoring {source.num_sequences:,} sequences under the reference model, once for the run")
        found = np.full(source.num_sequences, np.nan)
        count, size = num_microbatches(config, groups), config.sequences_per_step
        for number, own in enumerate(_passes(config, groups, self._loader, source)):
            scored = sequence_scores(model, own, count)
            found[np.array(scored.slots, np.int64) + number * size] = scored.scores.numpy()
        on_first_rank(lambda: _write_all(paths, _content(found)))


def _sources(loader: StepLoader | None) -> list[_Source]:
    assert loader is not None, "the first rank reads data"
    size = loader.num_slots
    return [
        _Source(fingerprint, len(source), -(-len(source) // size)) for fingerprint, source in loader.preferences.items()
    ]


def _kept(folder: RunFolder, sources: Sequence[_Source], config: Config) -> _Kept:
    """On the first rank. What a run of an earlier version kept counts where it goes on, since it has trained on it."""
    if not published_steps(folder.checkpoints):
        return _Kept(False, (None,) * len(sources))
    return _Kept(True, tuple(_kept_path(folder, source, config) for source in sources))


def _kept_path(folder: RunFolder, source: _Source, config: Config) -> Path | None:
    there = sorted(folder.references.glob(f"{_stem(source, config)}-*.npy"))
    earlier = folder.references / f"{_earlier_stem(source, config)}.npy"
    return next((path for path in (*there, earlier) if path.exists()), None)


def _of_identity(kept: _Kept, folder: RunFolder, sources: Sequence[_Source], config: Config, identity: str) -> _Kept:
    """What is there of a model's scores, now that it is known.

    Raises:
        DataError: The run goes on with scores of another model.
    """
    if not kept.goes_on:
        paths = (_path(folder, source, config, identity) for source in sources)
        return kept._replace(paths=tuple(path if path.exists() else None for path in paths))
    others = [path for path in kept.paths if path is not None and path.stem.partition("-")[2] not in ("", identity)]
    if others:
        raise DataError(
            f"{others[0]} holds scores of another reference model than the one that is there now, by which sequences "
            "without scores would be judged; restore the weights that the run began from (or loss.reference), or give "
            "the data of before"
        )
    return kept


def _remove_others(folder: RunFolder, kept: Sequence[Path | None]) -> None:
    """Scores of starts that came to no checkpoint: one that goes on would have to choose."""
    with disk_faults(f"write {folder.references}"):
        stems = {path.stem.partition("-")[0] for path in kept if path is not None}
        for path in folder.references.glob("*-*.npy"):
            if path not in kept and path.stem.partition("-")[0] in stems:
                path.unlink()


def _path(folder: RunFolder, source: _Source, config: Config, identity: str) -> Path:
    """Named by what is scored and by the model.

    Args:
        folder: Of the run.
        source: The sequences.
        config: Of the run.
        identity: Of the reference, as `Reference.loaded` gives it.
    """
    return folder.references / f"{_stem(source, config)}-{identity}.npy"


def _stem(source: _Source, config: Config) -> str:
    """Named by what stays the same where the run goes on: where it began may be named otherwise then, or be gone."""
    return _hashed([_FORMAT, source.fingerprint, config.loss.aggregation, config.loss.reference])


def _earlier_stem(source: _Source, config: Config) -> str:
    """The name of earlier versions, which took places of weights for weights."""
    model = config.model.model_dump_json(exclude={"num_labels"})
    start = [model, config.checkpoint.initialize_from, config.train.seed]
    start += [] if config.loss.reference is None else [config.loss.reference]
    return _hashed([_FORMAT, source.fingerprint, config.loss.aggregation, *start])


def _shared_path(source: _Source, config: Config, identity: str) -> Path:
    """Beside the token cache, named by all that decides the scores but the names of files."""
    assert isinstance(config.data, SftSection), "a rule of the configuration"
    folder = default_folder() if config.data.cache_dir is None else Path(config.data.cache_dir)
    stem = _hashed([_FORMAT, source.fingerprint, config.loss.aggregation, identity])
    return folder / "references" / f"{stem}.npy"


def _hashed(decisive: Sequence[object]) -> str:
    return hashlib.sha256(json.dumps(decisive).encode()).hexdigest()[:32]


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
