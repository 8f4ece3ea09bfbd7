"""Matrix products of a rank's experts: one product per expert, or one grouped product for all."""

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, Literal, assert_never

import torch
from torch import Tensor, autograd
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.utils import deterministic

from mtrain.base.errors import ConfigError
from mtrain.core.kernels import add_product, added_gradient
from mtrain.core.layers.products import widened_linear

Implementation = Literal["auto", "grouped", "sequential"]
"""Values of `model.experts.implementation` for products in this module."""
Product = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Maps (tokens [count, in] sorted by expert, weights [experts, out, in], counts [experts] int64) to [count, out]."""

_grouped_mm: Callable[..., Tensor] = getattr(functional, "grouped_mm", None) or torch._grouped_mm  # public from 2.10
_ALIGNMENT_BYTES = 16
"""Number of bytes to which rows of the operands must be aligned."""


def sequential(tokens: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
    """Computes one product per expert, even for an expert without tokens, so that its weights get a gradient of 0."""
    parts = torch.split(tokens, counts.tolist())  # the host waits if counts are on a GPU
    return torch.cat([widened_linear(part, weight) for part, weight in zip(parts, weights.unbind(), strict=True)])


def sequential_into(buffer: Tensor, tokens: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
    """Computes `sequential`; backward adds the gradient of the weights to a buffer of their shape, float32 or wider."""
    return _SequentialInto.apply(tokens, weights, buffer, counts.tolist())  # type: ignore[no-untyped-call]


class _SequentialInto(autograd.Function):
    """Autograd node (tokens, weights) -> products."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weights: Tensor, buffer: Tensor, counts: list[int]) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.weights, ctx.buffer, ctx.counts = weights, buffer, counts
        output = tokens.new_empty(len(tokens), weights.shape[1])
        parts = zip(torch.split(tokens, counts), weights, torch.split(output, counts), strict=True)
        for part, weight, result in parts:
            torch.mm(part, weight.t(), out=result)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
        (tokens,), counts = ctx.saved_tensors, ctx.counts
        of_tokens = torch.empty_like(tokens)
        parts = zip(*(torch.split(each, counts) for each in (tokens, gradient, of_tokens)), strict=True)
        for (part, of_output, of_part), weight, total in zip(parts, ctx.weights.detach(), ctx.buffer, strict=True):
            torch.mm(of_output, weight, out=of_part)
            add_product(part, of_output, total)
        return of_tokens, added_gradient(ctx.weights), None, None


def grouped(tokens: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
    """Computes all experts in one kernel."""
    # the host does not wait, since counts are on the device or in pinned memory
    ends = counts.to(tokens.device, non_blocking=True).cumsum(0).to(torch.int32)
    return _grouped_mm(tokens, weights.transpose(1, 2), offs=ends)


def chosen_product(
    implementation: Implementation, sizes: tuple[int, ...], weight: Tensor, is_fused: bool = False
) -> Product:
    """Returns the product for weights like `weight` with rows of these sizes; `auto` means the grouped product if it is
    available, except on CPUs if products add the gradients of weights (`is_fused`), as only sequential ones do.

    Raises:
        ConfigError: The grouped product is configured but not available.
    """
    is_aligned = all(size * weight.element_size() % _ALIGNMENT_BYTES == 0 for size in sizes)
    match implementation:
        case "sequential":
            return sequential
        case "auto" if is_fused and weight.device.type == "cpu":
            return sequential  # torch also loops over the experts there
        case "auto" | "grouped" if is_aligned and has_grouped(weight.device.type, weight.dtype):
            return grouped
        case "auto":
            return sequential
        case "grouped":
            raise ConfigError(
                f"model.experts.implementation=grouped cannot be used with {weight.dtype} on {weight.device.type} and "
                f"rows of {', '.join(map(str, sizes))} numbers: torch has no grouped product for it; use auto"
            )
        case _:
            assert_never(implementation)


_TRIALS = ((3, 0, 5, 0), (0, 0, 0, 0))
"""Numbers of tokens of each expert, including experts without tokens, and no tokens at all."""


# by trial, since the devices and dtypes for which kernels exist, forward and backward, differ between releases of torch
@cache
def has_grouped(device: str, dtype: torch.dtype) -> bool:
    """Says whether torch has a grouped product for this kind of device and dtype with the results of the sequential
    one.

    Tries tiny products of integers, which are exact in any order of summation, forward and backward, in memory full of
    NaN, which reveals elements that a kernel does not write.
    """
    try:
        with _memory_of_nan():
            return all(
                all(map(torch.equal, _trial(grouped, counts, device, dtype), _trial(sequential, counts, device, dtype)))
                for counts in _TRIALS
            )
    except RuntimeError:  # a missing kernel; includes NotImplementedError
        return False


def _trial(product: Product, counts: Sequence[int], device: str, dtype: torch.dtype) -> list[Tensor]:
    """Returns the output and the gradients of a product."""

    def numbers(*sizes: int) -> Tensor:
        return (torch.arange(math.prod(sizes)) % 5 - 2).view(sizes).to(device, dtype).requires_grad_()

    tokens, weights = numbers(sum(counts), 16), numbers(len(counts), 24, 16)
    with torch.enable_grad():
        output = product(tokens, weights, torch.tensor(counts))
        return [output, *torch.autograd.grad(output, [tokens, weights], numbers(*output.shape).detach())]


@contextmanager
def _memory_of_nan() -> Iterator[None]:
    """Makes torch fill new memory with NaN inside the block."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    aid: Any = deterministic  # untyped in torch
    fills = aid.fill_uninitialized_memory
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about operations that are not deterministic, which is fine here
        torch.use_deterministic_algorithms(True, warn_only=True)
        aid.fill_uninitialized_memory = True
        try:
            yield
        finally:
            aid.fill_uninitialized_memory = fills
            torch.use_deterministic_algorithms(before[0], warn_only=before[1])
