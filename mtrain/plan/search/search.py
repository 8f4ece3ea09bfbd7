"""Searches the fastest layouts that fit: candidates are tried in the order of a lower bound of their time, and only as
far as that bound requires."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from pydantic import ValidationError

from mtrain.arch.features import kinds
from mtrain.arch.layout import Layout, broken_rules
from mtrain.arch.memory import MemoryEstimate, memory_per_rank
from mtrain.config import Config
from mtrain.config.schema.layout import LayoutSection
from mtrain.plan.search.candidates import (
    batches,
    candidates,
    divisions,
    section_of,
    stage_split,
    state_bytes,
)
from mtrain.plan.search.cost import StepCost, Workload, step_cost
from mtrain.plan.search.hardware import USABLE_MEMORY, Cluster

_NO_LIMIT = 1 << 62


@dataclass(frozen=True)
class Choice:
    """A layout, micro-batch size and recomputation, with memory and cost."""

    config: Config
    layout: Layout
    memory: MemoryEstimate
    """Memory of the rank that needs most."""
    cost: StepCost


@dataclass
class Counts:
    bounded: int = 0
    """Divisions of the ranks, with micro-batch sizes, that have a lower bound."""
    tried: int = 0
    """Divisions that the bound did not exclude and that `mtrain train` would accept."""
    measured: int = 0
    """Memory estimates."""


@dataclass(frozen=True)
class Found:
    choices: list[Choice]
    """Choices with different layouts, the fastest first; empty if nothing fits."""
    closest: Choice | None
    """If nothing fits, the choice that needs least memory; None if no layout is legal."""
    counts: Counts


def search(config: Config, num_gpus: int, cluster: Cluster, memory_bytes: int, num_choices: int = 5) -> Found:
    """Finds the fastest choices that fit; layout, micro-batch size and recomputation of `config` are to be chosen.

    Args:
        memory_bytes: Memory of one GPU; the estimate may fill USABLE_MEMORY of it.
    """
    counts, usable = Counts(), int(memory_bytes * USABLE_MEMORY)
    ordered = sorted(candidates(config, num_gpus, cluster, usable), key=lambda each: each.least_seconds)
    counts.bounded = len(ordered)
    best = _Best(num_choices)
    for each in ordered:
        if each.least_seconds >= best.limit:
            break
        given = with_layout(config, section_of(each.layout, config.model.num_layers), each.micro_batch_size)
        if next(iter(broken_rules(given, num_gpus)), None) is None:
            counts.tried += 1
            _try(Workload(given, Layout.from_config(given, num_gpus), cluster), usable, best, counts)
    closest = None if best.choices else _closest(config, num_gpus, cluster, counts)
    return Found(best.choices, closest, counts)


def with_layout(config: Config, section: LayoutSection, micro_batch_size: int) -> Config:
    """Returns the configuration under another layout, still without recomputation; every other key stays."""
    changes = {
        "micro_batch_size": micro_batch_size,
        "recompute": "none",
        "recompute_modules": None,
        "recompute_layers": None,
    }
    return config.model_copy(update={"layout": section, "train": config.train.model_copy(update=changes)})


@dataclass
class _Best:
    """The fastest choices so far, one for each layout of weights."""

    size: int
    choices: list[Choice] = field(default_factory=list)

    @property
    def limit(self) -> float:
        """Returns the time that a choice has to undercut."""
        return self.choices[-1].cost.time.total if len(self.choices) == self.size else float("inf")

    def add(self, choice: Choice) -> None:
        """Keeps the choice if it is among the fastest."""
        key = _weights_key(choice.layout)
        same = [each for each in self.choices if _weights_key(each.layout) == key]
        if same and same[0].cost.time.total <= choice.cost.time.total:
            return
        others = [each for each in self.choices if each not in same]
        self.choices = sorted([*others, choice], key=lambda each: each.cost.time.total)[: self.size]


def _weights_key(layout: Layout) -> tuple[int, ...]:
    """Returns a key that is equal for layouts with the same weights on a rank, whatever the schedule."""
    return layout.tp, layout.pp, layout.cp, layout.ep, layout.etp


def _try(work: Workload, usable: int, best: _Best, counts: Counts) -> None:
    """Tries the layout with the least recomputation with which it fits, if it can be among the best."""
    for given in recomputations(work.config):
        cost = step_cost(work._replace(config=given))
        if cost.time.total >= best.limit:
            return
        counts.measured += 1
        memory = heaviest(given, work.layout, usable)
        if memory.total_bytes <= usable and is_legal(given):
            best.add(Choice(given, work.layout, memory, cost))
            return


def recomputations(config: Config) -> Iterator[Config]:
    """Yields ways to recompute, from nothing to everything, each slower than the one before."""
    has_dense = any(config.model.has_dense(layer) for layer in dict.fromkeys(kinds(config.model)))
    parts = (["mlp"] if has_dense else []) + (["moe"] if config.model.experts is not None else [])
    for recompute, modules in (
        ("none", None),
        ("selective", None),
        ("selective", ("core_attn", *parts)),
        ("full", None),
    ):
        changes = {"recompute": recompute, "recompute_modules": modules, "recompute_layers": None}
        yield config.model_copy(update={"train": config.train.model_copy(update=changes)})


def is_legal(config: Config) -> bool:
    """Says whether the configuration keeps every rule, also for keys that were changed without validation."""
    try:
        Config.model_validate(config.model_dump())
    except ValidationError:
        return False
    return True


def heaviest(config: Config, layout: Layout, usable: int = _NO_LIMIT) -> MemoryEstimate:
    """Estimates the rank that needs most memory; stops at the first rank above `usable`."""
    found: list[MemoryEstimate] = []
    for pp_rank in sorted(range(layout.pp), key=lambda each: (each not in (0, 1, layout.pp - 1), each)):
        found.append(memory_per_rank(config, layout, pp_rank))
        if found[-1].total_bytes > usable:
            return found[-1]
    return max(found, key=lambda each: each.total_bytes)


_NUM_CLOSEST = 20


def _closest(config: Config, num_gpus: int, cluster: Cluster, counts: Counts) -> Choice | None:
    """Finds the choice that needs least memory, with everything recomputed, among those that hold least between
    steps."""
    found: list[Choice] = []
    for weights in sorted(divisions(config.model, num_gpus, cluster), key=lambda each: state_bytes(config, each)):
        if len(found) >= _NUM_CLOSEST:
            break
        if stage_split(config.model.num_layers, weights.pp, 1) is None:
            continue
        for ranks, size, _ in batches(config, weights):
            given = with_layout(config, section_of(ranks, config.model.num_layers), size)
            if size > 1 or broken_rules(given, num_gpus):
                continue
            *_, given = recomputations(given)
            layout = Layout.from_config(given, num_gpus)
            counts.measured += 1
            found.append(Choice(given, layout, heaviest(given, layout), step_cost(Workload(given, layout, cluster))))
    return min(found, key=lambda each: each.memory.total_bytes, default=None)
