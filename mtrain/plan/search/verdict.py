"""Verdict on whether a run fits into a GPU's memory, and what to change if it does not."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from pydantic import ValidationError

from mtrain.arch.activations import FEWEST_TOKENS
from mtrain.arch.layout import Layout, broken_rules
from mtrain.base.errors import ConfigError
from mtrain.config import Config
from mtrain.config.schema.loss import own_functions
from mtrain.plan.search.candidates import OVERLAPS
from mtrain.plan.search.cost import Workload, step_cost
from mtrain.plan.search.hardware import GIB, USABLE_MEMORY, Cluster
from mtrain.plan.search.report import nothing_fits, recompute_name
from mtrain.plan.search.search import Choice, heaviest, recomputations, search

_DEGREES = ("tp", "cp", "pp", "ep")


@dataclass(frozen=True)
class Remedy:
    """Changed keys, and the choice that results."""

    keys: Mapping[str, Any]
    choice: Choice

    def __str__(self) -> str:
        """Writes the keys as command-line overrides."""
        return " ".join(f"{key}={_shown(value)}" for key, value in self.keys.items())


def smallest_change(config: Config, num_gpus: int, cluster: Cluster, memory_bytes: int) -> Remedy | None:
    """Finds the fastest change of one key, otherwise of two, that makes the run fit; None if two are not enough."""
    single = list(_changes(config, num_gpus, cluster))
    pairs = ({**one, **other} for one, other in combinations(single, 2) if not one.keys() & other.keys())
    for group in (single, pairs):
        remedies = [_evaluated(config, keys, num_gpus, cluster, memory_bytes) for keys in group]
        fitting = [remedy for remedy in remedies if remedy is not None]
        if fitting:
            return min(fitting, key=lambda remedy: remedy.choice.cost.time.total)
    return None


def _changes(config: Config, num_gpus: int, cluster: Cluster) -> Iterator[dict[str, Any]]:
    """Yields changes that may need less memory."""
    train, layout = config.train, config.layout
    size = train.micro_batch_size
    while size > 1:
        size //= 2
        yield {"train.micro_batch_size": size}
    for other in recomputations(config):
        changed = other.train
        if changed.recompute == "selective" and changed.recompute_modules is not None:
            yield {"train.recompute": "selective", "train.recompute_modules": list(changed.recompute_modules)}
        elif changed.recompute != train.recompute and changed.recompute != "none":
            yield {"train.recompute": changed.recompute, "train.recompute_modules": None}
    if train.recompute_layers is not None:
        yield {"train.recompute_layers": None}
    if not train.distributed_optimizer:
        yield {"train.distributed_optimizer": True}
    if config.loss.chunk_tokens != "auto":
        yield {"loss.chunk_tokens": "auto"}
    if config.loss.chunk_tokens != FEWEST_TOKENS and not own_functions(config.loss):
        yield {"loss.chunk_tokens": FEWEST_TOKENS}
    if layout.shard == "optimizer":
        yield {"layout.shard": "weights"} | {f"train.{name}": False for name in OVERLAPS if getattr(train, name)}
    for name in _DEGREES:
        degree = 2 * getattr(layout, name)
        while degree <= (cluster.gpus_per_node if name == "tp" else num_gpus):
            yield {f"layout.{name}": degree} | ({"layout.sp": True} if name == "tp" else {})
            degree *= 2


def _evaluated(
    config: Config, keys: Mapping[str, Any], num_gpus: int, cluster: Cluster, memory_bytes: int
) -> Remedy | None:
    """Evaluates a change; None if it is illegal or does not fit."""
    changed = with_keys(config, keys)
    if changed is None or broken_rules(changed, num_gpus):
        return None
    layout, usable = Layout.from_config(changed, num_gpus), int(memory_bytes * USABLE_MEMORY)
    memory = heaviest(changed, layout, usable)
    if memory.total_bytes > usable:
        return None
    return Remedy(keys, Choice(changed, layout, memory, step_cost(Workload(changed, layout, cluster))))


def with_keys(config: Config, keys: Mapping[str, Any]) -> Config | None:
    """Returns the configuration with other values for dotted keys; None if a rule refuses them."""
    sections: dict[str, dict[str, Any]] = {}
    for key, value in keys.items():
        section, name = key.split(".")
        sections.setdefault(section, {})[name] = value
    content = {name: {**getattr(config, name).model_dump(), **changed} for name, changed in sections.items()}
    try:
        return Config.model_validate({**config.model_dump(), **content})
    except ValidationError:
        return None


def _shown(value: object) -> str:
    if isinstance(value, list):
        return f"[{','.join(map(str, value))}]"
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def verdict(config: Config, num_gpus: int, cluster: Cluster, memory_bytes: int) -> str:
    """Returns the line that the run fits; the estimate may fill USABLE_MEMORY of `memory_bytes`.

    Raises:
        ConfigError: The run does not fit; the message names the smallest change that makes it fit.
    """
    layout = Layout.from_config(config, num_gpus)
    needed, usable = heaviest(config, layout).total_bytes, memory_bytes * USABLE_MEMORY
    limit = f"{usable / GIB:.1f} GiB ({USABLE_MEMORY:.0%} of {memory_bytes / GIB:.1f})"
    if needed <= usable:
        return f"fits: the heaviest rank needs {needed / GIB:.1f} of {limit}"
    begin = f"does not fit: the heaviest rank needs {needed / GIB:.1f} GiB, but may fill {limit}; "
    change = smallest_change(config, num_gpus, cluster, memory_bytes)
    if change is not None:
        slower = change.choice.cost.time.total / step_cost(Workload(config, layout, cluster)).time.total - 1
        new_gib = change.choice.memory.total_bytes / GIB
        raise ConfigError(
            f"{begin}set {change}, which needs {new_gib:.1f} GiB ({slower:+.0%} predicted time of a step)"
        )
    result = search(config, num_gpus, cluster, memory_bytes, 1)
    if not result.choices:
        raise ConfigError(begin + str(nothing_fits(config, result, num_gpus, memory_bytes)))
    best = result.choices[0]
    raise ConfigError(
        f"{begin}no change of two keys is enough; {best.layout} with train.micro_batch_size="
        f"{best.config.train.micro_batch_size} and recompute {recompute_name(best.config.train)} needs "
        f"{best.memory.total_bytes / GIB:.1f} GiB (`mtrain plan` writes it)"
    )
