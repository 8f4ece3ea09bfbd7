"""Reference model of a preference loss: the model that the run starts from, or that of loss.reference.

loss.reference may name an adapter: a PEFT folder, used with the frozen model of the run, or a run of adapters, used
with its own frozen model, identified by the fingerprint in its checkpoints.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError

from mtrain.base.errors import ConfigError, DataError
from mtrain.checkpoint.state.base import model_fingerprint
from mtrain.checkpoint.state.load import load_adapters
from mtrain.checkpoint.state.verified import opened_checkpoint
from mtrain.checkpoint.store.directory import checkpoint_at
from mtrain.checkpoint.store.manifest import CONFIG_NAME as RUN_CONFIG_NAME
from mtrain.checkpoint.store.megatron_checkpoint import megatron_folder
from mtrain.config import Config
from mtrain.config.messages import readable
from mtrain.config.schema.adapter import AdapterSection
from mtrain.core.engine.rank_model import RankModel, build_rank_model
from mtrain.core.layers.adapters.adapter import adapters_off
from mtrain.core.ranks.groups import Groups
from mtrain.core.ranks.init import on_first_rank
from mtrain.hf.configuration import load_config
from mtrain.hf.io.peft import adapter_of
from mtrain.hf.schema import peft
from mtrain.hf.schema.description import ADDED_TOKENS
from mtrain.hf.schema.files import CONFIG_NAME
from mtrain.hf.schema.registry import family_of_run
from mtrain.training.resume import announced, initialize, load_base

_log = logging.getLogger(__name__)


class Reference(NamedTuple):
    """Reference model, and where its weights come from."""

    config: Config
    """Configuration from which `initialize` makes the model, except for the adapters of `saved`; `adapter` is None
    without them."""
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

        It can if the reference is where the run starts, has no adapters, or has the same adapters as a run that loads
        its own from `adapter.path` afterwards.
        """
        own, wanted = config.adapter, self.config.adapter
        if wanted is None or self.config is config:
            return True
        # a run without a path continues with drawn adapters, which could not be restored
        if own is None or own.path is None or self.config.train.precision != config.train.precision:
            return False
        return _facts(own) == _facts(wanted)

    @contextmanager
    def loaded(self, model: RankModel) -> Iterator[tuple[str, RankModel]]:
        """Loads the reference into a model that can hold it, for the `with` block. Collective over the world.

        Yields:
            Hash of all that determines the scores (weights, architecture, precision), and the model with the
                configuration of the reference.

        Raises:
            DataError: Weights are missing, damaged, of another model or not finite.
        """
        config, has_adapters = self.config, self.config.adapter is not None
        held = replace(model, config=config)
        try:
            self._load(held)
        except DataError as error:
            if self.named is not None:
                error.args = (f"loss.reference={self.named}: {error}", *error.args[1:])
            raise
        weights = model_fingerprint(held.chunks, held.groups, config.model.vocab_size, has_adapters)
        # without keys that earlier versions lacked: a model with a head has no reference, and weights show added rows
        described = config.model.model_dump_json(exclude={"hf", "backend", "num_labels", *ADDED_TOKENS})
        facts = None if config.adapter is None else _facts(config.adapter)
        decisive = json.dumps([weights, described, config.train.precision, facts])
        identity = hashlib.sha256(decisive.encode()).hexdigest()[:16]
        with nullcontext() if has_adapters else adapters_off(held.chunks):
            yield identity, held

    def built_apart(self, groups: Groups) -> RankModel:
        """Builds a separate model for the reference if the run's model cannot hold it. Collective over the world."""
        return build_rank_model(self.config, groups, weights_follow=True)

    def _load(self, model: RankModel) -> None:
        if self.saved is None:
            return initialize(model)
        load_base(model)
        saved = self.saved
        with opened_checkpoint(lambda unusable: checkpoint_at(saved, unusable), _log.info) as newest:
            entry = announced(newest)
            assert entry is not None, "checkpoint_at raises where there is none"
            load_adapters(entry, model)


def _facts(adapter: AdapterSection) -> list[Any]:
    """Returns all settings that determine what an adapter computes, apart from its weights."""
    parts = sorted(adapter.parts)
    found: list[Any] = [adapter.kind, adapter.rank, adapter.scale, parts, adapter.base_dtype]
    # hashes of adapters without patterns stay those of earlier versions
    patterns = [[adapter.rank_of(part), adapter.scale_of(part)] for part in parts]
    found += [patterns] if adapter.rank_pattern or adapter.alpha_pattern else []
    return [*found, {"whole": sorted(adapter.modules_to_save)}] if adapter.modules_to_save else found


def named_reference(config: Config, named: str) -> Reference:
    """Finds the reference that `named`, a value of loss.reference, names; no collective.

    Raises:
        ConfigError: The reference is incompatible with the run's layout or precision.
        DataError: The reference is missing or damaged.
    """
    folder = Path(named)
    try:
        if (folder / CONFIG_NAME).is_file():
            return Reference(_of_model(config, hf=named), named)
        if (folder / peft.CONFIG_NAME).is_file():
            return Reference(_of_peft(config, folder), named)
        saved = None if megatron_folder(folder) is not None else _adapter_run(folder)
    except DataError as error:
        raise DataError(f"loss.reference={named}: {error}") from error
    if saved is None:
        return Reference(_of_model(config, initialize_from=named), named)
    return Reference(_with_its_own(config, saved), named, folder)


def _of_model(config: Config, hf: str | None = None, initialize_from: str | None = None) -> Config:
    model = config.model.model_copy(update={"hf": hf})
    start = config.checkpoint.model_copy(update={"initialize_from": initialize_from})
    return config.model_copy(update={"model": model, "checkpoint": start, "adapter": None})


def _of_peft(config: Config, folder: Path) -> Config:
    """Returns the configuration of a PEFT adapter on the frozen model of the run, held as the run holds it."""
    base_dtype = None if config.adapter is None else config.adapter.base_dtype
    found = adapter_of(folder, family_of_run(config), config.model)
    adapter = found.model_copy(update={"path": str(folder), "base_dtype": base_dtype})
    return _with(config, config, adapter)


def _adapter_run(named: Path) -> Config | None:
    """Returns the configuration that adapters were saved with; None if a whole model was saved."""
    entry = checkpoint_at(named).entry
    assert entry is not None, "checkpoint_at raises where there is none"
    saved = None if entry.manifest.base is None else load_config([entry.path / RUN_CONFIG_NAME], [])
    return None if saved is None or saved.adapter is None else saved


def _with_its_own(config: Config, saved: Config) -> Config:
    """Returns the configuration of an adapter on the frozen model of its own run, or on this run's if that model is
    gone.

    The fingerprint in the checkpoint verifies that they are the same.
    """
    assert saved.adapter is not None, "asked of runs of adapters"
    places = (saved.model.hf, saved.checkpoint.initialize_from)
    is_there = all(place is None or Path(place).exists() for place in places)
    return _with(config, saved if is_there else config, saved.adapter.model_copy(update={"path": None}), saved)


def _with(config: Config, start: Config, adapter: AdapterSection, precision: Config | None = None) -> Config:
    """Returns the run's configuration with a reference's adapter; refuses it if a rule of the configuration forbids it.

    Args:
        start: Configuration that says where the frozen model comes from.
        precision: Configuration with the precision of the frozen model; None: that of the run.
    """
    content = config.model_dump()
    # it is never trained, and some optimizers do not support adapters
    content["optimizer"] = {"lr": config.optimizer.lr}
    content["adapter"] = adapter.model_dump() | {"dropout": 0.0}
    content["loss"]["reference"] = None
    content["train"] |= {"seed": start.train.seed, "precision": (precision or config).train.precision}
    content["checkpoint"] |= {"initialize_from": start.checkpoint.initialize_from, "export_hf_every_steps": 0}
    content["model"]["hf"] = start.model.hf
    try:
        return Config.model_validate(content)
    except ValidationError as error:
        reasons = "; ".join(line for detail in error.errors(include_url=False) for line in readable(detail))
        raise ConfigError(
            f"loss.reference={config.loss.reference} is an adapter, which this run's model cannot hold: {reasons}; "
            "name a whole model, such as mtrain convert export makes of it"
        ) from None
