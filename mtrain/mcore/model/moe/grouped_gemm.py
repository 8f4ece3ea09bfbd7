"""Matrix products of a rank's experts: one after the other, or all in one grouped product."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Literal, assert_never

import torch
from torch import Tensor
from torch.nn import functional

from mtrain.base.errors import ConfigError
from mtrain.mcore.model.widened import widened_linear

Product = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(tokens [count, in] by expert, weights [experts, out, in], counts [experts] int64 on the CPU) -> [count, out]."""

_grouped_mm: Callable[..., Tensor] = getattr(functional, "grouped_mm", None) or torch._grouped_mm  # public from 2.10
_ALIGNMENT_BYTES = 16
"""What rows of the operands must be a multiple of."""


def sequential(tokens: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
    """One product an expert; an expert without tokens takes part, so that its weights get a gradient of 0."""
    parts = torch.split(tokens, counts.tolist())  # counts are on the CPU: no wait
    return torch.cat([widened_linear(part, weight) for part, weight in zip(parts, weights.unbind(), strict=True)])


def grouped(tokens: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
    """All experts in one kernel."""
    # The kernel takes int32 on the device; the host does not wait.
    ends = counts.cumsum(0).to(tokens.device, torch.int32, non_blocking=True)
    return _grouped_mm(tokens, weights.transpose(1, 2), offs=ends)


def chosen_product(
    implementation: Literal["auto", "grouped", "sequential"], sizes: tuple[int, ...], weight: Tensor
) -> Product:
    """The product for weights like `weight`.

    Args:
        implementation: auto takes the grouped one where it is there.
        sizes: Lengths of the rows of all operands.
        weight: Tells the device and dtype.

    Raises:
        ConfigError: The grouped one was asked for where it is not there.
    """
    is_aligned = all(size * weight.element_size() % _ALIGNMENT_BYTES == 0 for size in sizes)
    match implementation:
        case "sequential":
            return sequential
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


# By trial: which devices and dtypes have a kernel, and its backward, differs by release of torch.
@cache
def has_grouped(device: str, dtype: torch.dtype) -> bool:
    """Whether torch has a grouped product on this kind of device; found out by a tiny one, forward and backward."""
    tokens = torch.ones(8, 16, device=device, dtype=dtype, requires_grad=True)
    weights = torch.ones(2, 16, 16, device=device, dtype=dtype, requires_grad=True)
    try:
        with torch.enable_grad():
            # One expert without tokens: training meets that, too.
            product = grouped(tokens, weights, torch.tensor([8, 0]))
            torch.autograd.grad(product, [tokens, weights], torch.ones_like(product))
    except RuntimeError:  # as torch says that a kernel is missing; NotImplementedError is one, too
        return False
    return True
