"""Time of a step, by components: pure functions of a configuration, a layout and a cluster.

A step takes as long as its slowest pipeline stage needs for all microbatches, plus the bubble, exposed transfers, and
the update. Assumed to be hidden: sums of gradients behind the last backward pass and gathering of parameters behind the
first forward pass, if the configuration overlaps them; transfers between stages of an interleaved schedule except for
its warm-up; half of the tensor-parallel transfers of a backward pass, behind the gradients of weights.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from itertools import accumulate
from typing import assert_never

from mtrain.arch.activations import FP32_BYTES
from mtrain.arch.features import kinds
from mtrain.arch.features.feature import RankParameters, hidden_local, once_a_model
from mtrain.arch.flops import mfu, run_flops_per_token, sees_everything
from mtrain.arch.memory import own_shard, trained_parameters
from mtrain.config.schema.model import ModelSection
from mtrain.plan.search.hardware import Group, Transfer, gathered, reduced, sent
from mtrain.plan.search.layer_cost import LayerCost, Workload, layer_cost, logits_seconds

UPDATE_BYTES = 30
"""Bytes read and written per updated parameter: gradient, main weight, both moments, weight."""


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step on the ranks of the slowest stage."""

    matrices: float
    attention: float
    elementwise: float
    """Norms, activations, the logits' losses, and the host if it needs longer."""
    recompute: float
    """Forward passes of layers or modules that run again, with their transfers."""
    tp: float
    cp: float
    ep: float
    p2p: float
    """Transfers between stages."""
    bubble: float
    dp: float
    """Exposed time of gradients and parameters."""
    update: float

    def parts(self) -> dict[str, float]:
        return {each.name: getattr(self, each.name) for each in fields(self)}

    @property
    def total(self) -> float:
        return sum(self.parts().values())


@dataclass(frozen=True)
class StepCost:
    time: StepTime
    nvlink_bytes: float
    """Bytes that a rank sends inside its node."""
    network_bytes: float

    @property
    def bubble_share(self) -> float:
        return self.time.bubble / self.time.total


@dataclass
class _Stage:
    """Seconds of one pipeline rank, for one microbatch, forward and backward."""

    matrices: float = 0.0
    attention: float = 0.0
    elementwise: float = 0.0
    recompute: float = 0.0
    tp: float = 0.0
    cp: float = 0.0
    ep: float = 0.0
    sent: Transfer = field(default_factory=Transfer)

    @property
    def total(self) -> float:
        return self.matrices + self.attention + self.elementwise + self.recompute + self.tp + self.cp + self.ep


def step_cost(work: Workload) -> StepCost:
    """Predicts the cost of a step in which every row is full."""
    config, layout, cluster, _ = work
    stage = max(_stages(work), key=lambda each: each.total)
    num = work.num_microbatches
    bubble = (layout.pp - 1) / layout.vpp * stage.total
    p2p = _between_stages(work) if layout.pp > 1 else Transfer()
    exposed = 2 * num if layout.vpp == 1 else 2 * (layout.pp - 1)
    held = trained_parameters(config, layout, 0)
    sums, hidden = _data_parallel(work, stage, held)
    own = own_shard(config.train, layout, held)
    time = StepTime(
        matrices=num * stage.matrices,
        attention=num * stage.attention,
        elementwise=num * stage.elementwise,
        recompute=num * stage.recompute,
        tp=num * stage.tp,
        cp=num * stage.cp,
        ep=num * stage.ep,
        p2p=exposed * p2p.seconds,
        bubble=bubble,
        dp=sums.seconds - hidden,
        update=own * UPDATE_BYTES / cluster.gpu.memory_bandwidth,
    )
    moved = stage.sent * num + p2p * (2 * num * layout.vpp) + sums
    return StepCost(time, moved.nvlink_bytes, moved.network_bytes)


def least_microbatch_seconds(work: Workload) -> float:
    """Predicts the seconds of all stages together for one microbatch, forward and backward, without recomputation."""
    return sum(stage.total for stage in _stages(work))


def step_mfu(work: Workload, seconds: float) -> float:
    """Computes the share of the peak that the model's own arithmetic takes; recomputation does not count."""
    flops = run_flops_per_token(work.config) * work.tokens_of_step
    return mfu(flops, seconds, work.flops * work.layout.world_size)


def _stages(work: Workload) -> list[_Stage]:
    """Predicts every pipeline rank; layers of one kind cost the same."""
    model, layout = work.config.model, work.layout
    of_layers, before = _kinds(model)
    costs = {kind: layer_cost(work, kind) for kind in before}
    logits = logits_seconds(work) * model.num_predictions
    ends = list(accumulate(layout.layers_per_stage(model.num_layers), initial=0))
    found = []
    for pp_rank in range(layout.pp):
        own = [layout.stage(pp_rank, chunk) for chunk in range(layout.vpp)]
        held = {kind: sum(of[ends[each + 1]] - of[ends[each]] for each in own) for kind, of in before.items()}
        if pp_rank == layout.pp - 1:
            held[of_layers[-1]] += len(model.layers_ahead)
        stage, total = _Stage(), sum(held.values())
        for kind, count in held.items():
            _add(stage, work, costs[kind], count, count / total * _num_again(work, total))
        if pp_rank == layout.pp - 1:
            stage.matrices += logits * (1 + _backward(work))
        found.append(stage)
    return found


@once_a_model
def _kinds(model: ModelSection) -> tuple[list[int], dict[int, list[int]]]:
    """Returns, for each layer, the first layer that costs the same (the same parts and kind of window), and, for each
    of these, how many of its kind are among the first n layers."""
    first: dict[tuple[int, bool], int] = {}
    keys = ((parts, sees_everything(model, layer)) for layer, parts in enumerate(kinds(model)))
    found = [first.setdefault(key, layer) for layer, key in enumerate(keys)]
    return found, {kind: list(accumulate((each == kind for each in found), initial=0)) for kind in first.values()}


def _num_again(work: Workload, num_layers: int) -> int:
    """Counts the layers of a rank that run again as a whole."""
    train = work.config.train
    if train.recompute != "full":
        return 0
    limit = train.recompute_layers
    return num_layers if limit is None else min(num_layers, limit * work.layout.vpp)


def _backward(work: Workload) -> float:
    """Returns the products of a backward pass for each of a forward pass: gradients of inputs and of trained
    weights."""
    return 2.0 if work.config.adapter is None else 1.0


def _add(stage: _Stage, work: Workload, cost: LayerCost, count: int, again: float) -> None:
    """Adds `count` layers of one kind, of which `again` run twice."""
    slow = cost.compute - (cost.matrices + cost.attention + cost.elementwise)
    stage.matrices += count * cost.matrices * (1 + _backward(work))
    stage.attention += count * cost.attention * 3.5  # backward computes the scores once more
    stage.elementwise += count * 3 * (cost.elementwise + slow)
    stage.tp += count * cost.tp.seconds * 2  # backward has another transfer, behind the gradients of weights
    stage.cp += count * (cost.cp.seconds + cost.cp_backward.seconds)
    stage.ep += count * cost.ep.seconds * 2
    # if sequences are divided, backward gathers the inputs of a part once more for the gradients of weights
    transfers = cost.tp * (2.5 if work.layout.sp else 2) + cost.cp + cost.cp_backward + cost.ep * 2
    stage.sent += transfers * count
    forward = cost.compute + cost.tp.seconds + cost.cp.seconds + cost.ep.seconds
    train = work.config.train
    match train.recompute:
        case "none":
            return
        case "full":
            stage.recompute += again * forward
            stage.sent += (cost.tp + cost.cp + cost.ep) * again
        case "selective":
            stage.recompute += count * _selected(work, cost)
        case _:
            assert_never(train.recompute)


def _selected(work: Workload, cost: LayerCost) -> float:
    """Predicts the seconds of the modules that run again; a feed-forward part counts as two thirds of a layer's
    products."""
    modules = work.config.train.recompute_modules or ("core_attn",)
    seconds = cost.attention + cost.cp.seconds if "core_attn" in modules else 0.0
    if {"mlp", "moe"} & set(modules):
        seconds += 2 / 3 * (cost.matrices + cost.elementwise) + cost.ep.seconds + cost.tp.seconds / 2
    return seconds


def _between_stages(work: Workload) -> Transfer:
    """Predicts the transfer of one microbatch from one stage to the next."""
    layout = work.layout
    size = work.tokens * hidden_local(work.config.model, layout) * work.element_bytes
    return sent(work.cluster, layout.tp * layout.cp * layout.dp, size)


def _data_parallel(work: Workload, stage: _Stage, held: RankParameters) -> tuple[Transfer, float]:
    """Predicts sums of gradients and gathering of parameters, and the seconds of both that computation hides."""
    layout, cluster, train = work.layout, work.cluster, work.config.train
    groups = (
        (held.dense, Group(layout.dp * layout.cp, layout.tp)),
        (held.experts, Group(layout.edp, layout.etp * layout.ep)),
    )
    sums, gathers = Transfer(), Transfer()
    for number, group in groups:
        if train.distributed_optimizer:
            sums += gathered(cluster, group, number * FP32_BYTES)
            gathers += gathered(cluster, group, number * work.element_bytes)
        else:
            sums += reduced(cluster, group, number * FP32_BYTES)
    forward = (stage.matrices + stage.attention) / 3
    hidden = min(0.95 * sums.seconds, 2 * forward) if train.overlap_grad_reduce else 0.0
    hidden += min(0.95 * gathers.seconds, forward) if train.overlap_param_gather else 0.0
    return sums + gathers, hidden
