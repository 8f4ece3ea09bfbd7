"""Losses of logits whose vocabulary is split over a tensor-parallel group.

Nothing here gathers the logits: each rank reduces its own columns and the ranks exchange numbers of one token each.
The exponentials of the shard are computed once, kept once in float32, and shared by every loss of the microbatch.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable


class VocabParallelLogits:
    """One rank's columns of the logits, and what can be computed from them together with the other ranks.

    Args:
        local: [seq, batch, vocab_local], any floating dtype.
        group: The ranks that hold the other columns; None where this rank holds all of them.
        first_index: Vocabulary index of the first local column.
        vocab_size: Real tokens. Columns from this index on are padding: whatever they hold, they take part in no
            softmax, and their gradient is exactly 0.

    Results are float32 (float64 for float64 logits), in nats, [batch, seq]; gradients have the dtype of `local`.
    Every rank of the group must make the same calls in the same order.
    """

    def __init__(self, local: Tensor, group: dist.ProcessGroup | None, first_index: int, vocab_size: int) -> None:
        self.local = local
        self.group = group
        self.first_index = first_index
        self.vocab_size = vocab_size
        self._exponentials: _Exponentials | None = None
        self._losses: _TokenLosses | None = None

    def cross_entropy(self, labels: Tensor) -> Tensor:
        """The negative log probability of each label.

        Two all-reduces over the group (the maximum; the sum of exponentials stacked with the label's logit), none in
        backward. One where another method already knows the exponentials, none where `labels` is the tensor of the
        call before.

        Args:
            labels: [batch, seq] int64. A label outside [0, vocab_size), such as -100, is read as label 0: the value
                is finite and meaningless, so its weight has to be 0.

        Returns:
            [batch, seq] nats.
        """
        if self._losses is None or self._losses.labels is not labels:
            self._losses = self._token_losses(labels)
        return self._losses.cross_entropy

    def logsumexp(self) -> Tensor:
        """The logarithm of the softmax's denominator at each token.

        No collective after `cross_entropy`, else two all-reduces over the group (maximum, sum of exponentials); none
        in backward.

        Returns:
            [batch, seq] nats.
        """
        return self._own_logsumexp if self._losses is None else self._losses.logsumexp

    @cached_property
    def _own_logsumexp(self) -> Tensor:
        """`logsumexp` where no label is known."""
        if self._exponentials is None:
            values, maximum = self._exponentiate()
            total = values.sum(-1)
            _all_reduce(total, dist.ReduceOp.SUM, self.group)
            self._exponentials = _Exponentials(values, maximum, total, self._num_real)
        result: Tensor = _LogSumExp.apply(self.local, self._exponentials)  # type: ignore[no-untyped-call]
        return result.t()

    def _token_losses(self, labels: Tensor) -> _TokenLosses:
        """Cross entropy, and log-sum-exp as a second output of the same node: one backward serves both."""
        column, is_local = self._locate(labels)
        if self._exponentials is None:
            values, maximum = self._exponentiate()
            stacked = torch.stack([values.sum(-1), self._shifted_logits(column, is_local, maximum)])
            _all_reduce(stacked, dist.ReduceOp.SUM, self.group)
            total, logits = stacked.unbind()
            self._exponentials = _Exponentials(values, maximum, total, self._num_real)
        else:
            logits = self._shifted_logits(column, is_local, self._exponentials.maximum)
            _all_reduce(logits, dist.ReduceOp.SUM, self.group)
        target = _Target(column, is_local, logits)
        entropy, logsumexp = _CrossEntropy.apply(self.local, self._exponentials, target)  # type: ignore[no-untyped-call]
        return _TokenLosses(labels, entropy.t(), logsumexp.t())

    @property
    def _num_real(self) -> int:
        """Local columns that are not padding; they come first."""
        return min(max(self.vocab_size - self.first_index, 0), self.local.shape[-1])

    def _locate(self, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Each label's local column, 0 where another rank holds it, and whether this rank does; both [seq, batch]."""
        index = labels.t().contiguous()
        index = torch.where((index >= 0) & (index < self.vocab_size), index, 0) - self.first_index
        is_local = (index >= 0) & (index < self._num_real)
        return torch.where(is_local, index, 0), is_local

    def _shifted_logits(self, column: Tensor, is_local: Tensor, maximum: Tensor) -> Tensor:
        """[seq, batch] the label's logit minus the token's maximum, 0 where another rank holds it."""
        logits = self.local.detach().gather(-1, column.unsqueeze(-1)).squeeze(-1)
        return torch.where(is_local, logits - maximum, 0.0)

    def _exponentiate(self) -> tuple[Tensor, Tensor]:
        """[seq, batch, vocab_local] exponentials relative to each token's maximum, and [seq, batch] that maximum."""
        maximum = self._maximum()
        shifted = torch.sub(self.local.detach(), maximum.unsqueeze(-1))  # one pass: bf16 in, float32 out
        shifted[..., self._num_real :] = float("-inf")
        return shifted.exp_(), maximum

    def _maximum(self) -> Tensor:
        """Each token's largest real logit over the group, [seq, batch]; 0 where all are -inf, as any constant does."""
        real = self.local.detach()[..., : self._num_real]
        dtype = _compute_dtype(self.local)
        if self._num_real == 0:
            maximum = torch.full(real.shape[:-1], float("-inf"), dtype=dtype, device=real.device)
        else:
            maximum = real.amax(-1).to(dtype)
        _all_reduce(maximum, dist.ReduceOp.MAX, self.group)
        return torch.where(maximum == float("-inf"), 0.0, maximum)


@dataclass(frozen=True)
class _Exponentials:
    """The softmax before its division; the only [seq, batch, vocab_local] tensor that is kept for backward."""

    values: Tensor
    """[seq, batch, vocab_local] exp(logit - maximum); 0 at padding."""
    maximum: Tensor
    """[seq, batch] over the whole vocabulary."""
    total: Tensor
    """[seq, batch]: sum of the values over the whole vocabulary."""
    num_real: int
    """Local columns that are not padding."""


@dataclass(frozen=True)
class _Target:
    """Where the labels are; all [seq, batch]."""

    column: Tensor
    """Local column of the label, 0 where another rank holds it."""
    is_local: Tensor
    """Whether this rank holds the label's column."""
    shifted_logit: Tensor
    """Logit of the label minus the token's maximum."""


@dataclass(frozen=True)
class _TokenLosses:
    """What one node of the graph gives."""

    labels: Tensor
    cross_entropy: Tensor
    logsumexp: Tensor


class _CrossEntropy(torch.autograd.Function):
    """(logits) -> (cross entropy, log-sum-exp), both [seq, batch]."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, exponentials: _Exponentials, target: _Target) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(exponentials.values, exponentials.total, target.column, target.is_local)
        ctx.num_real, ctx.dtype = exponentials.num_real, local.dtype
        log_total = exponentials.total.log()
        return log_total - target.shifted_logit, log_total + exponentials.maximum

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_entropy: Tensor, grad_logsumexp: Tensor) -> tuple[Tensor, None, None]:
        values, total, column, is_local = ctx.saved_tensors
        scale = grad_entropy + grad_logsumexp
        gradient = _softmax_times(values, total, scale, ctx.num_real, ctx.dtype)
        # softmax x scale minus the label's share, formed in full precision: near 1 the two almost cancel
        column = column.unsqueeze(-1)
        at_label = values.gather(-1, column).squeeze(-1) / total * scale
        at_label = torch.where(scale == 0, 0.0, at_label) - torch.where(is_local, grad_entropy, 0.0)
        kept = torch.where(is_local, at_label.to(ctx.dtype), gradient.gather(-1, column).squeeze(-1))
        return gradient.scatter_(-1, column, kept.unsqueeze(-1)), None, None


class _LogSumExp(torch.autograd.Function):
    """(logits) -> log-sum-exp, [seq, batch]."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, exponentials: _Exponentials) -> Tensor:
        ctx.save_for_backward(exponentials.values, exponentials.total)
        ctx.num_real, ctx.dtype = exponentials.num_real, local.dtype
        return exponentials.total.log() + exponentials.maximum

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logsumexp: Tensor) -> tuple[Tensor, None]:
        values, total = ctx.saved_tensors
        return _softmax_times(values, total, grad_logsumexp, ctx.num_real, ctx.dtype), None


def _softmax_times(values: Tensor, total: Tensor, scale: Tensor, num_real: int, dtype: torch.dtype) -> Tensor:
    """Softmax x scale in the logits' dtype, without another full-precision copy.

    A token of scale 0 gets exactly 0 although its logits may hold inf or nan; so does every padding column.
    """
    gradient = torch.empty_like(values, dtype=dtype)
    torch.mul(values, (scale / total).unsqueeze(-1), out=gradient)
    gradient.masked_fill_((scale == 0).unsqueeze(-1), 0.0)
    gradient[..., num_real:] = 0.0
    return gradient


def _compute_dtype(local: Tensor) -> torch.dtype:
    """float32, or float64 for float64 logits."""
    return torch.promote_types(local.dtype, torch.float32)


def _all_reduce(tensor: Tensor, op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup | None) -> None:
    """In place; nothing where the group is this rank alone."""
    if group is not None and group.size() > 1:
        dist.all_reduce(tensor, op=op, group=group)
