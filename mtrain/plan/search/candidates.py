"""Ways to divide a number of ranks, each with a lower bound of the step time.

The bound sums over all layers and does not depend on the pipeline, so it is computed once for each way to divide a
layer (tp, cp, ep, etp, micro-batch); each pipeline then costs a few multiplications.
"""

import functools
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from mtrain.arch.layout import GIVEN_DEGREES, Layout, uneven_stages
from mtrain.arch.memory import own_shard, trained_parameters
from mtrain.arch.parameters import FP32_BYTES, element_bytes
from mtrain.config import Config, combinations, known_issues, rules
from mtrain.config.schema.layout import LayoutSection, Shard
from mtrain.config.schema.model import ModelSection
from mtrain.config.schema.sections import Sections
from mtrain.config.schema.train import TrainSection
from mtrain.plan.search.cost import Workload, least_microbatch_seconds
from mtrain.plan.search.hardware import Cluster

_MICRO_BATCHES = (1, 2, 4, 8, 16)
OVERLAPS = ("overlap_grad_reduce", "overlap_param_gather")
"""Keys of `train` that are refused with divided weights, which always overlap."""


class Candidate(NamedTuple):
    """A layout and micro-batch size, not yet checked by the rules of `mtrain train`."""

    layout: Layout
    """Degrees only; `section_of` divides the layers."""
    micro_batch_size: int
    least_seconds: float
    """Lower bound of a step's seconds under any recomputation."""


def section_of(layout: Layout, num_layers: int) -> LayoutSection:
    """Returns the section `layout.*` of a candidate's degrees, with an uneven split of layers where needed."""
    split = stage_split(num_layers, layout.pp, layout.vpp)
    assert split is not None, "candidates have a layer in every stage"
    return LayoutSection().model_copy(update={name: getattr(layout, name) for name in GIVEN_DEGREES} | split)


def candidates(config: Config, num_gpus: int, cluster: Cluster, usable_bytes: int) -> Iterator[Candidate]:
    """Yields every way to divide exactly `num_gpus` ranks whose weights, gradients and moments alone fit.

    Sequence parallelism is on for every tp above 1, since no estimate improves without it. Tensor parallelism stays
    inside a node. Layout, micro-batch size and recomputation of `config` are ignored.
    """
    bounds: dict[tuple[int | str, ...], float] = {}
    kinds = known_issues.context_kinds(config.model, config.data)
    by_size = {
        size: config.model_copy(
            update={"train": config.train.model_copy(update={"micro_batch_size": size, "recompute": "none"})}
        )
        for size in _MICRO_BATCHES
    }
    divided = (
        replace(weights, shard=shard)
        for weights in divisions(config.model, num_gpus, cluster)
        for shard in shards(config, weights)
    )
    for weights in divided:
        if state_bytes(config, weights) > usable_bytes:
            continue
        for ranks, size, num in batches(config, weights):
            for kind in kinds if ranks.cp > 1 else kinds[:1]:
                layout = replace(ranks, cp_comm=kind)
                key = (layout.tp, layout.ep, layout.etp, layout.cp, kind, size)
                if key not in bounds:
                    bounds[key] = least_microbatch_seconds(Workload(by_size[size], replace(layout, pp=1), cluster))
                for vpp in _virtual_stages(config.model.num_layers, layout.pp, num >= layout.pp):
                    seconds = bounds[key] / layout.pp * (num + (layout.pp - 1) / vpp)
                    yield Candidate(replace(layout, vpp=vpp), size, seconds)


def shards(config: Sections, layout: Layout) -> tuple[Shard, ...]:
    """Returns the values of `layout.shard` that a layout allows; its `dp` includes `cp`."""
    section = LayoutSection().model_copy(update={"shard": "weights", "etp": layout.etp})
    sections = config.model_copy(update={"layout": section, "train": train_of("weights", config.train)})
    is_legal = layout.dp > 1 and not any(combinations.sharded_weights(sections))
    return ("optimizer", "weights") if is_legal else ("optimizer",)


def train_of(shard: Shard, train: TrainSection) -> TrainSection:
    """Returns the section for a value of `layout.shard`: without OVERLAPS for divided weights."""
    return train.model_copy(update=dict.fromkeys(OVERLAPS if shard == "weights" else (), False))


def divisions(model: ModelSection, num_gpus: int, cluster: Cluster) -> Iterator[Layout]:
    """Yields the ways to divide the weights over ranks (tp, pp, ep, etp); dp takes the remaining ranks."""
    num_experts = 1 if model.experts is None else model.experts.num_experts
    for tp in _divisors(num_gpus, cluster.gpus_per_node):
        if any(rules.tensor_parallel(model, LayoutSection().model_copy(update={"tp": tp, "sp": tp > 1}))):
            continue
        for pp in _divisors(num_gpus // tp, model.num_layers):
            ranks_per_stage = num_gpus // pp
            for ep in (
                ep_size for ep_size in _divisors(num_experts, ranks_per_stage) if ranks_per_stage % ep_size == 0
            ):
                for etp in [1] if model.experts is None else _divisors(tp, tp):
                    if ranks_per_stage % (ep * etp) == 0:
                        yield Layout(tp=tp, sp=tp > 1, pp=pp, dp=ranks_per_stage // tp, ep=ep, etp=etp)


def state_bytes(config: Config, layout: Layout) -> int:
    """Returns a lower bound of the first pipeline rank's memory between steps: weights, gradients and, unless they are
    on the host, two moments."""
    num_layers = config.model.num_layers
    if stage_split(num_layers, layout.pp, 1) is None:
        return 0
    layout = replace(layout, stage_layers=uneven_stages(section_of(layout, num_layers), num_layers))
    parameters = trained_parameters(config, layout, 0)
    updated = own_shard(config.train, config.model, layout, parameters)
    moments = 0 if config.train.offload_optimizer else 2 * FP32_BYTES * updated
    if layout.shard == "weights":
        return 2 * FP32_BYTES * updated + moments
    return parameters.total * (element_bytes(config.train) + FP32_BYTES) + moments


def stage_split(num_layers: int, pp: int, vpp: int) -> dict[str, int] | None:
    """Returns the layout keys of an uneven split, empty for an even one; None if a stage would have no layer.

    The first and last stage get fewer layers, since they also have embeddings and logits.
    """
    stages = pp * vpp
    layers_per_stage = -(-num_layers // stages)
    missing = layers_per_stage * stages - num_layers
    first, last = layers_per_stage - missing // 2, layers_per_stage - (missing - missing // 2)
    if missing == 0 or pp == 1:
        return {}
    if last <= 0:
        return None
    return (
        {"last_stage_layers": last}
        if first == layers_per_stage
        else {"first_stage_layers": first, "last_stage_layers": last}
    )


@functools.cache
def _virtual_stages(num_layers: int, pp: int, may_interleave: bool) -> list[int]:
    """Lists possible numbers of virtual stages per rank; interleaving needs at least as many microbatches as ranks."""
    max_vpp = num_layers // pp + 1 if pp > 1 and may_interleave else 1
    return [vpp for vpp in range(1, max_vpp + 1) if stage_split(num_layers, pp, vpp) is not None]


def batches(config: Config, layout: Layout) -> Iterator[tuple[Layout, int, int]]:
    """Yields layout, micro-batch size and number of microbatches; the layout turns some data-parallel ranks into
    context-parallel ones."""
    batch, packed = config.sequences_per_step, config.data.packing is not None
    sizes = _MICRO_BATCHES if config.train.tokens_per_micro_batch is None else (1,)
    for cp in _divisors(layout.dp, config.row_width // 2):
        divided = replace(layout, cp=cp, dp=layout.dp // cp)
        for size in sizes:
            num, remainder = divmod(batch, divided.dp * size)
            if size <= batch and (packed or remainder == 0):
                yield divided, size, max(1, num + (remainder > 0))


def _divisors(number: int, limit: int) -> list[int]:
    return [divisor for divisor in range(1, min(number, limit) + 1) if number % divisor == 0]
