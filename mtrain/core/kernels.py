"""Kernels that layers and losses share: products into float32, and regions, which torch compiles.

Regions are bound by memory; torch compiles each into about one pass forward and one backward. A region does not depend
on the layout. Products, collectives and recomputation stay outside, so that fused weight gradients, adapters and
pipelines work as without. Modules with regions have `compiles_regions`, which `mtrain/core/layers/compiled.py` turns
on.
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
    """Function of tensors and constants, written for torch's own kernels, and as a plain formula where
    `torch.compiler.is_compiling()`."""

    def __init__(self, function: Callable[P, Result], activations: int) -> None:
        self._function, self._activations = function, activations
        functools.update_wrapper(self, function)

    def __call__(self, *arguments: P.args, **options: P.kwargs) -> Result:
        """Calls the function uncompiled; inside a graph, its formula becomes part of that graph."""
        return self._function(*arguments, **options)

    def compiled_if(self, is_on: bool) -> Callable[P, Result]:
        """Returns the compiled function, or the original one."""
        if not is_on or torch.compiler.is_compiling():
            return self._function
        compiled: Callable[P, Result] = _compiled(self._function, BACKEND)
        return compiled if torch.is_grad_enabled() else self._without_graph

    def _without_graph(self, *arguments: P.args, **options: P.kwargs) -> Result:
        """Computes with the code of training, since another graph may round differently: what is recomputed in
        backward has the same bits."""
        given: tuple[Any, ...] = arguments
        activations = [
            None if activation is None else activation.detach().requires_grad_()
            for activation in given[: self._activations]
        ]
        with torch.enable_grad():
            results = _compiled(self._function, BACKEND)(*activations, *given[self._activations :], **options)
        detached: Result = tree_map(Tensor.detach, results)
        return detached


def region(activations: int) -> Callable[[Callable[P, Result]], Region[P, Result]]:
    """Makes a function a region; its first `activations` arguments have a gradient in training."""

    def made(function: Callable[P, Result]) -> Region[P, Result]:
        return Region(function, activations)

    return made


@functools.cache
def _compiled(function: Callable[..., Any], backend: str | Callable[..., Any]) -> Callable[..., Any]:
    """Compiles once a process; a second number of rows, as experts have, makes the graph one for all numbers."""
    return torch.compile(function, backend=backend)


@torch.no_grad()
def add_product(inputs: Tensor, output_gradients: Tensor, total: Tensor) -> None:
    """Adds the gradient of a weight to its total, [out, in] in float32 at least, in place."""
    if inputs.dtype == total.dtype:
        total.addmm_(output_gradients.t(), inputs)
    elif inputs.device.type == "cuda":
        torch.addmm(total, output_gradients.t(), inputs, out_dtype=total.dtype, out=total)
    else:
        total.add_(output_gradients.t() @ inputs)
