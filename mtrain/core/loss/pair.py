"""The pair: a loss that has not been averaged yet, and how a loss function makes one.

A mean cannot be added across microbatches, ranks or masks; a sum can. So a loss function returns both parts and the
division happens once, in `mtrain/core/engine/finalize.py`.

The contract of a loss function (docs/extending/loss.md): its pairs are added up, so its numerator has to be a sum over
tokens of values that each depend on one token alone, or over sequences of values from `TermInputs.sum_over_sequence`.

Diagnostics travel with the pair. Like a loss, a mean is two sums, (numerator, denominator) in one tensor of shape [2],
and is divided once at the end; a maximum is a scalar. Both are combined over chunks, microbatches and ranks.
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
    """Local partial sums of one term; pairs add, and (0, 0) is neutral. Unpacks into numerator and denominator."""

    numerator: Tensor
    """Sum over this rank's tokens of weight x loss, in nats; float32 scalar with a graph."""
    denominator: Tensor
    """Share of this rank in the divisor; float64 scalar without a graph."""
    by_source: Tensor | None = None
    """Numerator and denominator of each source of a blend, [2, sources] float64 without a graph; None if losses are not
    reported by source, or if the pair was made without `weigh` and `weigh_sequences`."""
    diagnostics: Mapping[str, Tensor] = field(default_factory=dict)
    """Means and maxima by name, without a graph, made by `mtrain.diagnosed` and declared by `mtrain.reports`."""

    def __iter__(self) -> Iterator[Tensor]:
        return iter((self.numerator, self.denominator))


class Extras(dict[str, Tensor]):
    """Extras of `Datum.extras` by name; only those that some loss function of the run is marked for."""

    def __missing__(self, name: str) -> Tensor:
        raise ConfigError(
            f"a loss function reads the extra {name!r}, but no loss function of the run says that it needs it; mark it "
            f"with mtrain.needs_extras({name!r})"
        )


@dataclass(frozen=True)
class TermInputs:
    """Input of a loss function: one microbatch, the part of the sequence that this context-parallel rank owns."""

    logits: VocabParallelLogits
    """Logits, [seq, batch, vocab_local], with their shard of the vocabulary and the group that holds the rest."""
    labels: Tensor
    """Token to predict at each position, [batch, seq] int64; meaningless where the weight is 0."""
    weights: Tensor
    """Factor of each token's loss under the term's aggregation, [batch, seq] float32; 0 where masked."""
    denominator_weights: Tensor
    """Share of each token in the denominator, [batch, seq] float64; over the global batch they add up to it."""
    tokens: Tensor
    """Input tokens, [batch, seq] int64."""
    teacher: VocabParallelLogits | None = None
    """Logits of the frozen teacher for the same tokens, split like the model's; None where the run has no teacher."""
    context: dist.ProcessGroup | None = None
    """Ranks that hold the other tokens of the same sequences; None if this rank holds all of them."""
    aggregation: Aggregation = "token-mean"
    """Aggregation of the term."""
    packed: PackedSequences | None = None
    """Sequences of the tokens, if a row may hold several; None if each row is one sequence."""
    extras: Mapping[str, Tensor] = field(default_factory=Extras)
    """Further numbers of the data by name, such as advantages, [batch, seq] float32, for functions marked with
    `needs_extras`. Position t has what belongs to the prediction of token t + 1. An extra of a whole sequence stands at
    each of its positions; padding has 0."""
    sources: TokenSources | None = None
    """Source of each token in a blend; None if the term's losses are not reported by source."""

    @property
    def shares(self) -> Tensor:
        """Returns `denominator_weights`; the name of version 0.1.0, kept until version 0.2."""
        return self.denominator_weights

    @property
    def sequence_ids(self) -> Tensor:
        """Returns the sequence of each token, [batch, seq] int64, counted from 0 in the microbatch, the same on all
        ranks.

        As in every aggregation, a sequence is a sample: one conversation, also in a packed row, or one window of
        running text with all of its documents.
        """
        if self.packed is not None:
            return self.packed.ids
        batch, seq = self.labels.shape
        return torch.arange(batch, device=self.labels.device).unsqueeze(1).expand(batch, seq)

    def logits_at(self, temperature: float | None) -> VocabParallelLogits:
        """Returns the logits divided by the sampler's temperature, for functions marked with `at_temperature`; None is
        that of each sample (`Datum.temperature`), or 1."""
        if temperature is None:
            return self.logits.divided_by(self.extras[TEMPERATURE]) if TEMPERATURE in self.extras else self.logits
        return self.logits.divided_by(temperature)

    def sum_over_sequence(self, values: Tensor) -> Tensor:
        """Adds up values over the tokens of each sequence, including those on other context-parallel ranks.

        One all-reduce of [sequences] numbers over CP and one in backward; none at cp = 1. Every rank has to call it,
        and its result has to reach the numerator on every rank, as `weigh_sequences` ensures.

        Args:
            values: One value per token, [batch, seq]. Tokens of weight 0 are left out, whatever their value is.

        Returns:
            Sums, [sequences] float64, the same on all ranks; index them with `sequence_ids` to get one per token.
        """
        # where, not values * (weights != 0): a masked value may be inf or nan, and 0 x inf is nan
        kept = torch.where(self.weights != 0, values, 0.0)
        # float64: the order of adding depends on cp, and float32 would show it in the last digits
        if self.packed is None:
            return sum_over_ranks(kept.sum(dim=1, dtype=torch.float64), self.context)
        return sum_over_ranks(sum_by_sequence(kept.double(), self.packed), self.context)


@dataclass(frozen=True)
class TokenInputs(TermInputs):
    """Some tokens of a microbatch as one row: input of functions marked `per_token` where logits are never whole."""

    @property
    def sequence_ids(self) -> Tensor:
        """Raises ConfigError: the other tokens of a sequence may be in other calls."""
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
    """Marks a loss function that reads `TermInputs.teacher`: a run without `loss.teacher` refuses it.

    The teacher runs for marked functions; an unmarked one finds it only where another term needs it.
    """
    # on the function itself, so that it holds under any name; `asks_for_teacher` looks through functools.partial
    function.__dict__["needs_teacher"] = True
    return function


def needs_extras(*names: str, **by_option: str) -> Callable[[Function], Function]:
    """Marks a loss function that reads `TermInputs.extras`: data without them are refused before a step.

    Args:
        names: Names of the extras that it always reads. An extra such as "topk_ids[k]" has as many numbers per token as
            the function's option `k` says; `stacked_extra` returns them.
        by_option: Extra by option of the function, read where the option is neither None nor 0 nor False.
    """

    def marked(function: Function) -> Function:
        function.__dict__["needs_extras"] = (names, by_option)
        return function

    return marked


def at_temperature(function: Function) -> Function:
    """Marks a loss function that has an option `temperature` and takes its logits from `TermInputs.logits_at`.

    Where the option is None, the temperatures of the data reach it as an extra.
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

    The names appear in `StepResult.diagnostics` and in the records of a run; those of a side term as `term/name`.
    """

    def marked(function: Function) -> Function:
        function.__dict__["reports"] = Reported(means, tuple(maxima))
        return function

    return marked


def stacked_extra(inputs: TermInputs, name: str, width: int) -> Tensor:
    """Returns an extra of several numbers per token, [batch, seq, width] float32: the first `width` of them."""
    return torch.stack([inputs.extras[column(name, number)] for number in range(width)], dim=-1)


def per_token(function: Function) -> Function:
    """Marks a loss function that may be called with a few tokens at a time, and only with those that some term counts.

    Its value for a token must follow from that token's logits, label, weight, extras and teacher alone, and be exactly
    0 where both its weight and its share of the denominator are 0. It uses neither sums over sequences nor
    `sequence_ids`. The run then never holds the logits of a microbatch whole, and computes none for tokens that no term
    counts.
    """
    function.__dict__["per_token"] = True
    return function


def per_token_unless(**options: Sequence[object]) -> Callable[[Function], Function]:
    """Marks a loss function as `per_token` does, unless an option has one of the given values."""

    def marked(function: Function) -> Function:
        function.__dict__["per_token_unless"] = options
        return per_token(function)

    return marked


def weigh(token_losses: Tensor, inputs: TermInputs) -> LossPair:
    """Sums weight x loss and the shares: the last step of nearly every loss function.

    A token of weight 0 adds exactly 0, and its loss gets gradient 0, even if the loss is inf or nan. (The backward of
    the operations before, such as the square of inf, can still turn this 0 into nan: mask their inputs.) The numerator
    keeps its graph when all tokens are masked. Losses are [batch, seq], float32 or wider.
    """
    # a selection by index would make the host wait for the number of selected tokens
    return _pair(torch.where(inputs.weights != 0, token_losses * inputs.weights, 0.0), inputs)


def weigh_sequences(sequence_losses: Tensor, inputs: TermInputs) -> LossPair:
    """Sums share x loss: the last step of a loss of whole sequences, as `weigh` is for a loss of tokens.

    A sequence counts by its shares of the denominator, each of which belongs to one token of one rank, so it counts
    once under any layout: by its sample weight in means over sequences, by its number of loss tokens in token-mean, and
    not at all if it has no loss token (unless loss.empty_sequences=include). Losses, [sequences], are made with
    `TermInputs.sum_over_sequence`, so that all ranks that hold parts of a sequence have the same.

    Raises:
        ConfigError: The aggregation divides by one number for the whole batch, of which no sequence has a share.
    """
    if inputs.aggregation in ("sum", "token-sum-norm"):
        raise ConfigError(
            f"loss.aggregation={inputs.aggregation} divides by 1, which no sequence has a share of, but the loss "
            "function weighs whole sequences; set loss.aggregation=seq-mean-token-sum"
        )
    losses = sequence_losses.double()[inputs.sequence_ids]
    return _pair(torch.where(inputs.denominator_weights != 0, losses * inputs.denominator_weights, 0.0), inputs)


def _pair(kept: Tensor, inputs: TermInputs) -> LossPair:
    """Sums what each token adds to the numerator, [batch, seq], and the shares; both by source if wanted."""
    numerator = kept.sum().to(inputs.logits.dtype)
    denominator = inputs.denominator_weights.sum(dtype=torch.float64)
    if inputs.sources is None:
        return LossPair(numerator, denominator)
    divisors = sum_by_source(inputs.denominator_weights, inputs.sources)
    if inputs.aggregation in ("sum", "token-sum-norm"):
        # one number for the whole batch: a single token of one source carries it, but it divides all sources
        divisors = denominator.expand_as(divisors)
    by_source = torch.stack([sum_by_source(kept.detach(), inputs.sources), divisors])
    return LossPair(numerator, denominator, by_source)


def diagnosed(
    pair: LossPair, inputs: TermInputs, means: Mapping[str, Tensor], maxima: Mapping[str, Tensor] | None = None
) -> LossPair:
    """Returns the pair with diagnostics over the tokens whose weight is not 0, each of which counts once.

    Args:
        means: Values by name, [batch, seq]; the mean over tokens is reported.
        maxima: Values by name, [batch, seq]; the largest is reported.
    """
    counted = inputs.weights != 0
    made = {name: _mean_of(torch.where(counted, values.detach(), 0.0), counted) for name, values in means.items()}
    for name, values in (maxima or {}).items():
        # max() of no elements raises, and a microbatch may have no tokens
        kept = torch.where(counted, values.detach(), -math.inf).double().flatten()
        made[name] = torch.cat([kept, kept.new_full((1,), -math.inf)]).max()
    return replace(pair, diagnostics={**pair.diagnostics, **made})


def _mean_of(numerators: Tensor, denominators: Tensor) -> Tensor:
    """Returns both sums, [2] float64: a mean to which other ranks can add their sums."""
    return torch.stack([numerators.detach().sum(dtype=torch.float64), denominators.detach().sum(dtype=torch.float64)])


def joined(one: Tensor, other: Tensor) -> Tensor:
    """Combines a diagnostic of two parts of a batch: adds sums, keeps the larger of two maxima."""
    return one + other if one.ndim else torch.maximum(one, other)


def shown_name(term: str, name: str) -> str:
    """Returns the name of a term's diagnostic as it appears in records."""
    return name if term == MAIN_TERM else f"{term}/{name}"
