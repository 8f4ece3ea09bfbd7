"""Ways to divide a number of ranks, each with a lower bound of the time of a step.

The bound sums over all layers and is the same for every pipeline, so it is computed once for each division of the
layers (tp, cp, ep, etp, micro-batch); the many pipelines over it cost a few multiplications.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

from mtrain.arch.activations import FP32_BYTES, element_bytes
from mtrain.arch.layout import Layout
from mtrain.arch.memory import own_shard, trained_parameters
from mtrain.config import Config, known_issues, rules
from mtrain.config.schema.layout import CpComm, LayoutSection
from mtrain.config.schema.model import ModelSection
from mtrain.plan.search.cost import least_microbatch_seconds
from mtrain.plan.search.hardware import Cluster
from mtrain.plan.search.layer_cost import Workload

_MICRO_BATCHES = (1, 2, 4, 8, 16)
_NO_SPLIT: dict[str, Any] = {"first_stage_layers": None, "last_stage_layers": None, "stage_layers": None}


class WeightDegrees(NamedTuple):
    tp: int
    pp: int
    ep: int
    etp: int


class Candidate(NamedTuple):
    """A layout and micro-batch size; layouts that `mtrain train` would refuse are refused when the candidate is
    tried."""

    degrees: WeightDegrees
    cp: int
    cp_comm: CpComm
    dp: int
    vpp: int
    micro_batch_size: int
    least_seconds: float
    """Lower bound of a step's seconds, whatever is recomputed."""

    def section(self, num_layers: int) -> LayoutSection:
        """Returns the section `layout.*` of the candidate."""
        sizes = {**self.degrees._asdict(), "cp": self.cp, "cp_comm": self.cp_comm, "vpp": self.vpp}
        sizes["sp"] = self.degrees.tp > 1
        split = stage_split(num_layers, self.degrees.pp, self.vpp)
        assert split is not None, "no candidate is made of it"
        return LayoutSection().model_copy(update={**_NO_SPLIT, **sizes, **split})


def candidates(config: Config, num_gpus: int, cluster: Cluster, usable_bytes: int) -> Iterator[Candidate]:
    """Yields every division of exactly `num_gpus` ranks whose weights, gradients and moments alone fit.

    Sequence parallelism is on for every tp above 1: no estimate here is better without. Tensor parallelism stays inside
    a node. Layout, micro-batch size and recomputation of `config` are not used.
    """
    bounds: dict[tuple[Any, ...], float] = {}
    kinds = known_issues.context_kinds(config.model, config.data)
    alone = {
        size: config.model_copy(
            update={"train": config.train.model_copy(update={"micro_batch_size": size, "recompute": "none"})}
        )
        for size in _MICRO_BATCHES
    }
    for degrees in divisions(config.model, num_gpus, cluster):
        if state_bytes(config, degrees, num_gpus) > usable_bytes:
            continue
        for cp, dp, size, num in batches(config, degrees, num_gpus):
            for kind in kinds if cp > 1 else kinds[:1]:
                key = (degrees.tp, degrees.ep, degrees.etp, cp, kind, size)
                if key not in bounds:
                    layout = Layout(
                        tp=degrees.tp, sp=degrees.tp > 1, cp=cp, cp_comm=kind, dp=dp, ep=degrees.ep, etp=degrees.etp
                    )
                    bounds[key] = least_microbatch_seconds(Workload(alone[size], layout, cluster))
                for vpp in _virtual_stages(config.model.num_layers, degrees.pp, num >= degrees.pp):
                    seconds = bounds[key] / degrees.pp * (num + (degrees.pp - 1) / vpp)
                    yield Candidate(degrees, cp, kind, dp, vpp, size, seconds)


def divisions(model: ModelSection, num_gpus: int, cluster: Cluster) -> Iterator[WeightDegrees]:
    """Yields the ways to divide the weights over ranks."""
    num_experts = 1 if model.experts is None else model.experts.num_experts
    for tp in _divisors(num_gpus, cluster.gpus_per_node):
        if any(rules.tensor_parallel(model, LayoutSection().model_copy(update={"tp": tp, "sp": tp > 1}))):
            continue
        for pp in _divisors(num_gpus // tp, model.num_layers):
            rest = num_gpus // pp
            for ep in (each for each in _divisors(num_experts, rest) if rest % each == 0):
                for etp in [1] if model.experts is None else _divisors(tp, tp):
                    if rest % (ep * etp) == 0:
                        yield WeightDegrees(tp, pp, ep, etp)


def state_bytes(config: Config, degrees: WeightDegrees, num_gpus: int) -> int:
    """Estimates the least that the first rank of a pipeline holds between steps: weights, gradients and, unless they
    lie on the host, two moments."""
    num_layers = config.model.num_layers
    split = stage_split(num_layers, degrees.pp, 1)
    if split is None:
        return 0
    counts = _stage_layers(num_layers, degrees.pp, split)
    layout = Layout(
        tp=degrees.tp,
        pp=degrees.pp,
        dp=num_gpus // degrees.tp // degrees.pp,
        ep=degrees.ep,
        etp=degrees.etp,
        stage_layers=counts,
    )
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


def _stage_layers(num_layers: int, pp: int, split: dict[str, int]) -> tuple[int, ...] | None:
    if not split:
        return None
    each = -(-num_layers // pp)
    first, last = split.get("first_stage_layers", each), split["last_stage_layers"]
    return (first, *[each] * (pp - 2), last)


@functools.cache
def _virtual_stages(num_layers: int, pp: int, may_interleave: bool) -> list[int]:
    """Lists the possible virtual stages a rank; interleaving needs as many microbatches as ranks."""
    most = num_layers // pp + 1 if pp > 1 and may_interleave else 1
    return [each for each in range(1, most + 1) if stage_split(num_layers, pp, each) is not None]


def batches(config: Config, degrees: WeightDegrees, num_gpus: int) -> Iterator[tuple[int, int, int, int]]:
    """Yields cp, dp, micro-batch size and number of microbatches, by cp."""
    batch, packed = config.sequences_per_step, config.data.packing is not None
    sizes = _MICRO_BATCHES if config.train.tokens_per_micro_batch is None else (1,)
    both = num_gpus // degrees.tp // degrees.pp
    for cp in _divisors(both, config.row_width // 2):
        for size in sizes:
            num, rest = divmod(batch, both // cp * size)
            if size <= batch and (packed or rest == 0):
                yield cp, both // cp, size, max(1, num + (rest > 0))


def _divisors(number: int, most: int) -> list[int]:
    return [each for each in range(1, min(number, most) + 1) if number % each == 0]
