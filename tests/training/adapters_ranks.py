"""What ranks do in the tests of several adapters on one base; the functions for `Pool.run`."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from mtrain import ConfigError, Engine, SamplingParams
from mtrain.config import Config
from mtrain.core.engine.optimizer import AdamOptions
from mtrain.core.ranks.groups import Groups
from tests.training.engine_ranks import Batch, free

FEW = SamplingParams(max_new_tokens=6)
ADAM = AdamOptions(0.8, 0.9, 1e-3, 0.0, 0.5)


class Wanted(NamedTuple):
    """Adapter, and what it learns."""

    section: dict[str, Any]
    seed: int
    steps: list[list[Batch]]
    """Calls of each step."""


class Learned(NamedTuple):
    """What an adapter showed; everything is compared to the bit."""

    steps: list[Any]
    log_probs: list[list[float]]
    answers: list[Any]
    weights: list[Any]


def alone(groups: Groups, config: Config, wanted: Mapping[str, Wanted]) -> dict[str, Learned]:
    """Trains each adapter on an engine of its own."""
    found = {}
    with free(groups):
        for name, one in wanted.items():
            with Engine(with_adapter(config, one.section)) as engine:
                engine.begin_anew(one.seed)
                steps = []
                for number, calls in enumerate(one.steps):
                    for batch in calls:
                        engine.forward_backward(batch)
                    steps.append(engine.optim_step(0.01 * (number + 1), ADAM))
                found[name] = shown(engine, one, steps)
    return found


def with_adapter(config: Config, section: Mapping[str, Any]) -> Config:
    content = config.model_dump()
    return Config.model_validate({**content, "adapter": {**content["adapter"], **section}})


def mixed(
    groups: Groups, config: Config, wanted: Mapping[str, Wanted], run_dir: str | None = None
) -> dict[str, Learned]:
    """Trains all adapters on one engine, call by call in turns; with answers, passes without adapters and another
    adapter's coming and going in between."""
    with free(groups), Engine(config) as engine:
        adapters = {name: engine.adapter(name, one.section, one.seed) for name, one in wanted.items()}
        if run_dir is not None:
            for name, each in adapters.items():
                each.save(Path(run_dir, name))
        steps: dict[str, list[Any]] = {name: [] for name in wanted}
        any_one = next(iter(wanted.values()))
        for number in range(len(any_one.steps)):
            for call in range(len(any_one.steps[number])):
                for name, one in wanted.items():
                    adapters[name].forward_backward(one.steps[number][call])
                    engine.generate([[3]], FEW)
            brief = engine.adapter("brief", {"rank": 3})
            with brief.adapters_off():
                next(iter(adapters.values())).forward(one.steps[0][0])
                brief.forward(one.steps[0][0])
            brief.close()
            for name in reversed(list(wanted)):
                steps[name].append(adapters[name].optim_step(0.01 * (number + 1), ADAM))
        found = {name: shown(adapters[name], one, steps[name]) for name, one in wanted.items()}
        assert engine.step == 0
        if run_dir is not None:
            for name, each in adapters.items():
                each.save(Path(run_dir, name))
        return found


def shown(engine: Engine, one: Wanted, steps: list[Any]) -> Learned:
    log_probs = [each.tolist() for each in engine.forward(one.steps[-1][-1]).log_probs]
    weights = [each.tolist() for each in engine.hold(weights_only=True).weights]
    return Learned(steps, log_probs, engine.generate([[5, 6], [7]], FEW), weights)


class Sizes(NamedTuple):
    """Bytes of tensors that an adapter brought, and that were left once it was closed."""

    added: int
    left: int


def sizes(groups: Groups, config: Config, section: Mapping[str, Any], batch: Batch) -> Sizes:
    """Measures an adapter that has made a step."""
    with free(groups), Engine(config) as engine:
        step(engine, batch)
        before = tensor_bytes()
        other = engine.adapter("other", section)
        step(other, batch)
        added = tensor_bytes() - before
        other.close()
        del other
        step(engine, batch)
        return Sizes(added, tensor_bytes() - before)


def step(engine: Engine, batch: Batch) -> None:
    engine.forward_backward(batch)
    engine.optim_step(0.01)


def tensor_bytes() -> int:
    """Counts the bytes of all tensors that somebody holds."""
    gc.collect()
    held = [each for each in gc.get_objects() if isinstance(each, torch.Tensor)]
    storages = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in held}
    return sum(storages.values())


def refused(groups: Groups, config: Config) -> list[str]:
    """Returns what is said of adapters that cannot be."""
    said = []
    with free(groups), Engine(config) as engine:
        other = engine.adapter("one")
        for name, section in (("one", {}), ("two", {"rank": 0}), ("three", {"targets": ["experts"]})):
            try:
                engine.adapter(name, section)
            except ConfigError as error:
                said.append(str(error))
        whole = config.model_copy(update={"adapter": None})
    try:
        other.forward([])
    except RuntimeError as error:
        said.append(str(error))
    with free(groups), Engine(whole) as engine:
        try:
            engine.adapter("one")
        except ConfigError as error:
            said.append(str(error))
    return said


def refused_with_a_trained_tower(groups: Groups, config: Config) -> list[str]:
    """Returns what is said of several adapters, and of a model without its adapter, if a tower is trained in full."""
    with free(groups), Engine(config) as engine:
        said = []
        try:
            engine.adapter("one")
        except ConfigError as error:
            said.append(str(error))
        try:
            with engine.adapters_off():
                pass
        except ConfigError as error:
            said.append(str(error))
    return said
