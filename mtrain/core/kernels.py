"""Kernels that layers and losses share: sums of weight gradients, and regions, which torch compiles.

Regions are memory-bound; torch compiles each into about one pass forward and one backward. A region does not depend on
the layout. Matrix products, collectives and recomputation stay outside, so that fused weight gradients, adapters and
pipelines work as without regions. Modules with regions have an attribute `compiles_regions`, which
`mtrain/core/layers/compiled.py` sets.
"""

import functools
from collections.abc import Callable
from typing import Any, Generic, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

BACKEND: str | Callable[..., Any] = "inductor"
"""Backend for torch.compile, of layers and of regions."""

P = ParamSpec("P")
Result = TypeVar("Result")


class Region(Generic[P, Result]):
    """A function of tensors and constants, written for torch's kernels, and as a plain formula for the case that
    `torch.compiler.is_compiling()`."""

    def __init__(self, function: Callable[P, Result], activations: int) -> None:
        self._function, self._activations = function, activations
        functools.update_wrapper(self, function)

    def __call__(self, *arguments: P.args, **options: P.kwargs) -> Result:
        """Calls the function uncompiled; if another graph is being compiled, the formula becomes part of it."""
        return self._function(*arguments, **options)

    def compiled_if(self, is_on: bool) -> Callable[P, Result]:
        """Returns the compiled function if `is_on`, else the original one."""
        if not is_on or torch.compiler.is_compiling():
            return self._function
        compiled: Callable[P, Result] = _compiled(self._function, BACKEND)
        return compiled if torch.is_grad_enabled() else self._without_graph

    def _without_graph(self, *arguments: P.args, **options: P.kwargs) -> Result:
        """Runs the graph of training, so that results recomputed in backward have the same bits."""
        positional: tuple[Any, ...] = arguments
        activations = [
            None if activation is None else activation.detach().requires_grad_()
            for activation in positional[: self._activations]
        ]
        with torch.enable_grad():
            results = _compiled(self._function, BACKEND)(*activations, *positional[self._activations :], **options)
        detached: Result = tree_map(Tensor.detach, results)
        return detached


def region(activations: int) -> Callable[[Callable[P, Result]], Region[P, Result]]:
    """Makes a function a region; its first `activations` arguments have a gradient in training."""

    def made(function: Callable[P, Result]) -> Region[P, Result]:
        return Region(function, activations)

    return made


@functools.cache
def _compiled(function: Callable[..., Any], backend: str | Callable[..., Any]) -> Callable[..., Any]:
    """Compiles once per process; after a second number of rows, as with experts, the graph serves all numbers."""
    return torch.compile(function, backend=backend)


@torch.no_grad()
def add_product(inputs: Tensor, output_gradients: Tensor, total: Tensor) -> None:
    """Adds output_gradients^T inputs, the gradient of a weight, to its total, [out, in], at least float32, in place."""
    if inputs.dtype == total.dtype:
        total.addmm_(output_gradients.t(), inputs)
    elif inputs.device.type == "cuda":
        torch.addmm(total, output_gradients.t(), inputs, out_dtype=total.dtype, out=total)
    else:
        total.add_(output_gradients.t() @ inputs)


@torch.no_grad()
def add_rows(rows: Tensor, gradients: Tensor, total: Tensor) -> None:
    """Adds gradients, [n, columns], to the rows, [n], of the gradient of a table, [all rows, columns], in place and in
    a fixed order."""
    if total.is_cuda and not torch.are_deterministic_algorithms_enabled():
        # index_add_ would add in any order
        total.add_(torch.ops.aten.embedding_dense_backward(gradients, rows, len(total), -1, False))
    else:
        total.index_add_(0, rows, gradients.to(total.dtype))


def gradient_buffer(weight: Tensor) -> Tensor | None:
    """Returns the buffer in which megatron-core sums the gradient of a weight, float32 or float64, if it has one."""
    buffer: Tensor | None = getattr(weight, "main_grad", None)
    return buffer


def added_gradient(weight: Tensor) -> Tensor:
    """Marks the gradient of a weight as added to its buffer; returns what backward must return for its hooks to run,
    whose values nothing reads.

    Then every use of the weight must add its gradient, since autograd sums what the uses return.
    """
    marked: Any = weight
    marked.grad_added_to_main_grad = True  # read by megatron-core's hook
    return torch.empty_like(weight)
