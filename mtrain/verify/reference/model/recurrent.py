"""Layers with a state of fixed size, a matrix S per head, instead of keys and values.

Gated delta net: every token decays and corrects the state. With unit query q, unit key k, value v, decay a and step b

    S <- a S;   S <- S + k (b (v - S^T k))^T;   output = S^T q / sqrt(key_head_dim)

Mamba-2: every token decays the state and adds to it. With input x, step d and decay exp(-d exp(A_log)) of its head, and
B and C of its group

    S <- exp(-d exp(A_log)) S + d B x^T;   output = S^T C + D x

Sources: Yang et al. 2024, "Gated Delta Networks", arXiv 2412.06464, equation 10; convolution, decay of each head and
gated norm as in the published weights of Qwen3-Next. Dao and Gu 2024, "Transformers are SSMs", arXiv 2405.21060,
sections 2.1 and 7.1; convolution, steps and gated norm as in the published weights of Nemotron-H.
"""

import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple, final

import torch
from torch import Tensor

from mtrain.config.schema.delta_net import DeltaNetSection
from mtrain.config.schema.mamba import MambaSection
from mtrain.config.schema.model import ModelSection
from mtrain.verify.reference.model.attention_kind import AttentionKind, Shape
from mtrain.verify.reference.model.modules import Module, convolved, linear, silu
from mtrain.verify.reference.text import Rows

_UNIT_EPSILON = 1e-6
"""Summand of the squared length of queries and keys."""


class _Parts(NamedTuple):
    """Outputs of the projection, [batch, seq, key heads, ...]."""

    convolved: Tensor
    """Query, key and values before the convolution."""
    gate: Tensor
    step: Tensor
    decay: Tensor


@final
class DeltaNet(AttentionKind):
    """Layer with a state of fixed size instead of keys and values."""

    inputs = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
    group = "in_proj"

    def shapes(self, name: str, model: ModelSection) -> Iterator[tuple[str, Shape]]:
        section = _delta_section(model)
        heads, rows = section.num_key_heads, _delta_rows(section)
        yield f"{name}.in_proj.weight", (heads * sum(rows), model.hidden_size)
        yield f"{name}.conv1d.weight", (heads * rows[0], 1, section.conv_kernel)
        yield f"{name}.dt_bias", (section.num_value_heads,)
        yield f"{name}.A_log", (section.num_value_heads,)
        yield f"{name}.out_norm.weight", (section.value_head_dim,)
        yield f"{name}.out_proj.weight", (model.hidden_size, section.num_value_heads * section.value_head_dim)

    def context(self, part: Module, layer: int, x: Tensor, rows: Rows) -> Tensor:
        section, parts = _delta_section(part.model), _delta_parts(part, x)
        size, shared = section.key_head_dim, section.num_value_heads // section.num_key_heads
        smooth = convolved(parts.convolved.flatten(2), part.tensor("conv1d.weight").squeeze(1), None, rows.documents)
        heads = smooth.view(parts.convolved.shape)
        # [batch, seq, value heads, size]: value head h has the query and the key of key head h // shared
        query = _unit(heads[..., :size]).repeat_interleave(shared, dim=2) / math.sqrt(size)
        key = _unit(heads[..., size : 2 * size]).repeat_interleave(shared, dim=2)
        value = heads[..., 2 * size :].reshape(*x.shape[:2], section.num_value_heads, section.value_head_dim)
        rate = torch.log1p(torch.exp(parts.decay.flatten(2) + part.tensor("dt_bias")))
        decay = torch.exp(-torch.exp(part.tensor("A_log")) * rate)
        step = 1 / (1 + torch.exp(-parts.step.flatten(2)))
        state = torch.zeros(len(x), section.num_value_heads, size, section.value_head_dim).to(value)
        outputs = []
        for t in range(x.shape[1]):
            if t > 0:
                goes_on = rows.documents[:, t] == rows.documents[:, t - 1]
                state = state * goes_on[:, None, None, None] * decay[:, t, :, None, None]
            error = value[:, t] - torch.einsum("bhkv,bhk->bhv", state, key[:, t])
            state = state + torch.einsum("bhk,bhv->bhkv", key[:, t], step[:, t, :, None] * error)
            outputs.append(torch.einsum("bhkv,bhk->bhv", state, query[:, t]))
        return torch.stack(outputs, dim=1).flatten(2)

    def projected(self, part: Module, x: Tensor, context: Tensor) -> Tensor:
        size, gate = _delta_section(part.model).value_head_dim, _delta_parts(part, x).gate.flatten(2)
        heads = context.view(*context.shape[:2], -1, size)
        spread = torch.sqrt((heads * heads).mean(-1, keepdim=True) + part.model.norm_epsilon)
        normed = (heads / spread * part.tensor("out_norm.weight")).flatten(2)
        return silu(gate) * normed @ part.tensor("out_proj.weight").T

    def adapted(self, linear: str, every: Tensor, model: ModelSection) -> Mapping[str, Tensor] | None:
        if linear != "in_proj":
            return {"out_proj": every} if linear == "out_proj" else None
        section = _delta_section(model)
        parts = torch.split(every.view(section.num_key_heads, -1), _delta_rows(section), dim=1)
        return {name: rows.flatten() for name, rows in zip(self.inputs, parts, strict=True)}


def _delta_section(model: ModelSection) -> DeltaNetSection:
    assert model.delta_net is not None
    return model.delta_net


def _delta_rows(section: DeltaNetSection) -> list[int]:
    """Returns the rows per key head in the projection: query, key and values; gates; steps; decays."""
    shared = section.num_value_heads // section.num_key_heads
    values = shared * section.value_head_dim
    return [2 * section.key_head_dim + values, values, shared, shared]


def _delta_parts(part: Module, x: Tensor) -> _Parts:
    section = _delta_section(part.model)
    heads = linear(part, "in_proj", x).view(*x.shape[:2], section.num_key_heads, -1)
    return _Parts(*torch.split(heads, _delta_rows(section), dim=-1))


def _unit(vectors: Tensor) -> Tensor:
    return vectors / torch.sqrt((vectors * vectors).sum(-1, keepdim=True) + _UNIT_EPSILON)


class _Projected(NamedTuple):
    """Outputs of the projection, [batch, seq, groups, ...]."""

    convolved: Tensor
    """C, B and the heads' inputs before the convolution."""
    gate: Tensor
    step: Tensor


@final
class Mamba(AttentionKind):
    """Layer with a state of fixed size, to which tokens only add, instead of keys and values."""

    inputs = ("in_proj_zxbcdt",)
    group = "in_proj"

    def shapes(self, name: str, model: ModelSection) -> Iterator[tuple[str, Shape]]:
        section = _mamba_section(model)
        groups, rows = section.num_groups, _mamba_rows(section)
        heads = section.num_heads
        yield f"{name}.in_proj.weight", (groups * sum(rows), model.hidden_size)
        yield f"{name}.conv1d.weight", (groups * rows[0], 1, section.conv_kernel)
        if section.conv_bias:
            yield f"{name}.conv1d.bias", (groups * rows[0],)
        yield f"{name}.dt_bias", (heads,)
        yield f"{name}.A_log", (heads,)
        yield f"{name}.D", (heads,)
        yield f"{name}.out_norm.weight", (heads * section.head_dim,)
        yield f"{name}.out_proj.weight", (model.hidden_size, heads * section.head_dim)

    def context(self, part: Module, layer: int, x: Tensor, rows: Rows) -> Tensor:
        section, parts = _mamba_section(part.model), _mamba_parts(part, x)
        size, shared = section.state_dim, section.num_heads // section.num_groups
        weight, bias = part.tensor("conv1d.weight").squeeze(1), part.get("conv1d.bias")
        smooth = convolved(parts.convolved.flatten(2), weight, bias, rows.documents).view(parts.convolved.shape)
        # [batch, seq, heads, size]: head h reads and writes with C and B of group h // shared
        reading = smooth[..., :size].repeat_interleave(shared, dim=2)
        writing = smooth[..., size : 2 * size].repeat_interleave(shared, dim=2)
        inputs = smooth[..., 2 * size :].reshape(*x.shape[:2], section.num_heads, section.head_dim)
        step = torch.log1p(torch.exp(parts.step.flatten(2) + part.tensor("dt_bias"))).clamp(min=section.step_min)
        decay = torch.exp(-torch.exp(part.tensor("A_log")) * step)
        state = torch.zeros(len(x), section.num_heads, size, section.head_dim).to(inputs)
        outputs = []
        for t in range(x.shape[1]):
            if t > 0:
                goes_on = rows.documents[:, t] == rows.documents[:, t - 1]
                state = state * goes_on[:, None, None, None] * decay[:, t, :, None, None]
            state = state + torch.einsum("bhn,bhp->bhnp", writing[:, t], step[:, t, :, None] * inputs[:, t])
            outputs.append(torch.einsum("bhnp,bhn->bhp", state, reading[:, t]))
        return (torch.stack(outputs, dim=1) + part.tensor("D")[:, None] * inputs).flatten(2)

    def projected(self, part: Module, x: Tensor, context: Tensor) -> Tensor:
        gated = context * silu(_mamba_parts(part, x).gate.flatten(2))
        groups = gated.view(*context.shape[:2], _mamba_section(part.model).num_groups, -1)
        spread = torch.sqrt((groups * groups).mean(-1, keepdim=True) + part.model.norm_epsilon)
        return (groups / spread).flatten(2) * part.tensor("out_norm.weight") @ part.tensor("out_proj.weight").T

    def adapted(self, linear: str, every: Tensor, model: ModelSection) -> Mapping[str, Tensor] | None:
        return {"in_proj": {self.inputs[0]: every}, "out_proj": {"out_proj": every}}.get(linear)


def _mamba_section(model: ModelSection) -> MambaSection:
    assert model.mamba is not None
    return model.mamba


def _mamba_rows(section: MambaSection) -> list[int]:
    """Returns the rows per group in the projection: C, B and inputs; gates; steps."""
    shared = section.num_heads // section.num_groups
    return [2 * section.state_dim + shared * section.head_dim, shared * section.head_dim, shared]


def _mamba_parts(part: Module, x: Tensor) -> _Projected:
    section = _mamba_section(part.model)
    groups = linear(part, "in_proj", x).view(*x.shape[:2], section.num_groups, -1)
    return _Projected(*torch.split(groups, _mamba_rows(section), dim=-1))
