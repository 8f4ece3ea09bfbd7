"""Adapters of column- and row-parallel projections.

TP ranks exchange only the `rank` numbers per token between A and B: for a column-parallel projection the gradient of A
x (and under sp A x itself, gathered over the sequence), for a row-parallel one the sum of A x.

DoRA: y = m / |W + s B A| * (W x + s B A x), where the norms of rows are constants in backward, as in PEFT and in
section 4.3 of the paper. The rows of a row-parallel projection are spread over ranks, which sum their squares.

Sources: LoRA, arXiv 2106.09685; DoRA, arXiv 2402.09353.
"""

import itertools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from megatron.core import tensor_parallel
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer import TransformerConfig
from torch import Tensor, nn
from torch.nn import functional

from mtrain.config.schema.adapter import AdapterSection
from mtrain.core.layers.adapters.adapter import LORA_A, LORA_B, MAGNITUDE, Adapter
from mtrain.core.layers.attention.mla import ReplicatedLinear
from mtrain.core.layers.output_layer import Operands
from mtrain.core.layers.products import widened
from mtrain.core.layers.sharded_parameters import gathered_rows, held_values


class Fusion(NamedTuple):
    """Outputs of a linear module on one rank: groups, each with the same number of outputs of every part."""

    groups: int
    sizes: tuple[int, ...]
    """Number of outputs of each part in one group."""

    def width(self, part: int) -> int:
        """Returns the number of outputs of one part."""
        return self.groups * self.sizes[part]

    def joined(self, parts: Sequence[Tensor | None], fill: float, like: Tensor) -> Tensor:
        """Concatenates parts, [..., width] each, in the order of the fused module.

        A missing part (None) becomes `fill`; `like`, [..., any], determines the leading axes, the dtype and the device.
        """
        if len(parts) == 1 and parts[0] is not None:
            return parts[0]
        lead = like.shape[:-1]
        blocks = [
            like.new_full((), fill).expand(*lead, self.groups, size)
            if part is None
            else part.reshape(*lead, self.groups, size)
            for part, size in zip(parts, self.sizes, strict=True)
        ]
        return torch.cat(blocks, dim=-1).flatten(-2)

    def split(self, whole: Tensor) -> list[Tensor]:
        """Splits [..., all outputs] into the parts, [..., width] each: the inverse of `joined`."""
        if len(self.sizes) == 1:
            return [whole]
        grouped = whole.reshape(*whole.shape[:-1], self.groups, sum(self.sizes))
        edges = [0, *itertools.accumulate(self.sizes)]
        return [grouped[..., first:end].flatten(-2) for first, end in itertools.pairwise(edges)]


FrozenLinear: TypeAlias = ColumnParallelLinear | RowParallelLinear | ReplicatedLinear


class FusedParts(NamedTuple):
    """The parts of a projection, and which of them have adapters."""

    fusion: Fusion
    names: tuple[str, ...]
    """Names of all parts, in the order of the fusion."""
    adapted: frozenset[str]


class LinearAdapter(Adapter):
    """Low-rank pairs for the parts of one projection; a call returns the summand for its output."""

    def __init__(
        self,
        section: AdapterSection,
        config: TransformerConfig,
        tp: dist.ProcessGroup,
        linear: FrozenLinear,
        parts: FusedParts,
    ) -> None:
        super().__init__(section, config, tp)
        self._parts = parts
        self.is_row_parallel = isinstance(linear, RowParallelLinear)
        self._is_replicated = isinstance(linear, ReplicatedLinear)
        self._weight: Callable[[], Tensor] = lambda: linear.weight  # not a parameter of the adapter
        columns = linear.weight.shape[1]
        for part, name in enumerate(parts.names):
            if name not in parts.adapted:
                continue
            rows, rank = parts.fusion.width(part), section.rank_of(name)
            input_axis = 1 if self.is_row_parallel else None
            output_axis = None if self.is_row_parallel or self._is_replicated else 0
            self.add_parameter(f"{name}_{LORA_A}", (rank, columns), input_axis)
            is_halved = name == "gate_up_proj"
            self.add_parameter(f"{name}_{LORA_B}", (rows, rank), output_axis, name == "output", is_halved)
            if section.has_magnitudes:
                self.add_parameter(f"{name}_{MAGNITUDE}", (rows,), output_axis, is_halved=is_halved)

    def added(self, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> Any:
        """Returns the output of the projection, or the operands of its product, with the adapter added."""
        if isinstance(output, Operands):
            return self(inputs[0], output)
        if self._is_replicated:
            return output + self(inputs[0], output)
        whole, later_bias = output
        bias = module.bias if later_bias is None else None  # is in the output already; DoRA does not scale it
        plain = whole if not isinstance(bias, Tensor) else whole - bias
        return whole + self(inputs[0], plain), later_bias

    def forward(self, inputs: Tensor, plain: Tensor | Operands) -> Tensor | Operands:
        """Computes the summand for the output of the frozen projection, or the operands of both together.

        `plain` is the output without bias, [seq_local, batch, outputs], under sp of the whole sequence.
        """
        if isinstance(plain, Operands):
            return self._both(inputs, plain)
        names = [name for name in self._parts.names if name in self._parts.adapted]
        narrow = self._between(self._dropped(inputs), torch.cat([self._of(name, LORA_A) for name in names]))
        ranks = [self._section.rank_of(name) for name in names]
        by_part = dict(zip(names, torch.split(narrow, ranks, dim=-1), strict=True))
        wide = [
            functional.linear(by_part[name] * self._section.scale_of(name), self._of(name, LORA_B))
            if name in by_part
            else None
            for name in self._parts.names
        ]
        change = self._parts.fusion.joined(wide, 0.0, plain)
        if not self._section.has_magnitudes:
            return change
        lengths = self._lengths()
        return (lengths - 1.0) * plain + lengths * change

    def _both(self, inputs: Tensor, plain: Operands) -> Operands:
        """Returns the operands [x, scale A x] and [W, B] of W x + scale B A x. Copies W for each microbatch."""
        (name,) = self._parts.names
        narrow = self._between(self._dropped(inputs), self._of(name, LORA_A)) * self._section.scale_of(name)
        widened = torch.cat([plain.weight, self._of(name, LORA_B)], dim=1)
        if plain.hidden.requires_grad:
            # for a strided gradient, megatron-core 0.16.1 all-reduces a copy but returns the original
            # (tensor_parallel/mappings.py::_reduce)
            plain.hidden.register_hook(torch.Tensor.contiguous)  # type: ignore[no-untyped-call]
        return Operands(torch.cat([plain.hidden, narrow], dim=-1), widened)

    def _between(self, inputs: Tensor, down: Tensor) -> Tensor:
        """Returns the complete A x, [seq, batch, ranks of all parts]; one collective over TP of these numbers."""
        narrow, group = functional.linear(inputs, down), self.tp_group
        # with a replicated projection, ranks have different positions, or the incoming gradient is already summed
        if group.size() == 1 or self._is_replicated:
            return narrow
        result: Tensor
        match self.is_row_parallel, self.config.sequence_parallel:
            case True, True:
                result = reduce_scatter_to_sequence_parallel_region(narrow, group=group)
            case True, False:
                result = reduce_from_tensor_model_parallel_region(narrow, group=group)
            case False, True:
                # in backward ranks have summands of the gradient of all positions, which a reduce-scatter sums
                result = gather_from_sequence_parallel_region(narrow, tensor_parallel_output_grad=True, group=group)
            case False, False:
                # in backward the B of each rank yields a summand; with the sum, A has the same gradient on all ranks
                result = self._same_gradient(narrow)
        return result

    def _same_gradient(self, narrow: Tensor) -> Tensor:
        """Returns the input unchanged; in backward all-reduces the gradient over TP."""
        return copy_to_tensor_model_parallel_region(narrow, group=self.tp_group)

    def _dropped(self, inputs: Tensor) -> Tensor:
        if self._section.dropout == 0 or not self.training:
            return inputs
        # TP ranks draw the same dropout if they hold the same numbers, otherwise different dropout
        differs = self.is_row_parallel or self.config.sequence_parallel
        with tensor_parallel.get_cuda_rng_tracker().fork() if differs else nullcontext():
            return functional.dropout(inputs, self._section.dropout)

    def _lengths(self) -> Tensor:
        """Returns magnitude / row norm of this rank's outputs, [outputs] in the dtype of the inputs; 1 for parts
        without an adapter."""
        norms = self._parts.fusion.split(self.row_norms())
        ratios = [
            (widened(self._of(name, MAGNITUDE)) / norm) if name in self._parts.adapted else None
            for name, norm in zip(self._parts.names, norms, strict=True)
        ]
        return self._parts.fusion.joined(ratios, 1.0, norms[0]).to(self.config.params_dtype)

    @torch.no_grad()
    def row_norms(self) -> Tensor:
        """Returns the norms of the rows of W + s B A in the order of the fused projection, [outputs] in at least
        float32.

        One all-reduce over TP for a row-parallel projection, and between passes one all-gather of W if it is divided
        over DP x CP. The matrix W + s B A exists temporarily.
        """
        products = [
            self._section.scale_of(name) * (widened(self._of(name, LORA_B)) @ widened(self._of(name, LORA_A))).T
            if name in self._parts.adapted
            else None
            for name in self._parts.names
        ]
        weight = self._weight()  # [outputs, inputs]
        weight = widened(gathered_rows(weight, held_values(weight)))
        whole = weight.T + self._parts.fusion.joined(products, 0.0, weight.T)
        return self._over_ranks(whole.square().sum(0)).sqrt()

    def _over_ranks(self, squares: Tensor) -> Tensor:
        """Sums the squares of a row over TP if the projection is row-parallel and its columns are divided."""
        if self.is_row_parallel and self.tp_group.size() > 1:
            dist.all_reduce(squares, group=self.tp_group)
        return squares

    @torch.no_grad()
    def reset_magnitudes(self) -> dict[Tensor, Tensor]:
        """Sets the magnitudes to the current norms of the rows, so that the output is that of W + s B A; returns the
        norms in float32 by magnitude, for the optimizer. One all-reduce over TP for a row-parallel projection."""
        if not self._section.has_magnitudes:
            return {}
        norms = dict(zip(self._parts.names, self._parts.fusion.split(self.row_norms()), strict=True))
        magnitudes: dict[Tensor, Tensor] = {self._of(name, MAGNITUDE): norms[name] for name in self._parts.adapted}
        for parameter, values in magnitudes.items():
            parameter.copy_(values)
        return magnitudes

    def _of(self, name: str, kind: str) -> nn.Parameter:
        return self.get_parameter(f"{name}_{kind}")


class WeightAdapter(LinearAdapter):
    """Adapter of a projection that only returns its matrix, by which others multiply after collectives of their own."""

    def added(self, module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Any:
        """Returns the matrix of the frozen projection with the adapter added."""
        return self(output)

    def forward(self, weight: Tensor, plain: object = None) -> Tensor:
        """Returns W + scale B A, [outputs of this rank, inputs], with rows scaled to their magnitudes (DoRA)."""
        (name,) = self._parts.names
        down: Tensor = self._of(name, LORA_A)
        if self.tp_group.size() > 1 and not self.config.sequence_parallel:
            # the rows of each rank yield a summand of A's gradient; under sp the attribute of A has them summed later
            down = self._same_gradient(down)
        whole = weight.to(down.dtype) + self._section.scale_of(name) * (self._of(name, LORA_B) @ down)
        return self._lengths().unsqueeze(1) * whole if self._section.has_magnitudes else whole
