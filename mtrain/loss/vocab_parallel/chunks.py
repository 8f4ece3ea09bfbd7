"""Output layer and loss together, a few tokens at a time, so that the logits of a microbatch never exist whole.

A loss is a sum over tokens, so its gradient with respect to hidden states and table is a sum over chunks of them. Each
chunk's part is formed as soon as its logits are there, in the forward pass; backward multiplies by one number. What the
backward of whole logits would keep (logits, exponentials, later their gradient) is replaced by the two gradients
themselves, which exist in every backward pass.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

LossOfChunk = Callable[[int, slice, Tensor], Tensor]
"""(which hidden states, rows of them, their logits [rows, 1, vocab_local]) -> scalar to differentiate, a graph on the
logits where gradients are recorded."""


def chunks(num_rows: int, chunk_rows: int) -> Iterator[slice]:
    """Yields runs of rows of about equal length, none longer than `chunk_rows`; none where there are no rows."""
    # equal ones, since a last chunk of a few rows would cost as many launches as a whole one
    num_chunks = -(-num_rows // chunk_rows)
    for number in range(num_chunks):
        yield slice(number * num_rows // num_chunks, (number + 1) * num_rows // num_chunks)


def logits_of_rows(hidden: Tensor, weight: Tensor) -> Tensor:
    """[rows, 1, vocab_local] of [rows, hidden] hidden states: one sequence of all rows; no graph."""
    return torch.matmul(hidden.detach(), weight.detach().t()).unsqueeze(1)


def sum_over_chunks(
    weight: Tensor, hidden: list[Tensor], loss_of_chunk: LossOfChunk, chunk_rows: int, expected_gradient: Tensor
) -> Tensor:
    """The sum of the losses of all chunks, to be differentiated once.

    No collective but those of `loss_of_chunk`, forward or backward: what tensor parallelism needs stands in the graph
    of the hidden states.

    Args:
        weight: [vocab_local, hidden] the table of the output layer.
        hidden: Each [rows, hidden], of any number of rows, also of none: they then get gradients of zeros.
        loss_of_chunk: Called with increasing rows, first for all of the first hidden states.
        chunk_rows: Most rows of one call.
        expected_gradient: float32 scalar, what the result's gradient is going to be. Gradients are formed with it, so
            that those of fp16 do not underflow. Another one is right as well; it is multiplied in at the end.

    Returns:
        float32 scalar; with a graph even where there are no rows.
    """
    if not torch.is_grad_enabled():
        total = weight.new_zeros((), dtype=torch.float32)
        for number, rows_of in enumerate(hidden):
            for rows in chunks(len(rows_of), chunk_rows):
                total += loss_of_chunk(number, rows, logits_of_rows(rows_of[rows], weight))
        return total
    result: Tensor = _SumOverChunks.apply(  # type: ignore[no-untyped-call]
        weight, loss_of_chunk, chunk_rows, expected_gradient, *hidden
    )
    return result


class _SumOverChunks(torch.autograd.Function):
    """(weight, ..., hidden states) -> sum; its gradients are formed here, in forward."""

    @staticmethod
    def forward(
        ctx: Any,
        weight: Tensor,
        loss_of_chunk: LossOfChunk,
        chunk_rows: int,
        expected_gradient: Tensor,
        *hidden: Tensor,
    ) -> Tensor:
        # a frozen table (its adapters are trained, or nothing is) needs no gradient
        of_weight = _WeightGradient(weight) if ctx.needs_input_grad[0] else None
        of_hidden = [torch.empty_like(rows_of) for rows_of in hidden]
        total = weight.new_zeros((), dtype=torch.float32)
        for number, rows_of in enumerate(hidden):
            for rows in chunks(len(rows_of), chunk_rows):
                # nothing of a chunk is named here, so that it is freed before the next one
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
        # not kept: they are multiplied in place, and freed as soon as they have been used
        ctx.gradients = None
        # exactly 1 where the gradient is the expected one; the host does not look, where it would have to wait
        factor = gradient / ctx.expected_gradient
        if factor.is_cuda or factor != 1:
            for each in (of_weight, *of_hidden):
                if each is not None:
                    each.mul_(factor)
        return of_weight, None, None, None, *of_hidden


def _add_chunk(
    loss_of: Callable[[Tensor], Tensor],
    hidden: Tensor,
    weight: Tensor,
    expected_gradient: Tensor,
    of_hidden: Tensor,
    of_weight: _WeightGradient | None,
) -> Tensor:
    """The loss of one chunk; its gradients go into `of_hidden` and `of_weight`."""
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
    """The table's gradient, summed in float32 (float64 for float64 tables) over all chunks and rounded once."""

    def __init__(self, weight: Tensor) -> None:
        self._weight, self._wide = weight, torch.promote_types(weight.dtype, torch.float32)
        self._sum: Tensor | None = None  # the first product is not added to zeros

    def add(self, gradient: Tensor, hidden: Tensor) -> None:
        """Adds the part of some rows: gradient [rows, vocab_local], hidden [rows, hidden]."""
        if gradient.dtype != self._wide and not gradient.is_cuda:
            gradient, hidden = gradient.to(self._wide), hidden.to(self._wide)
        if gradient.dtype != self._wide:
            # the product leaves the tensor cores in float32, as that of whole logits does before it is rounded
            product = torch.mm(gradient.t(), hidden, out_dtype=self._wide)
            self._sum = product if self._sum is None else self._sum.add_(product)
        elif self._sum is None:
            self._sum = torch.mm(gradient.t(), hidden)
        else:
            self._sum.addmm_(gradient.t(), hidden)

    def rounded(self) -> Tensor:
        """In the table's dtype, as the gradient of whole logits arrives."""
        return torch.zeros_like(self._weight) if self._sum is None else self._sum.to(self._weight.dtype)
