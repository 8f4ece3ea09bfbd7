"""Search for the fastest layouts that fit. Candidates are tried by ascending lower bound of their step time, until the
bound exceeds the best times found."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

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
    shards,
    stage_split,
    state_bytes,
    train_of,
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
    """Memory of the heaviest rank."""
    cost: StepCost


@dataclass
class Counts:
    bounded: int = 0
    """Number of candidates: layouts with a micro-batch size and a lower bound."""
    tried: int = 0
    """Number of candidates that the bound did not exclude and that `mtrain train` would accept."""
    measured: int = 0
    """Number of memory estimates."""


@dataclass(frozen=True)
class SearchResult:
    choices: list[Choice]
    """Choices with different layouts, fastest first; empty if nothing fits."""
    closest: Choice | None
    """The choice that needs least memory if nothing fits; None if something fits, or no layout is legal."""
    counts: Counts


def search(config: Config, num_gpus: int, cluster: Cluster, memory_bytes: int, num_choices: int = 5) -> SearchResult:
    """Finds the fastest choices that fit; replaces layout, micro-batch size and recomputation of `config`.

    Args:
        memory_bytes: Memory of one GPU; the estimate may fill USABLE_MEMORY of it.
    """
    counts, usable = Counts(), int(memory_bytes * USABLE_MEMORY)
    ordered = sorted(candidates(config, num_gpus, cluster, usable), key=lambda candidate: candidate.least_seconds)
    counts.bounded = len(ordered)
    best = _Best(num_choices)
    for candidate in ordered:
        if candidate.least_seconds >= best.limit:
            break
        tried = with_layout(config, section_of(candidate.layout, config.model.num_layers), candidate.micro_batch_size)
        if next(iter(broken_rules(tried, num_gpus)), None) is None:
            counts.tried += 1
            _try(Workload(tried, Layout.from_config(tried, num_gpus), cluster), usable, best, counts)
    closest = None if best.choices else _closest(config, num_gpus, cluster, counts)
    return SearchResult(best.choices, closest, counts)


def with_layout(config: Config, section: LayoutSection, micro_batch_size: int) -> Config:
    """Returns the configuration with another layout and micro-batch size, and without recomputation."""
    changes = {
        "micro_batch_size": micro_batch_size,
        "recompute": "none",
        "recompute_modules": None,
        "recompute_layers": None,
    }
    train = train_of(section.shard, config.train).model_copy(update=changes)
    return config.model_copy(update={"layout": section, "train": train})


@dataclass
class _Best:
    """The fastest choices so far, one per division of the weights."""

    size: int
    choices: list[Choice] = field(default_factory=list)

    @property
    def limit(self) -> float:
        """Step time in seconds that a new choice must beat."""
        return self.choices[-1].cost.time.total if len(self.choices) == self.size else float("inf")

    def add(self, choice: Choice) -> None:
        """Keeps the choice if it is among the fastest."""
        key = _weights_key(choice.layout)
        same = [other for other in self.choices if _weights_key(other.layout) == key]
        if same and same[0].cost.time.total <= choice.cost.time.total:
            return
        remaining = [other for other in self.choices if other not in same]
        self.choices = sorted([*remaining, choice], key=lambda other: other.cost.time.total)[: self.size]


def _weights_key(layout: Layout) -> tuple[int | str, ...]:
    """Returns a key that is equal for layouts with the same division of weights, under any schedule."""
    return layout.tp, layout.pp, layout.cp, layout.ep, layout.etp, layout.shard


def _try(work: Workload, usable: int, best: _Best, counts: Counts) -> None:
    """Adds the layout with the least recomputation that fits, if it can be among the best."""
    for config in recomputations(work.config):
        cost = step_cost(work._replace(config=config))
        if cost.time.total >= best.limit:
            return
        counts.measured += 1
        memory = heaviest(config, work.layout, usable)
        if memory.total_bytes <= usable and is_legal(config):
            best.add(Choice(config, work.layout, memory, cost))
            return


def recomputations(config: Config) -> Iterator[Config]:
    """Yields the configuration with ever more recomputation, from none to full."""
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
    """Says whether the configuration keeps every rule; validates again, since `model_copy` does not."""
    try:
        Config.model_validate(config.model_dump())
    except ValidationError:
        return False
    return True


def heaviest(config: Config, layout: Layout, usable: int = _NO_LIMIT) -> MemoryEstimate:
    """Estimates the memory of the heaviest rank; stops at the first rank above `usable`."""
    estimates: list[MemoryEstimate] = []
    for pp_rank in sorted(range(layout.pp), key=lambda rank: (rank not in (0, 1, layout.pp - 1), rank)):
        estimates.append(memory_per_rank(config, layout, pp_rank))
        if estimates[-1].total_bytes > usable:
            return estimates[-1]
    return max(estimates, key=lambda estimate: estimate.total_bytes)


_NUM_CLOSEST = 20


def _closest(config: Config, num_gpus: int, cluster: Cluster, counts: Counts) -> Choice | None:
    """Finds the choice that needs least memory with full recomputation, among those with the least state between
    steps; None if no layout is legal."""
    choices: list[Choice] = []
    divided = (
        replace(division, shard=shard)
        for division in divisions(config.model, num_gpus, cluster)
        for shard in shards(config, division)
    )
    for weights in sorted(divided, key=lambda division: state_bytes(config, division)):
        if len(choices) >= _NUM_CLOSEST:
            break
        if stage_split(config.model.num_layers, weights.pp, 1) is None:
            continue
        for ranks, size, _ in batches(config, weights):
            tried = with_layout(config, section_of(ranks, config.model.num_layers), size)
            if size > 1 or broken_rules(tried, num_gpus):
                continue
            *_, tried = recomputations(tried)
            layout = Layout.from_config(tried, num_gpus)
            counts.measured += 1
            choices.append(Choice(tried, layout, heaviest(tried, layout), step_cost(Workload(tried, layout, cluster))))
    return min(choices, key=lambda choice: choice.memory.total_bytes, default=None)
