"""Which model a preference loss compares with: the one that the run begins from, or the one of loss.reference.

A named one may be an adapter beside a frozen model: a folder of PEFT, beside the frozen model of the run; or a run of
adapters, beside its own, which its checkpoints name by a fingerprint.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError

from mtrain.base.errors import ConfigError, DataError
from mtrain.checkpoint.store.directory import checkpoint_at
from mtrain.checkpoint.store.manifest import CONFIG_NAME as RUN_CONFIG_NAME
from mtrain.checkpoint.store.megatron_checkpoint import megatron_folder
from mtrain.config import Config
from mtrain.config.load import load_config
from mtrain.config.messages import readable
from mtrain.config.schema.adapter import AdapterSection
from mtrain.hf.io.peft import adapter_of
from mtrain.hf.schema import peft
from mtrain.hf.schema.exportable import family_of_run
from mtrain.hf.schema.files import CONFIG_NAME
from mtrain.mcore.distributed.groups import Groups
from mtrain.mcore.distributed.init import on_first_rank
from mtrain.mcore.engine.optimizer import Optimizer
from mtrain.mcore.engine.rank_model import RankModel
from mtrain.mcore.model.adapters.adapter import adapters_off
from mtrain.mcore.model.build import build_model
from mtrain.mcore.state.base import model_fingerprint
from mtrain.mcore.state.load import load_adapters
from mtrain.mcore.state.verified import opened_checkpoint
from mtrain.training.resume import announced, initialize, load_base, say


class Reference(NamedTuple):
    """The model that is compared with."""

    config: Config
    """`initialize` makes it of this, but for the adapters of `saved`. Its `adapter` is None where no adapter takes part
    in it."""
    named: str | None = None
    """What loss.reference says."""
    saved: Path | None = None
    """A run or a checkpoint whose adapters stand beside the model of `config`."""

    @classmethod
    def of(cls, config: Config) -> Reference:
        """That of a run. Collective over the world.

        Raises:
            ConfigError: A named one and the run's layout or precision do not go together.
            DataError: A named one is missing or damaged.
        """
        if config.loss.reference is None:
            return cls(config)
        return on_first_rank(lambda: named_reference(config, str(config.loss.reference)))

    def fits(self, config: Config) -> bool:
        """Whether the run's own model can hold it for a while: it has the same adapters or none, and the run loads its
        own afterwards."""
        own, wanted = config.adapter, self.config.adapter
        if wanted is None or self.config is config:
            return True
        # a run without a path goes on with what was drawn, which nothing would bring back
        if own is None or own.path is None or self.config.train.precision != config.train.precision:
            return False
        return _facts(own) == _facts(wanted)

    @contextmanager
    def loaded(self, model: RankModel) -> Iterator[tuple[str, RankModel]]:
        """The reference in a model that can hold it, inside the block. Collective over the world.

        One all-reduce for the fingerprint, beside what loading needs.

        Yields:
            What decides its scores, shortened: weights, architecture, precision; and the model with the configuration
            of the reference.

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
        # without labels as before there were any: what has a head compares with no model
        described = config.model.model_dump_json(exclude={"hf", "backend", "num_labels"})
        facts = None if config.adapter is None else _facts(config.adapter)
        decisive = json.dumps([weights, described, config.train.precision, facts])
        identity = hashlib.sha256(decisive.encode()).hexdigest()[:16]
        with nullcontext() if has_adapters else adapters_off(held.chunks):
            yield identity, held

    def _load(self, model: RankModel) -> None:
        if self.saved is None:
            return initialize(model)
        load_base(model)
        saved = self.saved
        with opened_checkpoint(lambda unusable: checkpoint_at(saved, unusable), say) as newest:
            entry = announced(newest)
            assert entry is not None, "checkpoint_at raises where there is none"
            load_adapters(entry, model)


def built_apart(config: Config, groups: Groups) -> RankModel:
    """A model of its own, for a reference that the run's cannot hold. Collective over the world.

    Args:
        config: That of the reference.
        groups: The process groups.
    """
    chunks = build_model(config, groups, weights_follow=True)
    return RankModel(config, groups, chunks, Optimizer(config, chunks, groups))


def _facts(adapter: AdapterSection) -> list[Any]:
    """What an adapter computes, but for its weights."""
    return [adapter.kind, adapter.rank, adapter.scale, sorted(adapter.parts), adapter.base_dtype]


def named_reference(config: Config, named: str) -> Reference:
    """Finds out what loss.reference names; no collective.

    Args:
        config: Of the run.
        named: A folder.

    Raises:
        ConfigError: It and the run's layout or precision do not go together.
        DataError: It is missing or damaged.
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
    return Reference(_beside_its_own(config, saved), named, folder)


def _of_model(config: Config, hf: str | None = None, initialize_from: str | None = None) -> Config:
    model = config.model.model_copy(update={"hf": hf})
    start = config.checkpoint.model_copy(update={"initialize_from": initialize_from})
    return config.model_copy(update={"model": model, "checkpoint": start, "adapter": None})


def _of_peft(config: Config, folder: Path) -> Config:
    """Beside the frozen model of the run, held as the run holds it."""
    base_dtype = None if config.adapter is None else config.adapter.base_dtype
    found = adapter_of(folder, family_of_run(config), config.model)
    adapter = found.model_copy(update={"path": str(folder), "base_dtype": base_dtype})
    return _with(config, config, adapter)


def _adapter_run(named: Path) -> Config | None:
    """The configuration that adapters were saved with; None where a whole model was."""
    entry = checkpoint_at(named).entry
    assert entry is not None, "checkpoint_at raises where there is none"
    saved = None if entry.manifest.base is None else load_config([entry.path / RUN_CONFIG_NAME], [])
    return None if saved is None or saved.adapter is None else saved


def _beside_its_own(config: Config, saved: Config) -> Config:
    """Beside the frozen model that the run of the reference names; beside this run's where that is gone. (That it is
    the same one, the fingerprint in the checkpoint says.)"""
    assert saved.adapter is not None, "asked of runs of adapters"
    places = (saved.model.hf, saved.checkpoint.initialize_from)
    is_there = all(place is None or Path(place).exists() for place in places)
    return _with(config, saved if is_there else config, saved.adapter.model_copy(update={"path": None}), saved)


def _with(config: Config, start: Config, adapter: AdapterSection, precision: Config | None = None) -> Config:
    """The run's configuration with a reference's adapter.

    Args:
        config: Of the run.
        start: Says where the frozen model begins.
        adapter: The reference's.
        precision: Says how the frozen model is held; None: as the run holds it.

    Raises:
        ConfigError: A rule of the configuration forbids it.
    """
    content = config.model_dump()
    # no step is made with it, and other optimizers may not take adapters
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
