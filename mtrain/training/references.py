"""Reference model of a preference loss, and its scores: computed once, before the first step, and stored in the run
folder.

The reference is the model that the run starts from, or the one that loss.reference names. It may be an adapter: a PEFT
folder, used with the frozen model of the run, or a run of adapters, used with its own frozen model, identified by the
fingerprint in its checkpoints.

A start that resumes reads the scores, and trains on them bit for bit as before, even if the reference's weights are
gone. Scores of a named reference are also stored next to the token cache, under a hash of everything that determines
them, for other runs.
"""

from __future__ import annotations

import gc
import hashlib
import io
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from pydantic import ValidationError

from mtrain.arch.adapters import keys_of_full_training
from mtrain.base.errors import ConfigError, DataError
from mtrain.base.files import disk_faults, replacing
from mtrain.base.spelling import counted
from mtrain.checkpoint.state.base import model_fingerprint
from mtrain.checkpoint.state.load import load_adapters
from mtrain.checkpoint.store.directory import checkpoint_at
from mtrain.checkpoint.store.manifest import CONFIG_NAME as RUN_CONFIG_NAME
from mtrain.checkpoint.store.megatron_checkpoint import megatron_folder
from mtrain.checkpoint.store.steps import published_steps, step_name
from mtrain.config import Config
from mtrain.config.changes import flat_keys
from mtrain.config.consent import is_permitted
from mtrain.config.messages import in_one_line
from mtrain.config.schema.adapter import AdapterSection
from mtrain.config.schema.data import SftSection
from mtrain.core.batch.batch import Microbatch
from mtrain.core.engine.rank_model import RankModel, build_rank_model
from mtrain.core.layers.adapters.adapter import adapters_off
from mtrain.core.loss.preference.scores import PreferenceLoss, preference_marks
from mtrain.core.ranks.groups import Groups
from mtrain.core.ranks.init import on_all_ranks, on_first_rank
from mtrain.core.step.forward import num_microbatches
from mtrain.core.step.scoring_pass import sequence_scores
from mtrain.data.cache.opening import default_folder
from mtrain.data.loader import HeldOutBatches, RowsOfRank, StepLoader
from mtrain.data.sources import HeldOut
from mtrain.hf.configuration import load_config
from mtrain.hf.io.peft import adapter_of
from mtrain.hf.schema import peft
from mtrain.hf.schema.description import ADDED_TOKENS
from mtrain.hf.schema.files import CONFIG_NAME, read_json
from mtrain.hf.schema.registry import family_of_run
from mtrain.runs.continuation import REFERENCE
from mtrain.runs.folder import RunFolder
from mtrain.training.changed import checkpoint_config
from mtrain.training.resume import initialize, load_base, opened

_log = logging.getLogger(__name__)

_FORMAT = 1
"""Version of the scores; incremented when this module computes other scores for the same sequences."""


class Reference(NamedTuple):
    """Reference model, and the source of its weights."""

    config: Config
    """Configuration from which `initialize` loads the model; `adapter` is None unless the reference has adapters."""
    named: str | None = None
    """Value of loss.reference, if set."""
    saved: Path | None = None
    """Run or checkpoint whose adapters belong to the model of `config`, if any."""

    @classmethod
    def of(cls, config: Config) -> Reference:
        """Finds the reference of a run. Collective over the world.

        Raises:
            ConfigError: The named reference is incompatible with the run's layout or precision.
            DataError: The named reference is missing or damaged.
        """
        if config.loss.reference is None:
            return cls(config)
        return on_first_rank(lambda: named_reference(config, str(config.loss.reference)))

    def fits(self, config: Config) -> bool:
        """Says whether the run's model can hold the reference before the run's own weights are loaded.

        It can if the reference is the model that the run starts from, or has no adapters, or has adapters of the run's
        shape and the run loads its own from `adapter.path` afterwards.
        """
        run_adapter, adapter = config.adapter, self.config.adapter
        if adapter is None or self.config is config:
            return True
        # a run without a path continues with drawn adapters, which could not be restored
        if run_adapter is None or run_adapter.path is None or self.config.train.precision != config.train.precision:
            return False
        theirs = keys_of_full_training(self.config.model, adapter)
        return keys_of_full_training(config.model, run_adapter) == theirs and _facts(run_adapter) == _facts(adapter)

    @contextmanager
    def loaded(self, model: RankModel) -> Iterator[tuple[str, RankModel]]:
        """Loads the reference into a model that can hold it, for the `with` block. Collective over the world.

        Yields:
            Hash of everything that determines the scores (weights, architecture, precision), and the model with the
                configuration of the reference.
        """
        config, has_adapters = self.config, self.config.adapter is not None
        scoring = replace(model, config=config)
        try:
            self._load(scoring)
        except DataError as error:
            if self.named is not None:
                error.args = (f"loss.reference={self.named}: {error}", *error.args[1:])
            raise
        weights = model_fingerprint(scoring.chunks, scoring.groups, config.model.vocab_size, has_adapters)
        # without keys that earlier versions lacked: a model with a head has no reference, and weights show added rows
        described = config.model.model_dump_json(exclude={"hf", "backend", "num_labels", "vision", *ADDED_TOKENS})
        facts = None if config.adapter is None else _facts(config.adapter)
        decisive = json.dumps([weights, described, config.train.precision, facts])
        identity = hashlib.sha256(decisive.encode()).hexdigest()[:16]
        with nullcontext() if has_adapters else adapters_off(scoring.chunks):
            yield identity, scoring

    def _load(self, model: RankModel) -> None:
        if self.saved is None:
            return initialize(model)
        load_base(model)
        with opened(self.saved) as entry:
            load_adapters(entry, model)


def _facts(adapter: AdapterSection) -> list[Any]:
    """Returns all settings that determine what an adapter computes, apart from its weights."""
    parts = sorted(adapter.parts)
    facts: list[Any] = [adapter.kind, adapter.rank, adapter.scale, parts, adapter.base_dtype]
    # hashes of adapters without patterns stay those of earlier versions
    patterns = [[adapter.rank_of(part), adapter.scale_of(part)] for part in parts]
    facts += [patterns] if adapter.rank_pattern or adapter.alpha_pattern else []
    return [*facts, {"whole": sorted(adapter.modules_to_save)}] if adapter.modules_to_save else facts


def named_reference(config: Config, named: str) -> Reference:
    """Finds the reference for `named`, a value of loss.reference; raises as `Reference.of`, no collective."""
    folder = Path(named)
    try:
        if (folder / CONFIG_NAME).is_file():
            return Reference(_config_of_model(config, hf=named), named)
        if (folder / peft.CONFIG_NAME).is_file():
            # on the frozen model of the run, in the run's dtype
            base_dtype = None if config.adapter is None else config.adapter.base_dtype
            family = family_of_run(config)
            peft_adapter = adapter_of(folder, family, config.model)
            adapter = peft_adapter.model_copy(update={"path": str(folder), "base_dtype": base_dtype})
            frozen = peft.freezes(read_json(folder / peft.CONFIG_NAME), family, config.model)
            return Reference(_config_with_adapter(config, config, adapter, frozen), named)
        entry = None if megatron_folder(folder) is not None else checkpoint_at(folder).entry
        is_adapter = entry is not None and entry.manifest.base is not None
        saved = load_config([entry.path / RUN_CONFIG_NAME], []) if entry is not None and is_adapter else None
    except DataError as error:
        raise DataError(f"loss.reference={named}: {error}") from error
    if saved is None or saved.adapter is None:
        return Reference(_config_of_model(config, initialize_from=named), named)
    # on the frozen model of its own run, or on this run's if that one is gone: the fingerprint in the checkpoint
    # verifies that it is the same model
    origins = (saved.model.hf, saved.checkpoint.initialize_from)
    start = saved if all(origin is None or Path(origin).exists() for origin in origins) else config
    vision = saved.model.vision
    frozen = {} if vision is None else vision.model_dump(include={"freeze_tower", "freeze_projector"})
    adapter = saved.adapter.model_copy(update={"path": None})
    return Reference(_config_with_adapter(config, start, adapter, frozen, saved), named, folder)


def _config_of_model(config: Config, hf: str | None = None, initialize_from: str | None = None) -> Config:
    model = config.model.model_copy(update={"hf": hf})
    start = config.checkpoint.model_copy(update={"initialize_from": initialize_from})
    return config.model_copy(update={"model": model, "checkpoint": start, "adapter": None})


def _config_with_adapter(
    config: Config,
    start: Config,
    adapter: AdapterSection,
    frozen: Mapping[str, bool],
    precision: Config | None = None,
) -> Config:
    """Returns the run's configuration with a reference's adapter; refuses an adapter that the configuration's rules
    forbid.

    Args:
        start: Configuration that names the frozen model.
        frozen: Keys of `model.vision` that say which parts of the tower were frozen under the adapter.
        precision: Configuration with the precision of the frozen model; None: `config`.
    """
    content = config.model_dump()
    # the reference is never trained, and some optimizers do not support adapters
    content["optimizer"] = {"lr": config.optimizer.lr}
    content["adapter"] = adapter.model_dump() | {"dropout": 0.0}
    content["loss"]["reference"] = None
    content["train"] |= {"seed": start.train.seed, "precision": (precision or config).train.precision}
    content["checkpoint"] |= {"initialize_from": start.checkpoint.initialize_from, "export_hf_every_steps": 0}
    content["model"]["hf"] = start.model.hf
    if config.model.vision is not None:
        content["model"]["vision"] |= {**frozen, "freeze_language_model": False}  # the adapter freezes it
    try:
        return Config.model_validate(content)
    except ValidationError as error:
        raise ConfigError(
            f"loss.reference={config.loss.reference} is an adapter that does not fit this run's model: "
            f"{in_one_line(error)}; name a whole model, such as the merged one that mtrain convert export writes"
        ) from None


class _Source(NamedTuple):
    """Facts about a source, which the first rank sends to all ranks."""

    fingerprint: str
    num_sequences: int
    num_passes: int


class _ExistingScores(NamedTuple):
    """Scores that the first rank finds in the run folder."""

    has_checkpoint: bool
    """Whether the run has a checkpoint, so that existing scores are those it began with."""
    paths: tuple[Path | None, ...]
    """Path of each source's scores; None if they must be computed."""
    scored_by: str | None = None
    """Value of loss.reference when they were computed; None if it is still the same."""


class References:
    """Reads or computes the reference scores that a run needs before its first step."""

    def __init__(
        self, config: Config, folder: RunFolder, groups: Groups, loss: PreferenceLoss | None, loader: StepLoader | None
    ) -> None:
        """Looks for scores in the run folder; none are needed if `loss` is None or has no reference. Collective over
        the world, raises as `Reference.of`."""
        self._config, self._folder, self._groups, self._loader = config, folder, groups, loader
        marks = None if loss is None else preference_marks(loss)
        self._is_needed = marks is not None and marks.needs_reference
        self._reference: Reference | None = None
        if self._is_needed:
            self._sources = on_first_rank(lambda: _sources(loader))
            existing = self._existing = on_first_rank(self._find_existing)
            # without a checkpoint, existing scores may be those of other weights
            if not existing.has_checkpoint or None in existing.paths or existing.scored_by is not None:
                self._reference = Reference.of(config)

    def score_apart(self) -> None:
        """Computes missing scores with a separate model if the run's model cannot hold the reference; called before the
        run's model is built. Collective over the world, raises as `use`."""
        reference = self._reference
        if reference is not None and not reference.fits(self._config):
            self._score_with(reference, build_rank_model(reference.config, self._groups, weights_follow=True))
            self._reference = None
            # hooks and gradient buffers form a reference cycle, and the run's model needs their memory now
            gc.collect()
            if self._groups.device.type == "cuda":
                torch.cuda.empty_cache()

    def use(self, model: RankModel) -> None:
        """Attaches a score to every sequence of the data; computes missing ones with the model. Collective over the
        world.

        Raises:
            DataError: Kept scores are damaged, or the weights of the reference cannot be loaded.
            MachineError: The disk refuses.
        """
        if not self._is_needed:
            return
        if self._reference is not None:
            self._score_with(self._reference, model)
        paths = [path for path in self._existing.paths if path is not None]
        on_all_ranks(lambda: _read(self._loader, self._sources, paths))

    def _score_with(self, reference: Reference, model: RankModel) -> None:
        with reference.loaded(model) as (identity, scoring):
            self._existing = on_first_rank(lambda: self._scores_of(identity))
            paths = list(self._existing.paths)
            for number, source in enumerate(self._sources):
                if paths[number] is not None:
                    continue
                paths[number] = path = self._path(source, identity)
                is_named = self._config.loss.reference is not None
                shared = self._shared_path(source, identity) if is_named else None
                if shared is None or not on_first_rank(partial(_copied, shared, path)):
                    self._score(scoring, source, [target for target in (path, shared) if target is not None])
            on_first_rank(lambda: _remove_stale(self._folder, paths))
            self._existing = self._existing._replace(paths=tuple(paths))

    def _score(self, model: RankModel, source: _Source, paths: Sequence[Path]) -> None:
        """Scores all sequences of a source, one step's worth at a time, and writes the scores to files."""
        config, groups = model.config, model.groups
        if groups.rank == 0:
            _log.info(
                f"scoring {counted(source.num_sequences, 'sequence', ',')} under the reference model, once for the run"
            )
        scores = np.full(source.num_sequences, np.nan)
        count, size = num_microbatches(config, groups), config.sequences_per_step
        for number, microbatches in enumerate(self._passes(model, source)):
            scored = sequence_scores(model, microbatches, count)
            scores[np.array(scored.slots, np.int64) + number * size] = scored.scores.numpy()
        array = io.BytesIO()
        np.save(array, scores)
        # preceded by the digest, which reveals a flipped bit
        content = hashlib.sha256(array.getvalue()).digest() + array.getvalue()
        for path in paths:
            on_first_rank(partial(_write, path, content))

    def _find_existing(self) -> _ExistingScores:
        """Finds the scores of a run with a checkpoint, including those of earlier versions. On the first rank."""
        steps, named = published_steps(self._folder.checkpoints), self._config.loss.reference
        if not steps:
            return _ExistingScores(False, (None,) * len(self._sources))
        saved = None if named is None else checkpoint_config(self._folder.checkpoints / step_name(steps[-1]))
        before = named if saved is None else flat_keys(saved).get(REFERENCE, named)
        paths: list[Path | None] = []
        for source in self._sources:
            there = sorted(self._folder.references.glob(f"{self._stem(source, before)}-*.npy"))
            earlier = self._folder.references / f"{self._earlier_stem(source, before)}.npy"
            paths.append(next((path for path in (*there, earlier) if path.exists()), None))
        return _ExistingScores(True, tuple(paths), before if before != named else None)

    def _scores_of(self, identity: str) -> _ExistingScores:
        """Returns the existing scores of the reference with this hash; refuses scores of another model."""
        existing = self._existing
        if not existing.has_checkpoint:
            paths = (self._path(source, identity) for source in self._sources)
            return existing._replace(paths=tuple(path if path.exists() else None for path in paths))
        foreign = [
            path for path in existing.paths if path is not None and path.stem.partition("-")[2] not in ("", identity)
        ]
        if existing.scored_by is not None:
            return self._scores_of_moved(identity, existing.scored_by, bool(foreign))
        if foreign:
            raise DataError(
                f"{foreign[0]} holds scores of another reference model than the current one, which would score the "
                "sequences without scores; restore the weights that the run began from (or loss.reference), or the "
                "earlier data"
            )
        return existing

    def _scores_of_moved(self, identity: str, before: str, is_another: bool) -> _ExistingScores:
        """Copies the scores if loss.reference names the same model by another path; drops them if it names another
        model, with consent."""
        if is_another and not is_permitted(REFERENCE, self._config.checkpoint.allow_changed):
            raise DataError(
                f"loss.reference={self._config.loss.reference} holds another model than {before}, which scored the "
                "sequences of this run, so future steps would be those of another run; name the earlier model, or "
                f"continue with the new one by checkpoint.allow_changed=[{REFERENCE}]"
            )
        paths: list[Path | None] = []
        for source, path in zip(self._sources, self._existing.paths):
            paths.append(None if path is None or is_another else self._path(source, identity))
            if path is not None and not is_another:
                _write(self._path(source, identity), path.read_bytes())
        return self._existing._replace(paths=tuple(paths))

    def _path(self, source: _Source, identity: str) -> Path:
        """Returns the path of scores, named after the sequences and the hash of the reference."""
        return self._folder.references / f"{self._stem(source, self._config.loss.reference)}-{identity}.npy"

    def _stem(self, source: _Source, named: str | None) -> str:
        """Hashes what stays the same when the run resumes, so not the path of its initial weights."""
        return _hashed([_FORMAT, source.fingerprint, self._config.loss.aggregation, named])

    def _earlier_stem(self, source: _Source, named: str | None) -> str:
        """Returns the name that earlier versions used, which hashed the paths of the weights."""
        config = self._config
        model = config.model.model_dump_json(exclude={"num_labels", *ADDED_TOKENS})
        start = [model, config.checkpoint.initialize_from, config.train.seed]
        start += [] if named is None else [named]
        return _hashed([_FORMAT, source.fingerprint, config.loss.aggregation, *start])

    def _shared_path(self, source: _Source, identity: str) -> Path:
        """Returns the path next to the token cache, named after everything that determines the scores."""
        config = self._config
        assert isinstance(config.data, SftSection), "a rule of the configuration"
        folder = default_folder() if config.data.cache_dir is None else Path(config.data.cache_dir)
        stem = _hashed([_FORMAT, source.fingerprint, config.loss.aggregation, identity])
        return folder / "references" / f"{stem}.npy"

    def _passes(self, model: RankModel, source: _Source) -> Iterator[list[Microbatch] | None]:
        loader, groups = self._loader, model.groups
        if loader is None:
            yield from [None] * source.num_passes
            return
        rows = RowsOfRank(model.config, groups.dp_rank, groups.layout.dp)
        yield from HeldOutBatches(rows, HeldOut([loader.preferences[source.fingerprint]], None)).batches()


def _sources(loader: StepLoader | None) -> list[_Source]:
    assert loader is not None, "the first rank reads data"
    size = loader.num_slots
    return [
        _Source(fingerprint, len(source), -(-len(source) // size)) for fingerprint, source in loader.preferences.items()
    ]


def _remove_stale(folder: RunFolder, paths: Sequence[Path | None]) -> None:
    """Deletes the scores of starts that reached no checkpoint, so that a later start finds only one set."""
    with disk_faults(f"write {folder.references}"):
        stems = {path.stem.partition("-")[0] for path in paths if path is not None}
        for path in folder.references.glob("*-*.npy"):
            if path not in paths and path.stem.partition("-")[0] in stems:
                path.unlink()


def _hashed(decisive: Sequence[object]) -> str:
    return hashlib.sha256(json.dumps(decisive).encode()).hexdigest()[:32]


def _copied(shared: Path, path: Path) -> bool:
    """Copies another run's scores if they exist and are intact; returns whether it did."""
    try:
        content = shared.read_bytes()
    except OSError:
        return False
    if hashlib.sha256(content[32:]).digest() != content[:32]:
        _log.info(f"{shared} does not hold the scores that were written; they are computed again")
        return False
    _log.info(f"using scores of the reference model from {shared}")
    _write(path, content)
    return True


def _write(path: Path, content: bytes) -> None:
    with disk_faults(f"write {path}"):
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as new:
            new.write_bytes(content)


def _read(loader: StepLoader | None, sources: Sequence[_Source], paths: Sequence[Path]) -> None:
    """Reads the scores and attaches them to the data of this rank."""
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
                f"{path} does not hold the scores of the reference model that were written; remove it, and it is "
                "recomputed from the run's initial weights"
            )
        loader.preferences[source.fingerprint].references = np.load(io.BytesIO(array), allow_pickle=False)
        digests.append(digest.hex()[:16])
    loader.name_references(digests)
