"""Matrix products of a rank's experts: one after the other, or all in one grouped product."""

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, Literal, assert_never

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils import deterministic

from mtrain.base.errors import ConfigError
from mtrain.core.layers.products import widened_linear

Implementation = Literal["auto", "grouped", "sequential"]
"""Value of `model.experts.implementation` that names products of ours."""
Product = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(tokens [count, in] by expert, weights [experts, out, in], counts [experts] int64) -> [count, out]."""

_grouped_mm: Callable[..., Tensor] = getattr(functional, "grouped_mm", None) or torch._grouped_mm  # public from 2.10
_ALIGNMENT_BYTES = 16
"""Multiple, in bytes, that rows of the operands must have."""


def sequential(tokens: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
    """Computes one product per expert, even without tokens, so that its weights get a gradient of 0."""
    parts = torch.split(tokens, counts.tolist())  # the host waits where counts are on a GPU
    return torch.cat([widened_linear(part, weight) for part, weight in zip(parts, weights.unbind(), strict=True)])


def grouped(tokens: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
    """Computes all experts in one kernel."""
    # the host does not wait: counts are on the device, or in pinned memory
    ends = counts.to(tokens.device, non_blocking=True).cumsum(0).to(torch.int32)
    return _grouped_mm(tokens, weights.transpose(1, 2), offs=ends)


def chosen_product(implementation: Implementation, sizes: tuple[int, ...], weight: Tensor) -> Product:
    """Returns the product for weights like `weight`, with rows of these sizes; `auto` takes the grouped one if it is
    there.

    Raises:
        ConfigError: The grouped product is configured but not available.
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


_TRIALS = ((3, 0, 5, 0), (0, 0, 0, 0))
"""Numbers of tokens of each expert: some have none, as all may on a rank."""


# by a trial: the devices and dtypes with a kernel, and with its backward, differ between releases of torch
@cache
def has_grouped(device: str, dtype: torch.dtype) -> bool:
    """Says whether torch has a grouped product on this kind of device that gives the numbers of the sequential one.

    It tries tiny ones of integers, which add up exactly in any order, forward and backward, in memory full of NaN, so
    that an element that a kernel leaves untouched is noticed.
    """
    try:
        with _memory_of_nan():
            return all(
                all(map(torch.equal, _trial(grouped, counts, device, dtype), _trial(sequential, counts, device, dtype)))
                for counts in _TRIALS
            )
    except RuntimeError:  # torch's error for a missing kernel; NotImplementedError is one, too
        return False


def _trial(product: Product, counts: Sequence[int], device: str, dtype: torch.dtype) -> list[Tensor]:
    """Returns output and gradients of a product."""

    def numbers(*sizes: int) -> Tensor:
        return (torch.arange(math.prod(sizes)) % 5 - 2).view(sizes).to(device, dtype).requires_grad_()

    tokens, weights = numbers(sum(counts), 16), numbers(len(counts), 24, 16)
    with torch.enable_grad():
        output = product(tokens, weights, torch.tensor(counts))
        return [output, *torch.autograd.grad(output, [tokens, weights], numbers(*output.shape).detach())]


@contextmanager
def _memory_of_nan() -> Iterator[None]:
    """Fills new memory of torch with NaN inside the block."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    aid: Any = deterministic  # untyped in torch
    fills = aid.fill_uninitialized_memory
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about operations that are not deterministic: none has to be
        torch.use_deterministic_algorithms(True, warn_only=True)
        aid.fill_uninitialized_memory = True
        try:
            yield
        finally:
            aid.fill_uninitialized_memory = fills
            torch.use_deterministic_algorithms(before[0], warn_only=before[1])
