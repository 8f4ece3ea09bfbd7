"""Ways to divide a number of ranks, each with a lower bound of the time of a step.

The bound sums over all layers and is the same for every pipeline, so it is computed once for each division of the
layers (tp, cp, ep, etp, micro-batch); the many pipelines over it cost a few multiplications.
"""

import functools
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from mtrain.arch.activations import FP32_BYTES, element_bytes
from mtrain.arch.layout import GIVEN_DEGREES, Layout, uneven_stages
from mtrain.arch.memory import own_shard, trained_parameters
from mtrain.config import Config, known_issues, rules
from mtrain.config.schema.layout import LayoutSection
from mtrain.config.schema.model import ModelSection
from mtrain.plan.search.cost import Workload, least_microbatch_seconds
from mtrain.plan.search.hardware import Cluster

_MICRO_BATCHES = (1, 2, 4, 8, 16)


class Candidate(NamedTuple):
    """A layout and micro-batch size; layouts that `mtrain train` would refuse are refused when the candidate is
    tried."""

    layout: Layout
    """Degrees alone; `section_of` divides the layers."""
    micro_batch_size: int
    least_seconds: float
    """Lower bound of a step's seconds, whatever is recomputed."""


def section_of(layout: Layout, num_layers: int) -> LayoutSection:
    """Returns the section `layout.*` of these degrees, under which `stage_split` leaves every stage a layer."""
    split = stage_split(num_layers, layout.pp, layout.vpp)
    assert split is not None, "no candidate is made of it"
    return LayoutSection().model_copy(update={name: getattr(layout, name) for name in GIVEN_DEGREES} | split)


def candidates(config: Config, num_gpus: int, cluster: Cluster, usable_bytes: int) -> Iterator[Candidate]:
    """Yields every division of exactly `num_gpus` ranks whose weights, gradients and moments alone fit.

    Sequence parallelism is on for every tp above 1: no estimate here is better without. Tensor parallelism stays inside
    a node. Layout, micro-batch size and recomputation of `config` are not used.
    """
    bounds: dict[tuple[int | str, ...], float] = {}
    kinds = known_issues.context_kinds(config.model, config.data)
    alone = {
        size: config.model_copy(
            update={"train": config.train.model_copy(update={"micro_batch_size": size, "recompute": "none"})}
        )
        for size in _MICRO_BATCHES
    }
    for weights in divisions(config.model, num_gpus, cluster):
        if state_bytes(config, weights) > usable_bytes:
            continue
        for ranks, size, num in batches(config, weights):
            for kind in kinds if ranks.cp > 1 else kinds[:1]:
                layout = replace(ranks, cp_comm=kind)
                key = (layout.tp, layout.ep, layout.etp, layout.cp, kind, size)
                if key not in bounds:
                    bounds[key] = least_microbatch_seconds(Workload(alone[size], replace(layout, pp=1), cluster))
                for vpp in _virtual_stages(config.model.num_layers, layout.pp, num >= layout.pp):
                    seconds = bounds[key] / layout.pp * (num + (layout.pp - 1) / vpp)
                    yield Candidate(replace(layout, vpp=vpp), size, seconds)


def divisions(model: ModelSection, num_gpus: int, cluster: Cluster) -> Iterator[Layout]:
    """Yields the ways to divide the weights over ranks, all others of which are data-parallel."""
    num_experts = 1 if model.experts is None else model.experts.num_experts
    for tp in _divisors(num_gpus, cluster.gpus_per_node):
        if any(rules.tensor_parallel(model, LayoutSection().model_copy(update={"tp": tp, "sp": tp > 1}))):
            continue
        for pp in _divisors(num_gpus // tp, model.num_layers):
            rest = num_gpus // pp
            for ep in (each for each in _divisors(num_experts, rest) if rest % each == 0):
                for etp in [1] if model.experts is None else _divisors(tp, tp):
                    if rest % (ep * etp) == 0:
                        yield Layout(tp=tp, sp=tp > 1, pp=pp, dp=rest // tp, ep=ep, etp=etp)


def state_bytes(config: Config, layout: Layout) -> int:
    """Estimates the least that the first rank of a pipeline holds between steps: weights, gradients and, unless they
    lie on the host, two moments."""
    num_layers = config.model.num_layers
    if stage_split(num_layers, layout.pp, 1) is None:
        return 0
    layout = replace(layout, stage_layers=uneven_stages(section_of(layout, num_layers), num_layers))
    held = trained_parameters(config, layout, 0)
    moments = 0 if config.train.offload_optimizer else 2 * FP32_BYTES * own_shard(config.train, layout, held)
    return held.total * (element_bytes(config.train) + FP32_BYTES) + moments


def stage_split(num_layers: int, pp: int, vpp: int) -> dict[str, int] | None:
    """Returns the layers of the first and last stage if layers do not divide evenly: fewer than in others, since these
    stages also have embeddings and logits. None if a stage would have no layer."""
    stages = pp * vpp
    each = -(-num_layers // stages)
    lacking = each * stages - num_layers
    first, last = each - lacking // 2, each - (lacking - lacking // 2)
    if lacking == 0 or pp == 1:
        return {}
    if last <= 0:
        return None
    return {"last_stage_layers": last} if first == each else {"first_stage_layers": first, "last_stage_layers": last}


@functools.cache
def _virtual_stages(num_layers: int, pp: int, may_interleave: bool) -> list[int]:
    """Lists the possible virtual stages a rank; interleaving needs as many microbatches as ranks."""
    most = num_layers // pp + 1 if pp > 1 and may_interleave else 1
    return [each for each in range(1, most + 1) if stage_split(num_layers, pp, each) is not None]


def batches(config: Config, layout: Layout) -> Iterator[tuple[Layout, int, int]]:
    """Yields the layout with some data-parallel ranks as context-parallel ones, micro-batch size and number of
    microbatches."""
    batch, packed = config.sequences_per_step, config.data.packing is not None
    sizes = _MICRO_BATCHES if config.train.tokens_per_micro_batch is None else (1,)
    for cp in _divisors(layout.dp, config.row_width // 2):
        divided = replace(layout, cp=cp, dp=layout.dp // cp)
        for size in sizes:
            num, rest = divmod(batch, divided.dp * size)
            if size <= batch and (packed or rest == 0):
                yield divided, size, max(1, num + (rest > 0))


def _divisors(number: int, most: int) -> list[int]:
    return [each for each in range(1, min(number, most) + 1) if number % each == 0]
