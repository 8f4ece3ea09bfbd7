"""Mamba-2: the state of each head is a matrix S, which every token decays and adds to.

With input x, step d and decay exp(-d exp(A_log)) of its head, and B and C of its group, a token computes

    S <- exp(-d exp(A_log)) S + d B x^T;   output = S^T C + D x

Sources: Dao and Gu 2024, "Transformers are SSMs", arXiv 2405.21060, sections 2.1 and 7.1; convolution, steps and gated
norm as in the published weights of Nemotron-H.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple, final

import torch
from torch import Tensor

from mtrain.config.schema.mamba import MambaSection
from mtrain.config.schema.model import ModelSection
from mtrain.verify.reference.model.attention_kind import AttentionKind, Shape
from mtrain.verify.reference.model.modules import Module, convolved, linear, silu
from mtrain.verify.reference.text import Rows


class _Projected(NamedTuple):
    """Outputs of the projection, [batch, seq, groups, ...]."""

    convolved: Tensor
    """C, B and the heads' inputs before the convolution."""
    gate: Tensor
    step: Tensor


@final
class Mamba(AttentionKind):
    """Layer with a state of fixed size, from which tokens remove nothing, instead of keys and values."""

    inputs = ("in_proj_zxbcdt",)
    group = "in_proj"

    def shapes(self, name: str, model: ModelSection) -> Iterator[tuple[str, Shape]]:
        section = _section(model)
        groups, rows = section.num_groups, _rows(section)
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
        section, parts = _section(part.model), _parts(part, x)
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
        gated = context * silu(_parts(part, x).gate.flatten(2))
        groups = gated.view(*context.shape[:2], _section(part.model).num_groups, -1)
        spread = torch.sqrt((groups * groups).mean(-1, keepdim=True) + part.model.norm_epsilon)
        return (groups / spread).flatten(2) * part.tensor("out_norm.weight") @ part.tensor("out_proj.weight").T

    def adapted(self, linear: str, every: Tensor, model: ModelSection) -> Mapping[str, Tensor] | None:
        return {"in_proj": {self.inputs[0]: every}, "out_proj": {"out_proj": every}}.get(linear)


def _section(model: ModelSection) -> MambaSection:
    assert model.mamba is not None
    return model.mamba


def _rows(section: MambaSection) -> list[int]:
    """Returns the rows per group in the projection: C, B and inputs; gates; steps."""
    shared = section.num_heads // section.num_groups
    return [2 * section.state_dim + shared * section.head_dim, shared * section.head_dim, shared]


def _parts(part: Module, x: Tensor) -> _Projected:
    section = _section(part.model)
    groups = linear(part, "in_proj", x).view(*x.shape[:2], section.num_groups, -1)
    return _Projected(*torch.split(groups, _rows(section), dim=-1))
