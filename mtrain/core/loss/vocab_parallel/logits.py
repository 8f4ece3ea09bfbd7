"""Logits with a vocabulary split over a tensor-parallel group, and their losses.

The logits are never gathered: each rank reduces its own columns, and the ranks exchange only a few numbers per token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
import torch.distributed as dist
from torch import Tensor

from mtrain.core.loss.vocab_parallel.cross_entropy import (
    CrossEntropy,
    Entropy,
    Exponentials,
    LogSumExp,
    TargetLogits,
    all_reduce,
    compute_dtype,
    exponentials_of,
    local_maximum,
    maximum_and_total,
    row_slices,
    shifted_logits,
)
from mtrain.core.loss.vocab_parallel.divergence import (
    Divergence,
    KnownProbabilities,
    Tempered,
    TopKDivergence,
    divergence_of_sums,
    local_sums,
)


class VocabParallelLogits:
    """One rank's columns of the logits, and the losses that it computes from them together with the other ranks.

    Args:
        local: Logits of this rank's columns, [seq, batch, vocab_local], of any floating dtype.
        group: Ranks that hold the other columns; None if this rank holds all of them.
        first_index: Vocabulary index of the first local column.
        vocab_size: Number of real tokens. Columns from this index on are padding: they are left out of every softmax,
            and their gradient is exactly 0.
        compiles_regions: Whether torch compiles the passes of cross entropy and log-sum-exp over the logits.

    Results are [batch, seq] in nats, float32 (float64 for float64 logits); gradients have the dtype of `local`. Every
    rank of the group must make the same calls in the same order. Methods state the number of all-reduces of a first
    call; what an earlier call has reduced (the maximum, the sum of exponentials) is not reduced again. Backward never
    communicates.
    """

    def __init__(
        self,
        local: Tensor,
        group: dist.ProcessGroup | None,
        first_index: int,
        vocab_size: int,
        compiles_regions: bool = False,
    ) -> None:
        self.local = local
        self.group = group
        self.first_index = first_index
        self.vocab_size = vocab_size
        # a rank may hold only padding
        self._is_compiled = compiles_regions and self._num_real > 0
        self._is_consumed = False
        self._maximum: Tensor | None = None
        self._local_values: Tensor | None = None
        self._local_sums: tuple[Tensor, Tensor] | None = None
        self._exponentials: Exponentials | None = None
        self._losses: _TokenLosses | None = None
        self._logsumexp: Tensor | None = None
        self._entropy: Tensor | None = None
        self._divided: list[tuple[float | Tensor, VocabParallelLogits]] = []

    def consumed(self) -> Self:
        """Lets `cross_entropy` overwrite the logits by their exponentials, and these by the gradient; returns itself.

        One call of it must be all that reads the logits. Autograd refuses to differentiate such a loss twice.
        """
        self._is_consumed = True
        return self

    @property
    def dtype(self) -> torch.dtype:
        """Returns the dtype of the results: float32, or float64 for float64 logits."""
        return compute_dtype(self.local)

    def divided_by(self, temperature: float | Tensor) -> VocabParallelLogits:
        """Returns the logits divided by a temperature, with a graph to these logits; the same object for the same
        temperature.

        The temperature is one number above 0, or one per token, [batch, seq], where 0 (at padding) counts as 1.
        """
        if isinstance(temperature, float | int) and temperature == 1:
            return self
        for known, divided in self._divided:  # tensors by identity: comparing values would make the host wait
            are_numbers = not isinstance(known, Tensor) and not isinstance(temperature, Tensor)
            if known is temperature or (are_numbers and known == temperature):
                return divided
        divisor = temperature
        if isinstance(temperature, Tensor):
            # 0 / 0 at a padding token would make the gradient of its hidden state nan
            divisor = torch.where(temperature > 0, temperature, 1.0).t().unsqueeze(-1)
        # in full precision, so that dividing rounds neither logits nor gradients to bf16
        local = self.local.to(self.dtype) / divisor
        divided = VocabParallelLogits(local, self.group, self.first_index, self.vocab_size, self._is_compiled)
        self._divided.append((temperature, divided))
        return divided

    def cross_entropy(self, labels: Tensor, label_smoothing: float = 0.0) -> Tensor:
        """Returns the negative log-probability of each label, or its mean under the smoothed target.

        Two all-reduces (the maximum; the sum of exponentials stacked with the target's logit). One if another method
        has computed the exponentials, none if both arguments are those of the previous call.

        Args:
            labels: Labels, [batch, seq] int64. A label outside [0, vocab_size), such as -100, is read as label 0, so
                its weight must be 0.
            label_smoothing: Share of the target spread evenly over all vocab_size real tokens, including the label; 0
                <= label_smoothing < 1.

        Source: label smoothing as in Szegedy et al. 2016, section 7, and in torch's cross entropy.
        """
        known = self._losses
        # by identity: comparing values would make the host wait for the device
        if known is None or known.labels is not labels or known.label_smoothing != label_smoothing:
            known = self._losses = self._token_losses(labels, label_smoothing)
        return known.cross_entropy

    def logsumexp(self) -> Tensor:
        """Returns the logarithm of the softmax denominator of each token.

        Two all-reduces (maximum, sum of exponentials); none if another method has computed the exponentials.
        """
        # the second output of the cross-entropy node, so that both share one backward pass
        if self._losses is not None:
            return self._losses.logsumexp
        if self._logsumexp is None:
            result: Tensor = LogSumExp.apply(self.local, self._known_exponentials())  # type: ignore[no-untyped-call]
            self._logsumexp = result.t()
        return self._logsumexp

    @torch.no_grad()
    def is_largest(self, labels: Tensor) -> Tensor:
        """Says whether the label has the largest logit (or one of them), [batch, seq] bool, without a graph.

        Labels are read as in `cross_entropy`. One all-reduce, and one more if the maximum is not known yet.
        """
        shifted = self._shifted_logits(*self._located(labels.t().contiguous()))
        all_reduce(shifted, dist.ReduceOp.SUM, self.group)
        return (shifted >= 0).t()

    def entropy(self) -> Tensor:
        """Returns the entropy of the distribution of each token, between 0 and log(vocab_size).

        Two all-reduces (the maximum; the sum of exponentials stacked with the sum of their products with the logits),
        one if another method has computed the exponentials.
        """
        if self._entropy is None:
            # exp(s) s with 0 log 0 = 0; at padding s is -inf, and 0 x -inf would be nan
            values = self._values()
            products = torch.xlogy(values, values).sum(-1)
            # before `_known_exponentials`, since this reduces the total in the same all-reduce
            (summed,) = self._sums_with_total(products)
            mean = summed / self._known_exponentials().total
            result: Tensor = Entropy.apply(self.local, self._known_exponentials(), mean)  # type: ignore[no-untyped-call]
            self._entropy = result.t()
        return self._entropy

    def kl_divergence(self, teacher: VocabParallelLogits, temperature: float = 1.0) -> Tensor:
        """Returns KL(teacher || self) for each token; no gradient reaches the teacher.

        Two all-reduces: one of both maxima, stacked, and one of three sums, stacked.

        Args:
            teacher: Logits of the same tokens, split in the same way.
            temperature: Divisor of both logits, above 0. The result is not multiplied by its square.
        """
        return self._divergence(teacher, temperature, is_reverse=False)

    def reverse_kl_divergence(self, teacher: VocabParallelLogits, temperature: float = 1.0) -> Tensor:
        """Returns KL(self || teacher) for each token: `kl_divergence` in the other direction."""
        return self._divergence(teacher, temperature, is_reverse=True)

    def top_k_divergence(self, ids: Tensor, known: Tensor, rest: Tensor) -> Tensor:
        """Returns KL(target || self) for each token, where the target is known for only k tokens.

        Two all-reduces (the maximum; the sum of exponentials stacked with two more sums), one if another method has
        computed the exponentials.

        Args:
            ids: Known tokens, [batch, seq, k], without duplicates.
            known: Their probabilities, [batch, seq, k].
            rest: Probability of all other tokens together, [batch, seq]; if it is 0 the other tokens are ignored.
        """
        column, is_local = self._located(ids.transpose(0, 1).contiguous())
        values = self._values()
        known, rest = known.transpose(0, 1).to(values.dtype), rest.t().to(values.dtype)
        target = KnownProbabilities(column, is_local, known, rest)
        shifted = self.local.detach().gather(-1, column) - self._known_maximum().unsqueeze(-1)
        mean = torch.where(is_local, target.known * shifted, 0.0).sum(-1)
        # summed directly: total - known would lose all digits if the known tokens have nearly all the mass
        other_total = torch.cat([target.at(rows).others_of(values[rows]).sum(-1) for rows in row_slices(self.local)])
        mean, other_total = self._sums_with_total(mean, other_total)
        result: Tensor = TopKDivergence.apply(  # type: ignore[no-untyped-call]
            self.local, self._known_exponentials(), target, other_total, mean
        )
        return result.t()

    def _divergence(self, teacher: VocabParallelLogits, temperature: float, is_reverse: bool) -> Tensor:
        assert teacher.local.shape == self.local.shape, "the logits of student and teacher are split differently"
        _find_maxima([self, teacher])
        student_softmax, teacher_softmax = self._tempered(temperature), teacher._tempered(temperature)
        sums = (
            local_sums(student_softmax, teacher_softmax) if is_reverse else local_sums(teacher_softmax, student_softmax)
        )
        all_reduce(sums, dist.ReduceOp.SUM, self.group)
        value = divergence_of_sums(sums).to(student_softmax.maximum.dtype)
        # local_sums puts the weighting distribution first; Divergence takes the order (student, teacher)
        log_totals = (sums[0::2] if is_reverse else sums[0::2].flip(0)).log()
        result: Tensor = Divergence.apply(self.local, student_softmax, teacher_softmax, log_totals, value, is_reverse)  # type: ignore[no-untyped-call]
        return result.t()

    def _token_losses(self, labels: Tensor, label_smoothing: float) -> _TokenLosses:
        """Computes cross entropy and log-sum-exp as two outputs of one node with a common backward."""
        assert 0 <= label_smoothing < 1
        column, is_local = self._located(labels.t().contiguous())
        # smoothed over the whole real vocabulary; megatron-core's _VocabParallelCrossEntropy
        # (tensor_parallel/cross_entropy.py) smooths over each rank's own part, so its loss differs from rank to rank
        label_share, uniform_share = 1.0 - label_smoothing, label_smoothing / self.vocab_size
        logits = self._shifted_logits(column, is_local) * label_share
        if label_smoothing > 0:
            logits = logits + self._sum_of_shifted_logits() * uniform_share
        (summed,) = self._sums_with_total(logits)
        target = TargetLogits(column, is_local, summed, label_share, uniform_share)
        entropy, logsumexp = CrossEntropy.apply(self.local, self._known_exponentials(), target)  # type: ignore[no-untyped-call]
        return _TokenLosses(labels, label_smoothing, entropy.t(), logsumexp.t())

    @property
    def _num_real(self) -> int:
        """Counts the local columns that are not padding; they come first."""
        return min(max(self.vocab_size - self.first_index, 0), self.local.shape[-1])

    def _located(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the local column of each vocabulary index, 0 if another rank holds it, and whether this rank does."""
        # an index out of range becomes 0: a label that no rank holds would get a logit equal to the maximum
        index = torch.where((index >= 0) & (index < self.vocab_size), index, 0) - self.first_index
        is_local = (index >= 0) & (index < self._num_real)
        return torch.where(is_local, index, 0), is_local

    def _shifted_logits(self, column: Tensor, is_local: Tensor) -> Tensor:
        """Returns the label's logit minus the token's maximum, [seq, batch]; 0 if another rank holds the label."""
        # detached, since the backward of the node covers this part
        logits = self.local.detach().gather(-1, column.unsqueeze(-1)).squeeze(-1)
        return torch.where(is_local, logits - self._known_maximum(), 0.0)

    def _sum_of_shifted_logits(self) -> Tensor:
        """Returns the sum over this rank's real columns of logit minus maximum, [seq, batch]."""
        maximum, real = self._known_maximum(), self._num_real
        # from the logits, since logits whose exponentials underflow count as well; by rows, to keep the copy small
        parts = [
            shifted_logits(self.local[rows, :, :real], maximum[rows], real).sum(-1) for rows in row_slices(self.local)
        ]
        return torch.cat(parts)

    def _known_maximum(self) -> Tensor:
        """Returns the largest logit of each token over the group, [seq, batch]; one all-reduce if not known yet."""
        if self._maximum is None:
            _find_maxima([self])
        assert self._maximum is not None
        return self._maximum

    def _values(self) -> Tensor:
        """Returns the exponentials relative to each token's maximum, [seq, batch, vocab_local]; 0 at padding."""
        if self._is_compiled:
            return exponentials_of(self.local, self._known_maximum(), self._num_real)
        # the only full-precision copy of the logits, shared by all losses of this distribution
        if self._local_values is None:
            maximum = self._known_maximum()
            self._local_values = exponentials_of(self.local, maximum, self._num_real, self._is_consumed)
        return self._local_values

    def _local_maximum(self) -> Tensor:
        """Returns each token's largest real logit on this rank, [seq, batch]; -inf if the rank holds only padding."""
        if not self._is_compiled:
            return local_maximum(self.local, self._num_real)
        self._local_sums = maximum_and_total.compiled_if(True)(self.local.detach(), self._num_real)
        return self._local_sums[0]

    def _local_total(self) -> Tensor:
        """Returns the sum of each token's exponentials on this rank, [seq, batch]."""
        maximum = self._known_maximum()
        if self._local_sums is None:
            return self._values().sum(-1)
        largest, total = self._local_sums
        return total * (largest - maximum).exp()

    def _with_total(self, total: Tensor) -> Exponentials:
        """Stores and returns the exponentials with their sum over all ranks."""
        source = self.local.detach() if self._is_compiled else self._values()
        maximum, num_real = self._known_maximum(), self._num_real
        known = Exponentials(source, maximum, total, num_real, self._is_compiled, self._is_consumed)
        self._exponentials = known
        return known

    def _known_exponentials(self) -> Exponentials:
        """Returns the exponentials and their sum; one all-reduce if the sum is not known yet."""
        if self._exponentials is None:
            total = self._local_total()
            all_reduce(total, dist.ReduceOp.SUM, self.group)
            return self._with_total(total)
        return self._exponentials

    def _sums_with_total(self, *parts: Tensor) -> tuple[Tensor, ...]:
        """Sums tensors, [seq, batch], over the group in one all-reduce, with the exponentials if not summed yet."""
        if self._exponentials is not None:
            stacked = torch.stack(parts)
            all_reduce(stacked, dist.ReduceOp.SUM, self.group)
            return stacked.unbind()
        stacked = torch.stack([self._local_total(), *parts])
        all_reduce(stacked, dist.ReduceOp.SUM, self.group)
        total, *summed = stacked.unbind()
        self._with_total(total)
        return tuple(summed)

    def _tempered(self, temperature: float) -> Tempered:
        return Tempered(self.local.detach(), self._known_maximum(), self._num_real, temperature)


@dataclass(frozen=True)
class _TokenLosses:
    """Arguments and outputs of one cross-entropy node."""

    labels: Tensor
    label_smoothing: float
    cross_entropy: Tensor
    logsumexp: Tensor


def _find_maxima(distributions: Sequence[VocabParallelLogits]) -> None:
    """Sets the largest real logit of each token over the group (0 if all are -inf); one all-reduce for all."""
    unknown = [logits for logits in distributions if logits._maximum is None]
    if not unknown:
        return
    # [unknown, seq, batch]
    stacked = torch.stack([logits._local_maximum() for logits in unknown])
    all_reduce(stacked, dist.ReduceOp.MAX, unknown[0].group)
    # 0 instead of -inf: -inf - (-inf) would be nan in every score of the token
    for logits, maximum in zip(unknown, torch.where(stacked == float("-inf"), 0.0, stacked)):
        logits._maximum = maximum
