"""The loss pair (numerator, denominator): a loss before its division, and the functions that make one.

Means cannot be added across microbatches, ranks or masks, but sums can. Therefore a loss function returns two sums, and
the division happens once, in `mtrain/core/engine/finalize.py`.

The contract of a loss function (docs/extending/loss.md): pairs are added, so the numerator must be a sum over tokens of
values that each depend on one token alone, or over sequences of values from `TermInputs.sum_over_sequence`.

Diagnostics travel with the pair. A mean is two sums as well, (numerator, denominator) in one tensor of shape [2], and
is divided once at the end; a maximum is a scalar. Both are combined over chunks, microbatches and ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from mtrain.base.errors import ConfigError
from mtrain.config.extras import TEMPERATURE, column
from mtrain.config.schema.loss import MAIN_TERM, Aggregation
from mtrain.core.loss.sequences import PackedSequences, TokenSources, sum_by_sequence, sum_by_source, sum_over_ranks

if TYPE_CHECKING:
    from mtrain.core.loss.vocab_parallel.logits import VocabParallelLogits


@dataclass(frozen=True, eq=False)
class LossPair:
    """This rank's partial sums of one term. Pairs add, from (0, 0); a pair unpacks into numerator and denominator."""

    numerator: Tensor
    """Sum over this rank's tokens of weight x loss, in nats; float32 scalar with a graph."""
    denominator: Tensor
    """This rank's part of the divisor; float64 scalar without a graph."""
    by_source: Tensor | None = None
    """Numerator and denominator of each source of a blend, [2, sources] float64 without a graph; None if losses are not
    reported by source, or if neither `weigh` nor `weigh_sequences` made the pair."""
    diagnostics: Mapping[str, Tensor] = field(default_factory=dict)
    """Means and maxima by name, without a graph, made by `mtrain.diagnosed` and declared by `mtrain.reports`."""

    def __iter__(self) -> Iterator[Tensor]:
        return iter((self.numerator, self.denominator))


class Extras(dict[str, Tensor]):
    """Extras of `Datum.extras` by name: those that loss functions of the run declare by `mtrain.needs_extras`."""

    def __missing__(self, name: str) -> Tensor:
        raise ConfigError(
            f"a loss function reads the extra {name!r}, but no loss function of the run says that it needs it; mark it "
            f"with mtrain.needs_extras({name!r})"
        )


@dataclass(frozen=True)
class TermInputs:
    """Input of a loss function: one microbatch, or this context-parallel rank's slice of it."""

    logits: VocabParallelLogits
    """Logits, [seq, batch, vocab_local], of this rank's shard of the vocabulary, and losses over all shards."""
    labels: Tensor
    """Token to predict at each position, [batch, seq] int64; meaningless where the weight is 0."""
    weights: Tensor
    """Factor of each token's loss under the term's aggregation, [batch, seq] float32; 0 where masked."""
    denominator_weights: Tensor
    """Share of each token in the denominator, [batch, seq] float64; the shares of the global batch add up to it."""
    tokens: Tensor
    """Input tokens, [batch, seq] int64."""
    teacher: VocabParallelLogits | None = None
    """Logits of the frozen teacher for the same tokens, sharded like the model's; None if the run has no teacher."""
    context: dist.ProcessGroup | None = None
    """Context-parallel group, whose ranks hold the other tokens of the same sequences; None if this rank holds all."""
    aggregation: Aggregation = "token-mean"
    """Aggregation of the term."""
    packed: PackedSequences | None = None
    """Sequence of each token, if a row may hold several sequences; None if each row is one sequence."""
    extras: Mapping[str, Tensor] = field(default_factory=Extras)
    """Further numbers from the data by name, such as advantages, [batch, seq] float32, for functions marked with
    `needs_extras`. Position t has the value for the prediction of token t + 1. An extra of a whole sequence is repeated
    at each of its positions; padding has 0."""
    sources: TokenSources | None = None
    """Source of each token in a blend; None if losses of the term are not reported by source."""

    @property
    def shares(self) -> Tensor:
        """Returns `denominator_weights` under its name of version 0.1.0, deprecated and kept until version 0.2."""
        return self.denominator_weights

    @property
    def sequence_ids(self) -> Tensor:
        """Returns the sequence number of each token, [batch, seq] int64, counted from 0 in the microbatch and the same
        on all ranks.

        As in every aggregation, a sequence is a sample: one conversation, even in a packed row, or one window of
        running text with all of its documents.
        """
        if self.packed is not None:
            return self.packed.ids
        batch, seq = self.labels.shape
        return torch.arange(batch, device=self.labels.device).unsqueeze(1).expand(batch, seq)

    def logits_at(self, temperature: float | None) -> VocabParallelLogits:
        """Returns the logits divided by a temperature, for functions marked with `at_temperature`. None means the
        temperature of each sample (`Datum.temperature`), or 1 if the data have none."""
        if temperature is None:
            return self.logits.divided_by(self.extras[TEMPERATURE]) if TEMPERATURE in self.extras else self.logits
        return self.logits.divided_by(temperature)

    def sum_over_sequence(self, values: Tensor) -> Tensor:
        """Sums values over the tokens of each sequence, including those on other context-parallel ranks.

        One all-reduce of [sequences] numbers over CP and one in backward; none at cp = 1. Every rank must call it, and
        the result must reach the numerator on every rank, as `weigh_sequences` ensures.

        Args:
            values: One value per token, [batch, seq]. Values at tokens of weight 0 are ignored, even inf or nan.

        Returns:
            Sums, [sequences] float64, the same on all ranks; index them with `sequence_ids` to get one per token.
        """
        # torch.where, not values * (weights != 0): a masked value may be inf or nan, and 0 x inf is nan
        masked_values = torch.where(self.weights != 0, values, 0.0)
        # float64, since the order of summation depends on cp, and float32 would show it in the last digits
        if self.packed is None:
            return sum_over_ranks(masked_values.sum(dim=1, dtype=torch.float64), self.context)
        return sum_over_ranks(sum_by_sequence(masked_values.double(), self.packed), self.context)


@dataclass(frozen=True)
class TokenInputs(TermInputs):
    """Some tokens of a microbatch as one row: input of functions marked with `per_token` if logits come in chunks."""

    @property
    def sequence_ids(self) -> Tensor:
        """Raises ConfigError, since the other tokens of a sequence may be in other calls."""
        raise ConfigError(
            "a loss function marked with mtrain.per_token asks for sequences, but is shown a few tokens at a "
            "time; remove the mark"
        )

    def sum_over_sequence(self, values: Tensor) -> Tensor:
        """Raises ConfigError, as `sequence_ids` does."""
        return self.sequence_ids


LossFunction = Callable[[TermInputs], LossPair]

Function = TypeVar("Function", bound=Callable[..., LossPair])


def needs_teacher(function: Function) -> Function:
    """Marks a loss function that reads `TermInputs.teacher`; a run without `loss.teacher` refuses it.

    The teacher runs only for marked functions. An unmarked function gets its logits only if another term is marked.
    """
    # an attribute of the function, so that it holds under any name; `asks_for_teacher` looks through functools.partial
    function.__dict__["needs_teacher"] = True
    return function


def needs_extras(*names: str, **by_option: str) -> Callable[[Function], Function]:
    """Marks a loss function that reads `TermInputs.extras`; data without them are refused before a step.

    Args:
        names: Extras that the function always reads. An extra such as "topk_ids[k]" has as many numbers per token as
            the function's option `k` says; `stacked_extra` returns them.
        by_option: Extras by option of the function; each is read unless the option is None, 0 or False.
    """

    def marked(function: Function) -> Function:
        function.__dict__["needs_extras"] = (names, by_option)
        return function

    return marked


def at_temperature(function: Function) -> Function:
    """Marks a loss function that has an option `temperature` and gets its logits from `TermInputs.logits_at`.

    If the option is None, the temperatures in the data reach the function as an extra.
    """
    function.__dict__["at_temperature"] = True
    return function


@dataclass(frozen=True)
class Reported:
    """Names of the diagnostics that a loss function declares."""

    means: tuple[str, ...] = ()
    maxima: tuple[str, ...] = ()


def reports(*means: str, maxima: Sequence[str] = ()) -> Callable[[Function], Function]:
    """Marks a loss function whose pairs have these diagnostics for every microbatch.

    The names appear in `StepResult.diagnostics` and in the records of a run, those of a side term as `term/name`.
    """

    def marked(function: Function) -> Function:
        function.__dict__["reports"] = Reported(means, tuple(maxima))
        return function

    return marked


def stacked_extra(inputs: TermInputs, name: str, width: int) -> Tensor:
    """Returns the first `width` numbers of an extra with several numbers per token, [batch, seq, width] float32."""
    return torch.stack([inputs.extras[column(name, number)] for number in range(width)], dim=-1)


def per_token(function: Function) -> Function:
    """Marks a loss function that may be called with a few tokens at a time, and only with tokens that some term counts.

    Its value for a token must depend on that token's logits, label, weight, extras and teacher alone, and be exactly 0
    if both its weight and its share of the denominator are 0. The function may use neither `sum_over_sequence` nor
    `sequence_ids`. In return the run never holds the logits of a whole microbatch, and computes none for tokens that no
    term counts.
    """
    function.__dict__["per_token"] = True
    return function


def per_token_unless(**options: Sequence[object]) -> Callable[[Function], Function]:
    """Marks a loss function like `per_token`, except when an option has one of the given values."""

    def marked(function: Function) -> Function:
        function.__dict__["per_token_unless"] = options
        return per_token(function)

    return marked


def consumes_logits(function: Function) -> Function:
    """Marks a loss function that reads its logits by one call of `cross_entropy` alone, so that exponentials and
    gradient may overwrite them if no other term reads them."""
    function.__dict__["consumes_logits"] = True
    return function


def weigh(token_losses: Tensor, inputs: TermInputs) -> LossPair:
    """Sums weight x loss and the shares: the last step of nearly every loss function.

    A token of weight 0 adds exactly 0, and its loss gets gradient 0, even if the loss is inf or nan. (The backward of
    earlier operations, such as the square of inf, can still turn this 0 into nan; mask their inputs.) The numerator
    keeps its graph even if all tokens are masked. Losses are [batch, seq], float32 or wider.
    """
    # selecting by index would make the host wait for the number of selected tokens
    return _pair(torch.where(inputs.weights != 0, token_losses * inputs.weights, 0.0), inputs)


def weigh_sequences(sequence_losses: Tensor, inputs: TermInputs) -> LossPair:
    """Sums share x loss: the last step of a loss of whole sequences, as `weigh` is for a loss of tokens.

    A sequence counts by its shares of the denominator. Each share belongs to one token on one rank, so a sequence
    counts once under any layout: by its sample weight in means over sequences, by its number of loss tokens in
    token-mean, and not at all if it has no loss token (unless loss.empty_sequences=include). Losses, [sequences], come
    from `TermInputs.sum_over_sequence`, which gives all ranks that hold parts of a sequence the same value.

    Raises:
        ConfigError: The aggregation divides by a constant, so sequences have no shares.
    """
    if inputs.aggregation in ("sum", "token-sum-norm"):
        raise ConfigError(
            f"loss.aggregation={inputs.aggregation} divides by a constant, but the loss function weighs whole "
            "sequences by their shares of the denominator; set loss.aggregation=seq-mean-token-sum"
        )
    losses = sequence_losses.double()[inputs.sequence_ids]
    return _pair(torch.where(inputs.denominator_weights != 0, losses * inputs.denominator_weights, 0.0), inputs)


def _pair(summands: Tensor, inputs: TermInputs) -> LossPair:
    """Sums the summands of the numerator, [batch, seq], and the shares; both also by source if `inputs` has sources."""
    numerator = summands.sum().to(inputs.logits.dtype)
    denominator = inputs.denominator_weights.sum(dtype=torch.float64)
    if inputs.sources is None:
        return LossPair(numerator, denominator)
    divisors = sum_by_source(inputs.denominator_weights, inputs.sources)
    if inputs.aggregation in ("sum", "token-sum-norm"):
        # one token carries the constant divisor of the whole batch, but the divisor applies to all sources
        divisors = denominator.expand_as(divisors)
    by_source = torch.stack([sum_by_source(summands.detach(), inputs.sources), divisors])
    return LossPair(numerator, denominator, by_source)


def diagnosed(
    pair: LossPair, inputs: TermInputs, means: Mapping[str, Tensor], maxima: Mapping[str, Tensor] | None = None
) -> LossPair:
    """Returns the pair with diagnostics over all tokens whose weight is not 0; each of them counts once.

    Args:
        means: Values by name, [batch, seq]; the run reports their mean.
        maxima: Values by name, [batch, seq]; the run reports the largest.
    """
    counted = inputs.weights != 0
    diagnostics = {
        name: _mean_of(torch.where(counted, values.detach(), 0.0), counted) for name, values in means.items()
    }
    for name, values in (maxima or {}).items():
        # a microbatch may have no tokens, and max() of no elements raises
        counted_values = torch.where(counted, values.detach(), -math.inf).double().flatten()
        diagnostics[name] = torch.cat([counted_values, counted_values.new_full((1,), -math.inf)]).max()
    return replace(pair, diagnostics={**pair.diagnostics, **diagnostics})


def _mean_of(numerators: Tensor, denominators: Tensor) -> Tensor:
    """Returns both sums, [2] float64: a mean that can be added across ranks."""
    return torch.stack([numerators.detach().sum(dtype=torch.float64), denominators.detach().sum(dtype=torch.float64)])


def joined(first: Tensor, second: Tensor) -> Tensor:
    """Combines a diagnostic of two parts of a batch: adds two means' sums, or takes the larger of two maxima."""
    return first + second if first.ndim else torch.maximum(first, second)


def shown_name(term: str, name: str) -> str:
    """Returns the name of a term's diagnostic in records."""
    return name if term == MAIN_TERM else f"{term}/{name}"
