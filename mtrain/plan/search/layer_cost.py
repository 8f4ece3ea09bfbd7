"""Cost of one layer, and of the logits, on a rank for one microbatch: pure functions of sizes.

Products of matrices run at the device's peak times an efficiency that falls with their smallest dimension, and not
faster than memory feeds them; fused attention has its own efficiency; everything else is bound by memory.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple, assert_never

from mtrain.arch.activations import element_bytes
from mtrain.arch.features import LAYER_PARTS
from mtrain.arch.features.feature import LayerPart, hidden_local
from mtrain.arch.flops import num_attended_pairs, sees_everything
from mtrain.arch.layout import Layout, most_microbatches
from mtrain.arch.parameters import output_columns
from mtrain.config import Config
from mtrain.plan.search.hardware import Cluster, Group, Transfer, exchanged, gathered

HALF_EFFICIENT = 160
"""Smallest dimension of a product that halves the efficiency: tiles of 128 x 256 elements fill a device partly."""
LAUNCHES = 45
"""Kernels of a layer in one direction."""
TOUCHES = 2.5
"""How often elementwise kernels read or write, forward, each element that the backward pass keeps."""


class PackedSteps(NamedTuple):
    """Means over the steps of a run whose samples share rows."""

    num_microbatches: float
    """Forward passes of a rank in a step."""
    attended_share: float
    """Pairs of tokens that attention sees, each sample alone, relative to rows of one sample."""


class Workload(NamedTuple):
    """A configuration under a layout on a cluster."""

    config: Config
    layout: Layout
    cluster: Cluster
    packed: PackedSteps | None = None
    """Means over the steps if the lengths of samples are known; None: as if no samples shared a row."""

    @property
    def num_microbatches(self) -> float:
        return most_microbatches(self.config, self.layout) if self.packed is None else self.packed.num_microbatches

    @property
    def tokens(self) -> float:
        """Counts the positions of a microbatch on one rank, not divided by sequence parallelism."""
        return self.config.train.micro_batch_size * self.config.row_width / self.layout.cp

    @property
    def tokens_of_step(self) -> int:
        """Counts the positions of all rows of a step, each full."""
        num = most_microbatches(self.config, self.layout)
        return num * self.config.train.micro_batch_size * self.config.row_width * self.layout.dp

    @property
    def flops(self) -> float:
        """Returns the device's peak at the run's precision, in FLOP/s."""
        gpu = self.cluster.gpu
        return gpu.fp32_flops if self.config.train.precision == "fp32" else gpu.flops

    @property
    def element_bytes(self) -> int:
        return element_bytes(self.config.train)


@dataclass(frozen=True)
class LayerCost:
    """Seconds of the forward pass of one microbatch; backward is a multiple of it."""

    matrices: float
    attention: float
    elementwise: float
    least: float
    """Seconds in which the host launches all kernels."""
    tp: Transfer
    cp: Transfer
    cp_backward: Transfer
    ep: Transfer

    @property
    def compute(self) -> float:
        return max(self.matrices + self.attention + self.elementwise, self.least)


def product_seconds(work: Workload, rows: float, width: float, depth: float) -> float:
    """Predicts the time of [rows, depth] x [depth, width]."""
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
    kept = sum(part.kept_elements(model, layout) for part in parts)
    moved = TOUCHES * work.tokens * (kept + 4 * hidden_local(model, layout)) * work.element_bytes
    tp, ep = _transfers(work, layer)
    cp, cp_backward = _context_transfers(work, layer, attention)
    launches = LAUNCHES * cluster.launch_s
    return LayerCost(matrices, attention, moved / cluster.gpu.memory_bandwidth, launches, tp, cp, cp_backward, ep)


def logits_seconds(work: Workload) -> float:
    """Predicts the output layer's forward pass for one predicted token, and the losses, which read the logits."""
    width = output_columns(work.config.model, work.layout.tp)
    product = product_seconds(work, work.tokens, width, work.config.model.hidden_size)
    return product + TOUCHES * work.tokens * width * 4 / work.cluster.gpu.memory_bandwidth


def _matrix_seconds(work: Workload, part: LayerPart) -> float:
    model, layout, tokens = work.config.model, work.layout, work.tokens
    found = part.matrices(model)
    hidden, seconds = model.hidden_size, 0.0
    if found.divided:
        # two products, such as qkv and proj or fc1 and fc2, that together have this many columns
        width = found.divided / layout.tp / hidden
        seconds += 2 * product_seconds(work, tokens, width / 2, hidden)
    if found.replicated:
        own = tokens / layout.tp if layout.sp else tokens
        seconds += product_seconds(work, own, found.replicated / hidden, hidden)
    if found.experts and model.experts is not None:
        local = model.experts.num_experts / layout.ep
        rows = tokens / layout.tp * layout.ep * layout.etp * model.experts.top_k / model.experts.num_experts
        width = found.experts / model.experts.num_experts / layout.etp / hidden
        seconds += local * 2 * product_seconds(work, rows, width / 2, hidden)
    return seconds


def _transfers(work: Workload, layer: int) -> tuple[Transfer, Transfer]:
    """Predicts the transfers of tp and of ep, forward."""
    layout, cluster, tokens = work.layout, work.cluster, work.tokens
    model, size = work.config.model, work.element_bytes
    hidden_bytes = tokens * model.hidden_size * size
    has_experts = model.has_experts(layer) and model.experts is not None
    # before a part all tokens are gathered, and after it scattered; experts get theirs otherwise
    num_parts = (model.attention(layer) != "none") + model.has_dense(layer)
    tp = gathered(cluster, Group(layout.tp, 1), hidden_bytes) * (2 * num_parts)
    ep = Transfer()
    if has_experts and model.experts is not None:
        own = tokens / layout.tp * model.experts.top_k * model.hidden_size * size
        # there and back; the ranks of etp gather what each of them got
        ep = exchanged(cluster, Group(layout.ep, layout.etp), own) * 2
        ep += gathered(cluster, Group(layout.etp, 1), own * layout.etp) * 2
    return tp, ep


def _context_transfers(work: Workload, layer: int, attention: float) -> tuple[Transfer, Transfer]:
    """Predicts the transfers of cp, forward and backward; `attention` are the seconds of its products forward."""
    layout, cluster, tokens = work.layout, work.cluster, work.tokens
    model, size, cp = work.config.model, work.element_bytes, layout.cp
    group = Group(cp, layout.tp)
    if cp == 1:
        return Transfer(), Transfer()
    wide = model.global_attention if model.attention(layer) == "global" else None
    head_size = model.head_size if wide is None else wide.head_dim
    heads = tokens * model.num_attention_heads * head_size / layout.tp
    groups = tokens * (model.query_groups if wide is None else wide.num_query_groups) * head_size / layout.tp
    match layout.cp_comm:
        case "ulysses":
            exchange = exchanged(cluster, group, (2 * heads + 2 * groups) * size)
            return exchange, exchange
        case "allgather":
            gather = gathered(cluster, group, cp * 2 * groups * size)
            return gather, gather
        case "ring":
            # hops to all other ranks, each during the products of the hop before
            hops = gathered(cluster, group, cp * 2 * groups * size)
            # gradients travel all the way home, in float32, together with the keys and values
            home = gathered(cluster, group, cp * 2 * groups * 4) * (cp / (cp - 1))
            hidden = attention * (cp - 1) / cp
            return _behind(hops, hidden), _behind(hops + home, 2.5 * hidden)
        case _:
            assert_never(layout.cp_comm)


def _behind(transfer: Transfer, seconds: float) -> Transfer:
    """Returns the part of the transfer that `seconds` of arithmetic do not hide."""
    return replace(transfer, seconds=max(0.0, transfer.seconds - seconds))
