"""Time of a step, by components: pure functions of a configuration, a layout and a cluster.

Every component is a roofline. Matrix products run at the device's peak times an efficiency that falls with their
smallest dimension, limited by memory bandwidth; fused attention has its own efficiency; everything else is
memory-bound. A step takes as long as its slowest pipeline stage needs for all microbatches, plus the bubble, exposed
transfers, and the update. These are assumed to overlap with computation: gradient reductions with the last backward
pass and parameter gathers with the first forward pass, if the configuration overlaps them; with divided weights, those
of a layer with the computation of another; transfers between stages of
an interleaved schedule except during its warm-up; half of the tensor-parallel transfers of a backward pass, with the
gradients of weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import accumulate
from typing import NamedTuple, assert_never

from mtrain.arch.adapters import trained_with_frozen
from mtrain.arch.features import LAYER_PARTS, kinds
from mtrain.arch.features.feature import LayerPart, RankParameters, hidden_local, once_a_model
from mtrain.arch.features.outside import num_passed_features, patches_of_tokens, recomputes_layers
from mtrain.arch.flops import merger_passes, mfu, num_attended_pairs, run_flops_per_token, sees_everything
from mtrain.arch.layout import Layout, most_microbatches
from mtrain.arch.memory import own_shard, root_elements, trained_parameters
from mtrain.arch.parameters import FP32_BYTES, element_bytes, output_columns
from mtrain.config import Config
from mtrain.config.schema.model import ModelSection
from mtrain.config.towers import description_of
from mtrain.plan.search.hardware import Cluster, Group, Transfer, exchanged, gathered, reduced, sent

HALF_EFFICIENT = 160
"""Smallest dimension at which a product has half the efficiency, since tiles of 128 x 256 elements then fill a device
only partly."""
LAUNCHES = 45
"""Kernel launches of a layer per direction."""
TOUCHES = 2.5
"""How often elementwise kernels of the forward pass read or write each element that is saved for the backward pass."""
UPDATE_BYTES = 30
"""Bytes read and written per updated parameter: gradient, main weight, both moments, weight."""


class PackedSteps(NamedTuple):
    """Means over the steps of a run with packed rows."""

    num_microbatches: float
    """Forward passes of a rank per step."""
    attended_share: float
    """Pairs of tokens that attend to each other in packed rows, relative to rows with one sample."""


class Workload(NamedTuple):
    """A configuration under a layout on a cluster."""

    config: Config
    layout: Layout
    cluster: Cluster
    packed: PackedSteps | None = None
    """Means over the steps if the lengths of samples are known; None: every row counts as one full sample."""

    @property
    def num_microbatches(self) -> float:
        return most_microbatches(self.config, self.layout) if self.packed is None else self.packed.num_microbatches

    @property
    def tokens(self) -> float:
        """Positions of a microbatch on one rank, before sequence parallelism divides them."""
        return self.config.train.micro_batch_size * self.config.row_width / self.layout.cp

    @property
    def tokens_of_step(self) -> int:
        """Positions of all rows of a step, with every row full."""
        num = most_microbatches(self.config, self.layout)
        return num * self.config.train.micro_batch_size * self.config.row_width * self.layout.dp

    @property
    def flops(self) -> float:
        """Device's peak at the run's precision, in FLOP/s."""
        gpu = self.cluster.gpu
        return gpu.fp32_flops if self.config.train.precision == "fp32" else gpu.flops

    @property
    def element_bytes(self) -> int:
        return element_bytes(self.config.train)


@dataclass
class StepTime:
    """Seconds of a step on the ranks of the slowest stage, or of one microbatch on one stage."""

    matrices: float = 0.0
    attention: float = 0.0
    elementwise: float = 0.0
    """Norms, activations and losses, and the time by which kernel launches exceed the kernels."""
    recompute: float = 0.0
    """Repeated forward passes of layers or modules, with their transfers."""
    tp: float = 0.0
    cp: float = 0.0
    ep: float = 0.0
    p2p: float = 0.0
    """Transfers between stages."""
    bubble: float = 0.0
    dp: float = 0.0
    """Exposed time of gradient reductions and parameter gathers."""
    update: float = 0.0

    def parts(self) -> dict[str, float]:
        return {part.name: getattr(self, part.name) for part in fields(self)}

    @property
    def total(self) -> float:
        return sum(self.parts().values())


@dataclass
class StepCost:
    time: StepTime = field(default_factory=StepTime)
    sent: Transfer = field(default_factory=Transfer)
    """Bytes that a rank sends, and their seconds without overlap."""

    @property
    def bubble_share(self) -> float:
        return self.time.bubble / self.time.total


def step_cost(work: Workload) -> StepCost:
    """Predicts the cost of a step in which every row is full."""
    config, layout, cluster, _ = work
    stage = max(_stages(work), key=lambda cost: cost.time.total)
    num = work.num_microbatches
    p2p = _between_stages(work) if layout.pp > 1 else Transfer()
    exposed = 2 * num if layout.vpp == 1 else 2 * (layout.pp - 1)
    parameters = trained_parameters(config, layout, 0)
    sums, hidden = _data_parallel(work, stage.time, parameters)
    time = StepTime(**{name: num * seconds for name, seconds in stage.time.parts().items()})
    time.p2p = exposed * p2p.seconds
    time.bubble = (layout.pp - 1) / layout.vpp * stage.time.total
    time.dp = sums.seconds - hidden
    time.update = (
        own_shard(config.train, config.model, layout, parameters) * UPDATE_BYTES / cluster.gpu.memory_bandwidth
    )
    return StepCost(time, stage.sent * num + p2p * (2 * num * layout.vpp) + sums)


def least_microbatch_seconds(work: Workload) -> float:
    """Predicts the sum of all stages' seconds for one microbatch, forward and backward, without recomputation."""
    return sum(stage.time.total for stage in _stages(work))


def step_mfu(work: Workload, seconds: float) -> float:
    """Computes the model FLOPs utilisation (MFU) of a step; recomputation does not count as model FLOPs."""
    flops = run_flops_per_token(work.config) * work.tokens_of_step
    return mfu(flops, seconds, work.flops * work.layout.world_size)


def _stages(work: Workload) -> list[StepCost]:
    """Predicts a microbatch's cost, forward and backward, on every pipeline rank; layers of one kind cost the same."""
    model, layout = work.config.model, work.layout
    kind_of_layer, counts_before = _kinds(model)
    costs = {kind: layer_cost(work, kind) for kind in counts_before}
    logits = logits_seconds(work) * model.num_predictions
    ends = list(accumulate(layout.layers_per_stage(model.num_layers), initial=0))
    stages = []
    for pp_rank in range(layout.pp):
        chunks = [layout.stage(pp_rank, chunk) for chunk in range(layout.vpp)]
        counts = {
            kind: sum(before[ends[chunk + 1]] - before[ends[chunk]] for chunk in chunks)
            for kind, before in counts_before.items()
        }
        if pp_rank == layout.pp - 1:
            counts[kind_of_layer[-1]] += len(model.layers_ahead)
        stage, total = StepCost(), sum(counts.values())
        for kind, count in counts.items():
            _add(stage, work, costs[kind], count, count / total * _num_again(work, total))
        if pp_rank == 0:
            _add_tower(stage.time, work)
        if pp_rank == layout.pp - 1:
            stage.time.matrices += logits * (1 + _backward(work))
        stage.time.elementwise += _accumulation_seconds(work, pp_rank)
        stages.append(stage)
    return stages


def _add_tower(time: StepTime, work: Workload) -> None:
    """Adds the vision tower's products and elementwise kernels for a microbatch whose tokens are all of images."""
    config, gpu, vision = work.config, work.cluster.gpu, work.config.model.vision
    of_row, of_image = patches_of_tokens(vision, config.data, config.row_width)
    if vision is None or of_row == 0:
        return
    tower, patches = description_of(vision), config.train.micro_batch_size * of_row / work.layout.num_sharing_images
    blocks = sum(product_seconds(work, patches, rows, depth) for rows, depth in tower.layer_matrices(vision))
    features = patches / vision.patches_per_feature
    sizes_of_projector = tower.projections(vision, config.model.hidden_size)
    mergers = sum(product_seconds(work, features, rows, depth) for rows, depth in sizes_of_projector)
    attention = 2 * 2 * vision.hidden_size * patches * of_image / (work.flops * gpu.attention_efficiency)
    kept = tower.kept_layer_elements(vision, is_half=work.element_bytes < FP32_BYTES)
    moved = TOUCHES * patches * kept * work.element_bytes
    passes = 1 + 2 * (not vision.freeze_tower)
    time.matrices += passes * vision.num_layers * blocks
    time.matrices += merger_passes(vision) * mergers
    time.attention += (1 + 2.5 * (not vision.freeze_tower)) * vision.num_layers * attention
    time.elementwise += passes * vision.num_layers * moved / gpu.memory_bandwidth
    if recomputes_layers(vision, config.train):
        time.recompute += vision.num_layers * (blocks + attention + moved / gpu.memory_bandwidth)


@once_a_model
def _kinds(model: ModelSection) -> tuple[list[int], dict[int, list[int]]]:
    """Returns the kind of each layer (the first layer that costs the same), and kind -> its count among the first n
    layers, for n from 0."""
    first: dict[tuple[int, bool], int] = {}
    keys = ((parts, sees_everything(model, layer)) for layer, parts in enumerate(kinds(model)))
    kind_of_layer = [first.setdefault(key, layer) for layer, key in enumerate(keys)]
    counts = {kind: list(accumulate((other == kind for other in kind_of_layer), initial=0)) for kind in first.values()}
    return kind_of_layer, counts


def _accumulation_seconds(work: Workload, pp_rank: int) -> float:
    """Predicts the time to add the gradients of one microbatch to their float32 sums.

    A sum is read and written. A gradient that a product wrote is read once more; a fused product adds to the sum
    directly and writes no gradient. Divided weights are copied from the buffers of both gathers, and gradients to that
    of their sum.
    """
    trained, size = trained_parameters(work.config, work.layout, pp_rank).total, work.element_bytes
    moved = 2 * FP32_BYTES + (-size if work.config.fuses_weight_gradients else size)
    if work.layout.shard == "weights":
        moved = 2 * (size + size) + (size + FP32_BYTES)
    return trained * moved / work.cluster.gpu.memory_bandwidth


def _num_again(work: Workload, num_layers: int) -> int:
    """Counts the layers of a rank that full recomputation repeats."""
    train = work.config.train
    if train.recompute != "full":
        return 0
    limit = train.recompute_layers
    return num_layers if limit is None else min(num_layers, limit * work.layout.vpp)


def _backward(work: Workload) -> float:
    """Returns the number of backward products per forward product: for inputs and, if trained, for weights."""
    return 2.0 if trained_with_frozen(work.config.model, work.config.adapter) is None else 1.0


def _add(stage: StepCost, work: Workload, cost: LayerCost, count: int, num_again: float) -> None:
    time, train = stage.time, work.config.train
    launch_excess = cost.compute - (cost.matrices + cost.attention + cost.elementwise)
    time.matrices += count * cost.matrices * (1 + _backward(work))
    time.attention += count * cost.attention * 3.5  # backward computes the scores once more
    time.elementwise += count * 3 * (cost.elementwise + launch_excess)
    time.tp += count * cost.tp.seconds * 2  # half of backward's transfers hide behind the gradients of weights
    time.cp += count * (cost.cp.seconds + cost.cp_backward.seconds)
    time.ep += count * cost.ep.seconds * 2
    # with sequence parallelism, backward gathers the inputs once more for the gradients of weights
    transfers = cost.tp * (2.5 if work.layout.sp else 2) + cost.cp + cost.cp_backward + cost.ep * 2
    stage.sent += transfers * count
    match train.recompute:
        case "none":
            return
        case "full":
            time.recompute += num_again * (cost.compute + cost.tp.seconds + cost.cp.seconds + cost.ep.seconds)
            stage.sent += (cost.tp + cost.cp + cost.ep) * num_again
        case "selective":
            time.recompute += count * _selected(work, cost)
        case _:
            assert_never(train.recompute)


def _selected(work: Workload, cost: LayerCost) -> float:
    """Predicts the seconds of selectively recomputed modules; a feed-forward part counts as two thirds of a layer."""
    modules = work.config.train.recompute_modules or ("core_attn",)
    seconds = cost.attention + cost.cp.seconds if "core_attn" in modules else 0.0
    if {"mlp", "moe"} & set(modules):
        seconds += 2 / 3 * (cost.matrices + cost.elementwise) + cost.ep.seconds + cost.tp.seconds / 2
    return seconds


def _between_stages(work: Workload) -> Transfer:
    """Predicts the transfer of one microbatch from one stage to the next."""
    layout = work.layout
    size = work.tokens * hidden_local(work.config.model, layout) * work.element_bytes
    return sent(work.cluster, layout.tp * layout.cp * layout.dp, (1 + num_passed_features(work.config.model)) * size)


def _data_parallel(work: Workload, stage: StepTime, parameters: RankParameters) -> tuple[Transfer, float]:
    """Predicts the transfers of gradients and parameters, and the seconds of them that computation hides."""
    layout, cluster, train = work.layout, work.cluster, work.config.train
    groups = (
        (parameters.dense, Group(layout.dp * layout.cp, layout.tp)),
        (parameters.experts, Group(layout.edp, layout.etp * layout.ep)),
    )
    if layout.shard == "weights":
        return _layer_by_layer(work, stage, groups)
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


def _layer_by_layer(work: Workload, stage: StepTime, groups: Sequence[tuple[int, Group]]) -> tuple[Transfer, float]:
    """Predicts the transfers of divided weights, and the seconds that computation hides. Each microbatch gathers every
    layer before its forward and its backward pass, and sums its gradients, while other layers compute."""
    layers = work.config.model.num_layers / work.layout.pp
    gathers, sums = Transfer(), Transfer()
    for number, group in groups:
        if number:
            gathers += gathered(work.cluster, group, number / layers * work.element_bytes) * layers
            sums += gathered(work.cluster, group, number / layers * FP32_BYTES) * layers
    root = root_elements(work.config.model, work.layout, 0) * work.element_bytes
    again = gathers + gathered(work.cluster, groups[0][1], root) * -1  # the output layer stays gathered
    forward = (stage.matrices + stage.attention) / 3
    hidden = min(0.95 * gathers.seconds, forward)
    hidden += min(0.95 * (again + sums).seconds, 2 * forward + stage.recompute)
    return (gathers + again + sums) * work.num_microbatches, hidden * work.num_microbatches


@dataclass(frozen=True)
class LayerCost:
    """Seconds of a layer's forward pass of one microbatch; the backward pass is a multiple of it."""

    matrices: float
    attention: float
    elementwise: float
    least: float
    """Seconds that the host needs to launch all kernels."""
    tp: Transfer
    cp: Transfer
    cp_backward: Transfer
    ep: Transfer

    @property
    def compute(self) -> float:
        return max(self.matrices + self.attention + self.elementwise, self.least)


def product_seconds(work: Workload, rows: float, width: float, depth: float) -> float:
    """Predicts the seconds of the product [rows, depth] x [depth, width]."""
    gpu = work.cluster.gpu
    flops = 2 * rows * width * depth
    smallest = min(rows, width, depth)
    efficiency = gpu.matrix_efficiency * smallest / (smallest + HALF_EFFICIENT)
    moved = work.element_bytes * (rows * depth + depth * width + rows * width)
    return max(flops / (work.flops * efficiency), moved / gpu.memory_bandwidth)


def layer_cost(work: Workload, layer: int) -> LayerCost:
    """Predicts the forward pass of layer `layer`, counted from 0."""
    config, layout, cluster, packed = work
    model = config.model
    parts = [part for part in LAYER_PARTS if part.is_in(model, layer)]
    matrices = sum(_matrix_seconds(work, part) for part in parts)
    window = None if sees_everything(model, layer) else model.sliding_window
    pairs = config.train.micro_batch_size * num_attended_pairs(config.row_width, window) / layout.cp / layout.tp
    pairs *= 1.0 if packed is None or window is not None else packed.attended_share
    products = sum(part.pair_products(model) for part in parts)
    attention = 2 * products * pairs / (work.flops * cluster.gpu.attention_efficiency)
    saved_elements = sum(part.kept_elements(model, layout) for part in parts)
    moved = TOUCHES * work.tokens * (saved_elements + 4 * hidden_local(model, layout)) * work.element_bytes
    tp, ep = _transfers(work, layer)
    cp, cp_backward = _context_transfers(work, layer, attention)
    launches = LAUNCHES * cluster.launch_s
    return LayerCost(matrices, attention, moved / cluster.gpu.memory_bandwidth, launches, tp, cp, cp_backward, ep)


def logits_seconds(work: Workload) -> float:
    """Predicts the seconds of the output layer's forward pass and the loss, for one predicted token per position."""
    width = output_columns(work.config.model, work.layout.tp)
    product = product_seconds(work, work.tokens, width, work.config.model.hidden_size)
    return product + TOUCHES * work.tokens * width * 4 / work.cluster.gpu.memory_bandwidth


def _matrix_seconds(work: Workload, part: LayerPart) -> float:
    model, layout, tokens = work.config.model, work.layout, work.tokens
    sizes = part.matrices(model)
    hidden, seconds = model.hidden_size, 0.0
    if sizes.divided:
        # two products, such as qkv and proj or fc1 and fc2, have this many columns together
        width = sizes.divided / layout.tp / hidden
        seconds += 2 * product_seconds(work, tokens, width / 2, hidden)
    if sizes.replicated:
        local_tokens = tokens / layout.tp if layout.sp else tokens
        seconds += product_seconds(work, local_tokens, sizes.replicated / hidden, hidden)
    if sizes.experts and model.experts is not None:
        local = model.experts.num_experts / layout.ep
        rows = tokens / layout.tp * layout.ep * layout.etp * model.experts.rows_per_token / model.experts.num_experts
        width = sizes.experts / model.experts.num_experts / layout.etp / hidden
        seconds += local * 2 * product_seconds(work, rows, width / 2, hidden) / work.cluster.gpu.grouped_share
    return seconds


def _transfers(work: Workload, layer: int) -> tuple[Transfer, Transfer]:
    layout, cluster, model = work.layout, work.cluster, work.config.model
    hidden_bytes = work.tokens * model.hidden_size * work.element_bytes
    # tokens are gathered before attention and dense feed-forward parts, and scattered after; experts use dispatch
    num_parts = (model.attention(layer) != "none") + model.has_dense(layer)
    tp = gathered(cluster, Group(layout.tp, 1), hidden_bytes) * (2 * num_parts)
    if model.experts is None or not model.has_experts(layer):
        return tp, Transfer()
    local_bytes = hidden_bytes / layout.tp * model.experts.rows_per_token
    # to the experts and back; etp ranks gather the tokens that each of them received
    dispatch = exchanged(cluster, Group(layout.ep, layout.etp), local_bytes)
    return tp, dispatch * 2 + gathered(cluster, Group(layout.etp, 1), local_bytes * layout.etp) * 2


def _context_transfers(work: Workload, layer: int, attention: float) -> tuple[Transfer, Transfer]:
    """Predicts the transfers of cp, forward and backward.

    Args:
        attention: Seconds of attention's products in the forward pass, behind which a ring hides.
    """
    layout, cluster, tokens = work.layout, work.cluster, work.tokens
    model, size, cp = work.config.model, work.element_bytes, layout.cp
    group = Group(cp, layout.tp)
    if cp == 1:
        return Transfer(), Transfer()
    global_heads = model.global_attention if model.attention(layer) == "global" else None
    head_size = model.head_size if global_heads is None else global_heads.head_dim
    heads = tokens * model.num_attention_heads * head_size / layout.tp
    num_groups = model.query_groups if global_heads is None else global_heads.num_query_groups
    groups = tokens * num_groups * head_size / layout.tp
    match layout.cp_comm:
        case "ulysses":
            exchange = exchanged(cluster, group, (2 * heads + 2 * groups) * size)
            return exchange, exchange
        case "allgather":
            gather = gathered(cluster, group, cp * 2 * groups * size)
            return gather, gather
        case "ring":
            # hops to all other ranks, each during the products of the previous hop
            hops = gathered(cluster, group, cp * 2 * groups * size)
            # float32 gradients travel around the whole ring, together with the keys and values
            home = gathered(cluster, group, cp * 2 * groups * 4) * (cp / (cp - 1))
            hidden = attention * (cp - 1) / cp
            return _behind(hops, hidden), _behind(hops + home, 2.5 * hidden)
        case _:
            assert_never(layout.cp_comm)


def _behind(transfer: Transfer, seconds: float) -> Transfer:
    """Subtracts `seconds` of computation, which hides them, from the transfer's time."""
    return replace(transfer, seconds=max(0.0, transfer.seconds - seconds))
