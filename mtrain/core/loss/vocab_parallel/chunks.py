"""Output layer and loss together, a few tokens at a time, so that the logits of a microbatch never exist as a whole.

A loss is a sum over tokens, so its gradient with respect to hidden states and table is a sum over chunks of tokens.
Each chunk's part is computed in the forward pass, as soon as its logits exist; backward multiplies by one number. Only
the two gradients are kept, not logits and exponentials.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mtrain.core.kernels import add_product

LossOfChunk = Callable[[int, slice, Tensor], Tensor]
"""Function of (index of the hidden states, rows of them, their logits [rows, 1, vocab_local]) that returns a scalar,
with a graph on the logits if gradients are recorded."""


def chunks(num_rows: int, chunk_rows: int) -> Iterator[slice]:
    """Yields runs of rows of about equal length, none longer than `chunk_rows`; none where there are no rows."""
    # a last chunk of a few rows would cost as many kernel launches as a full one
    num_chunks = -(-num_rows // chunk_rows)
    for number in range(num_chunks):
        yield slice(number * num_rows // num_chunks, (number + 1) * num_rows // num_chunks)


def logits_of_rows(hidden: Tensor, weight: Tensor) -> Tensor:
    """Returns the logits [rows, 1, vocab_local] of hidden states [rows, hidden], as one sequence, without a graph."""
    return torch.matmul(hidden.detach(), weight.detach().t()).unsqueeze(1)


def sum_over_chunks(
    weight: Tensor, hidden: list[Tensor], loss_of_chunk: LossOfChunk, chunk_rows: int, expected_gradient: Tensor
) -> Tensor:
    """Returns the sum of the losses of all chunks, a float32 scalar with a graph that can be differentiated once.

    Makes no collective calls except those of `loss_of_chunk`, which is called with increasing rows, first for all of
    the first hidden states, [rows, hidden]. Gradients are computed with the one that the result is expected to get, so
    that those of fp16 do not underflow; if the actual one differs, they are multiplied by the ratio.
    """
    if not torch.is_grad_enabled():
        total = weight.new_zeros((), dtype=_wide(weight))
        for number, rows_of in enumerate(hidden):
            for rows in chunks(len(rows_of), chunk_rows):
                total += loss_of_chunk(number, rows, logits_of_rows(rows_of[rows], weight))
        return total
    return _SumOverChunks.apply(  # type: ignore[no-untyped-call]
        weight, loss_of_chunk, chunk_rows, expected_gradient, *hidden
    )


def _wide(weight: Tensor) -> torch.dtype:
    """Returns float32, or float64 for a float64 table."""
    return torch.promote_types(weight.dtype, torch.float32)


class _SumOverChunks(torch.autograd.Function):
    """Autograd node (weight, ..., hidden states) -> sum, which computes its gradients in forward."""

    @staticmethod
    def forward(
        ctx: Any,
        weight: Tensor,
        loss_of_chunk: LossOfChunk,
        chunk_rows: int,
        expected_gradient: Tensor,
        *hidden: Tensor,
    ) -> Tensor:
        # a frozen table needs no gradient
        of_weight = _WeightGradient(weight) if ctx.needs_input_grad[0] else None
        of_hidden = [torch.empty_like(rows_of) for rows_of in hidden]
        total = weight.new_zeros((), dtype=_wide(weight))
        for number, rows_of in enumerate(hidden):
            for rows in chunks(len(rows_of), chunk_rows):
                # no local name refers to a part of a chunk, so that it is freed before the next one
                total += _add_chunk(
                    functools.partial(loss_of_chunk, number, rows),
                    rows_of[rows],
                    weight,
                    expected_gradient,
                    of_hidden[number][rows],
                    of_weight,
                )
        ctx.gradients = (None if of_weight is None else of_weight.rounded(), of_hidden)
        ctx.expected_gradient = expected_gradient
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.gradients is None:
            raise RuntimeError("a sum over chunks is differentiated once; its gradients have been handed on")
        of_weight, of_hidden = ctx.gradients
        ctx.gradients = None  # multiplied in place below
        # exactly 1 if the gradient is the expected one; the comparison would make the host wait for a GPU
        factor = gradient / ctx.expected_gradient
        if factor.is_cuda or factor != 1:
            for part in (of_weight, *of_hidden):
                if part is not None:
                    part.mul_(factor)
        return of_weight, None, None, None, *of_hidden


def _add_chunk(
    loss_of: Callable[[Tensor], Tensor],
    hidden: Tensor,
    weight: Tensor,
    expected_gradient: Tensor,
    of_hidden: Tensor,
    of_weight: _WeightGradient | None,
) -> Tensor:
    """Returns the loss of one chunk, and writes its gradients to `of_hidden` and `of_weight`."""
    logits = logits_of_rows(hidden, weight).requires_grad_()
    with torch.enable_grad():
        loss = loss_of(logits)
    # a graph of this chunk alone, freed here with all that it has saved
    gradient = torch.autograd.grad(loss, logits, expected_gradient.to(loss.dtype))[0].squeeze(1)
    torch.matmul(gradient, weight, out=of_hidden)
    if of_weight is not None:
        of_weight.add(gradient, hidden)
    return loss.detach()


class _WeightGradient:
    """Gradient of the table, summed in float32 (float64 for float64 tables) over all chunks and rounded once."""

    def __init__(self, weight: Tensor) -> None:
        self._weight, self._wide = weight, _wide(weight)
        self._sum: Tensor | None = None  # the first product is not added to zeros

    def add(self, gradient: Tensor, hidden: Tensor) -> None:
        """Adds the part of some rows: gradient [rows, vocab_local], hidden [rows, hidden]."""
        if not gradient.is_cuda:  # CPUs have no product of halves into float32
            gradient, hidden = gradient.to(self._wide), hidden.to(self._wide)
        if self._sum is not None:
            add_product(hidden, gradient, self._sum)
        elif gradient.dtype == self._wide:
            self._sum = torch.mm(gradient.t(), hidden)
        else:
            self._sum = torch.mm(gradient.t(), hidden, out_dtype=self._wide)

    def rounded(self) -> Tensor:
        """Returns the gradient in the table's dtype."""
        return torch.zeros_like(self._weight) if self._sum is None else self._sum.to(self._weight.dtype)
