"""Output layer and loss fused and computed in chunks of tokens, so that the logits of a microbatch never exist whole.

A loss is a sum over tokens, so its gradient with respect to hidden states and output weight is a sum over chunks of
tokens. The forward pass computes the part of each chunk as soon as its logits exist; backward only multiplies by a
number. The two gradients are kept, but no logits or exponentials; that of the weight is added to its buffer if there is
one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mtrain.core.kernels import add_product, added_gradient

LossOfChunk = Callable[[int, slice, Tensor], Tensor]
"""Maps (index of the hidden states, their rows, the logits of these rows [rows, 1, vocab_local]) to a scalar, with a
graph to the logits if gradients are recorded."""


def chunks(num_rows: int, chunk_rows: int) -> Iterator[slice]:
    """Yields slices of rows of about equal length, at most `chunk_rows` each; none if `num_rows` is 0."""
    # equal lengths, since a last chunk of a few rows would cost as many kernel launches as a full one
    num_chunks = -(-num_rows // chunk_rows)
    for number in range(num_chunks):
        yield slice(number * num_rows // num_chunks, (number + 1) * num_rows // num_chunks)


def logits_of_rows(hidden: Tensor, weight: Tensor, memory: Tensor | None = None) -> Tensor:
    """Computes logits [rows, 1, vocab_local] from hidden states [rows, hidden], without a graph; into the first rows of
    `memory`, [at least rows, vocab_local], if given."""
    output = None if memory is None else memory[: len(hidden)]
    return torch.matmul(hidden.detach(), weight.detach().t(), out=output).unsqueeze(1)


class Table(NamedTuple):
    """Weight of the output layer."""

    weight: Tensor
    """[vocab_local, hidden]."""
    buffer: Tensor | None = None
    """Buffer to which its gradient must be added, [vocab_local, hidden], at least float32; None: autograd must return
    the gradient."""


def sum_over_chunks(
    table: Table,
    hidden: list[Tensor],
    loss_of_chunk: LossOfChunk,
    chunk_rows: int,
    expected_gradient: Tensor,
    reuses_memory: bool = False,
) -> Tensor:
    """Returns the sum of the losses of all chunks, a float32 scalar that can be differentiated once.

    Only `loss_of_chunk` communicates. It is called with increasing rows, for all rows of the first hidden states before
    those of the second.

    Args:
        hidden: Hidden states, [rows, hidden] each.
        expected_gradient: Gradient that the result will presumably receive. Forward computes gradients with it, so that
            those of fp16 do not underflow; if backward receives another one, they are multiplied by the ratio. A
            buffer must receive the expected one.
        reuses_memory: Whether the logits of all chunks take turns in the same memory, which saves a CPU the page faults
            of new memory. For losses that keep no logits.
    """
    if not torch.is_grad_enabled():
        total = table.weight.new_zeros((), dtype=_wide(table.weight))
        for number, states in enumerate(hidden):
            for rows in chunks(len(states), chunk_rows):
                total += loss_of_chunk(number, rows, logits_of_rows(states[rows], table.weight))
        return total
    return _SumOverChunks.apply(  # type: ignore[no-untyped-call]
        table.weight, table.buffer, loss_of_chunk, chunk_rows, expected_gradient, reuses_memory, *hidden
    )


def _wide(weight: Tensor) -> torch.dtype:
    """Returns float32, or float64 for a float64 weight."""
    return torch.promote_types(weight.dtype, torch.float32)


class _SumOverChunks(torch.autograd.Function):
    """Autograd node (weight, ..., hidden states) -> sum that computes its gradients in forward."""

    @staticmethod
    def forward(
        ctx: Any,
        weight: Tensor,
        buffer: Tensor | None,
        loss_of_chunk: LossOfChunk,
        chunk_rows: int,
        expected_gradient: Tensor,
        reuses_memory: bool,
        *hidden: Tensor,
    ) -> Tensor:
        # a frozen weight needs no gradient
        weight_gradient = _WeightGradient(weight, buffer) if ctx.needs_input_grad[0] else None
        hidden_gradients = [torch.empty_like(states) for states in hidden]
        most_rows = min(chunk_rows, max(map(len, hidden)))
        memory = hidden[0].new_empty(most_rows, len(weight)) if reuses_memory else None
        shared = _Shared(weight, memory, weight_gradient)
        total = weight.new_zeros((), dtype=_wide(weight))
        for number, states in enumerate(hidden):
            for rows in chunks(len(states), chunk_rows):
                # no local variable refers to a part of a chunk, so memory is freed before the next one
                total += _add_chunk(
                    functools.partial(loss_of_chunk, number, rows),
                    states[rows],
                    shared,
                    expected_gradient,
                    hidden_gradients[number][rows],
                )
        is_added = weight_gradient is not None and buffer is not None
        ctx.weight = weight if is_added else None
        ctx.gradients = (None if weight_gradient is None or is_added else weight_gradient.rounded(), hidden_gradients)
        ctx.expected_gradient = expected_gradient
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.gradients is None:
            raise RuntimeError("a sum over chunks can only be differentiated once; its gradients are gone")
        weight_gradient, hidden_gradients = ctx.gradients
        ctx.gradients = None  # they are multiplied in place below
        # exactly 1 if the gradient is as expected; comparing it would make the host wait for a GPU
        factor = gradient / ctx.expected_gradient
        if ctx.weight is not None:
            torch._assert_async(factor == 1, "the gradient that was added to the buffer was another one")
            weight_gradient = added_gradient(ctx.weight)
        elif factor.is_cuda or factor != 1:
            for part in (weight_gradient, *hidden_gradients):
                if part is not None:
                    part.mul_(factor)
        return weight_gradient, None, None, None, None, None, *hidden_gradients


class _Shared(NamedTuple):
    """What all chunks share."""

    weight: Tensor
    """Weight of the output layer, [vocab_local, hidden]."""
    memory: Tensor | None
    """Memory for the logits of any chunk; None: each chunk has its own."""
    gradient: _WeightGradient | None
    """Gradient of the weight; None if it is frozen."""


def _add_chunk(
    loss_function: Callable[[Tensor], Tensor],
    hidden: Tensor,
    shared: _Shared,
    expected_gradient: Tensor,
    hidden_gradient: Tensor,
) -> Tensor:
    """Returns the loss of one chunk; writes its gradient to `hidden_gradient`, and adds that of the weight."""
    logits = logits_of_rows(hidden, shared.weight, shared.memory).requires_grad_()
    with torch.enable_grad():
        loss = loss_function(logits)
    # the graph of this chunk alone, which is freed here with everything it saved
    gradient = torch.autograd.grad(loss, logits, expected_gradient.to(loss.dtype))[0].squeeze(1)
    torch.matmul(gradient, shared.weight, out=hidden_gradient)
    if shared.gradient is not None:
        shared.gradient.add(gradient, hidden)
    return loss.detach()


class _WeightGradient:
    """Gradient of the output weight, summed over chunks in at least float32: in its buffer, or rounded once."""

    def __init__(self, weight: Tensor, buffer: Tensor | None = None) -> None:
        self._weight, self._wide = weight, _wide(weight)
        self._sum = buffer  # without one, starts with the first product instead of zeros

    def add(self, gradient: Tensor, hidden: Tensor) -> None:
        """Adds the part of one chunk: gradient of its logits [rows, vocab_local], hidden states [rows, hidden]."""
        if not gradient.is_cuda:  # CPUs have no matrix product from half precision to float32
            gradient, hidden = gradient.to(self._wide), hidden.to(self._wide)
        if self._sum is not None:
            add_product(hidden, gradient, self._sum)
        elif gradient.dtype == self._wide:
            self._sum = torch.mm(gradient.t(), hidden)
        else:
            self._sum = torch.mm(gradient.t(), hidden, out_dtype=self._wide)

    def rounded(self) -> Tensor:
        """Returns the gradient in the dtype of the weight."""
        return torch.zeros_like(self._weight) if self._sum is None else self._sum.to(self._weight.dtype)
