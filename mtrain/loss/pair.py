"""The pair: a loss that has not been averaged yet, and how a loss function makes one.

A mean cannot be added across microbatches, ranks or masks; a sum can. So a loss function returns both parts and the
division happens once, in `mtrain/mcore/engine/finalize.py`.

The contract of a loss function (docs/extending/loss.md): its pairs are added up, so its numerator has to be a sum over
tokens of what each token says by itself, or over sequences of what `TermInputs.sum_over_sequence` made whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from mtrain.base.errors import ConfigError
from mtrain.config.extras import column
from mtrain.config.schema.loss import Aggregation
from mtrain.loss.sequences import PackedSequences, TokenSources, sum_by_sequence, sum_by_source, sum_over_ranks

if TYPE_CHECKING:
    from mtrain.loss.vocab_parallel.logits import VocabParallelLogits

MAIN_TERM = "main"
"""Name of the term that `loss.function` computes; side terms carry the names of the config."""


@dataclass(frozen=True, eq=False)
class LossPair:
    """Local partial sums of one term; pairs add, and (0, 0) is neutral. Unpacks into numerator and denominator."""

    numerator: Tensor
    """float32 scalar with a graph: sum over this rank's tokens of weight x loss, in nats."""
    denominator: Tensor
    """float64 scalar without a graph: this rank's share of the divisor."""
    by_source: Tensor | None = None
    """[2, sources] float64 without a graph: both parts of each source of a blend; None where nobody asks, or where a
    function made its pair otherwise than by `weigh` and `weigh_sequences`."""
    diagnostics: Mapping[str, Tensor] = field(default_factory=dict)
    """Name -> means and maxima without a graph, as `mtrain.loss.diagnostics.diagnosed` makes them; their names are
    those of `mtrain.loss.diagnostics.reports`."""

    def __iter__(self) -> Iterator[Tensor]:
        # two, since functions take a pair apart: whoever makes another pair of the parts leaves the rest behind
        return iter((self.numerator, self.denominator))


class Extras(dict[str, Tensor]):
    """Extras by name, as `Datum.extras` gives them; only those that some loss function of the run was marked for."""

    def __missing__(self, name: str) -> Tensor:
        raise ConfigError(
            f"a loss function reads the extra {name!r}, but no loss function of the run says that it needs it; mark it "
            f"with mtrain.needs_extras({name!r})"
        )


@dataclass(frozen=True)
class TermInputs:
    """What a loss function sees: one microbatch, the part of the sequence that this context-parallel rank owns."""

    logits: VocabParallelLogits
    """[seq, batch, vocab_local]; knows its shard of the vocabulary and the group that holds the rest."""
    labels: Tensor
    """[batch, seq] int64: the token to predict at each position; meaningless where the weight is 0."""
    weights: Tensor
    """[batch, seq] float32: what each token's loss is multiplied by, as the term's aggregation says; 0 where masked."""
    denominator_weights: Tensor
    """[batch, seq] float64: each token's share of the denominator; adds up to it over the global batch."""
    tokens: Tensor
    """[batch, seq] int64."""
    teacher: VocabParallelLogits | None = None
    """The frozen teacher's logits of the same tokens, split like the model's; None where the run has no teacher."""
    context: dist.ProcessGroup | None = None
    """The ranks that hold the other tokens of the same sequences; None where this rank holds all of them."""
    aggregation: Aggregation = "token-mean"
    """Of the term."""
    packed: PackedSequences | None = None
    """Which tokens belong together, where a row may hold several sequences; None where each row is one."""
    extras: Mapping[str, Tensor] = field(default_factory=Extras)
    """Name -> [batch, seq] float32: numbers that the data bring along, such as advantages, for functions marked with
    `needs_extras`. Aligned with the labels: position t has what belongs to the prediction of token t + 1. One of a
    whole sequence is given at every position of it; padding has 0."""
    sources: TokenSources | None = None
    """Which source of a blend each token comes from, where the term's losses are reported by source."""

    @property
    def shares(self) -> Tensor:
        """`denominator_weights` by its name of version 0.1.0, up to version 0.2."""
        return self.denominator_weights

    @property
    def sequence_ids(self) -> Tensor:
        """[batch, seq] int64: the sequence of each token, counted from 0 in the microbatch; the same numbers on all
        ranks that hold parts of it.

        A sequence is a sample, as in every aggregation: one conversation, wherever it lies in a packed row; one window
        of running text, with all of its documents.
        """
        if self.packed is not None:
            return self.packed.ids
        batch, seq = self.labels.shape
        # else a row is a sequence, on every context-parallel rank at the same index: no communication; expand takes no
        # memory
        return torch.arange(batch, device=self.labels.device).unsqueeze(1).expand(batch, seq)

    def sum_over_sequence(self, values: Tensor) -> Tensor:
        """Adds up values over the tokens of each sequence, those on other context-parallel ranks included.

        One all-reduce of [sequences] numbers over CP and one in backward; none at cp = 1. Every rank has to call it,
        and its result has to reach the numerator on every rank, as `weigh_sequences` sees to.

        Args:
            values: [batch, seq], one a token. Tokens of weight 0 are left out, whatever their value is.

        Returns:
            [sequences] float64, the same on all ranks of the sequence. `[sequence_ids]` spreads it over the tokens.
        """
        # where, not values * (weights != 0): a masked value may be inf or nan, and 0 x inf is nan
        kept = torch.where(self.weights != 0, values, 0.0)
        # float64: which tokens are added on which rank depends on cp, and float32 would show it in the last digits
        if self.packed is None:
            return sum_over_ranks(kept.sum(dim=1, dtype=torch.float64), self.context)
        return sum_over_ranks(sum_by_sequence(kept.double(), self.packed), self.context)


@dataclass(frozen=True)
class TokenInputs(TermInputs):
    """Some tokens of a microbatch, as one row: what functions marked `per_token` see where logits are never whole."""

    @property
    def sequence_ids(self) -> Tensor:
        """Refused: tokens of one sequence may be in other calls."""
        raise ConfigError(
            "a loss function marked with mtrain.loss.pair.per_token asks for sequences, but is shown a few tokens at a "
            "time; remove the mark"
        )

    def sum_over_sequence(self, values: Tensor) -> Tensor:
        """Refused, as `sequence_ids`."""
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
        names: Of those that it always reads. One as "topk_ids[k]" has so many numbers a token as the function's option
            `k` says; `stacked_extra` gives them.
        by_option: Option of the function -> extra that it reads where the option is neither None nor 0 nor False.
    """

    def marked(function: Function) -> Function:
        function.__dict__["needs_extras"] = (names, by_option)
        return function

    return marked


def stacked_extra(inputs: TermInputs, name: str, width: int) -> Tensor:
    """[batch, seq, width] float32: an extra of several numbers a token.

    Args:
        inputs: The microbatch.
        name: Of the extra, as in `Datum.extras`.
        width: Its numbers a token that are used, from the first on.
    """
    return torch.stack([inputs.extras[column(name, number)] for number in range(width)], dim=-1)


def per_token(function: Function) -> Function:
    """Marks a loss function that a few tokens at a time may be shown to, and only those that some term counts.

    What it adds for a token follows from that token's logits, label, weight, extras and teacher alone, and is exactly 0
    where its weight and its share of the denominator are. So it uses neither sums over sequences nor `sequence_ids`.
    The run then never holds the logits of a microbatch whole, and computes none for tokens that no term counts.
    """
    function.__dict__["per_token"] = True
    return function


def weigh(token_losses: Tensor, inputs: TermInputs) -> LossPair:
    """Sums weight x loss and the shares; how nearly every loss function ends.

    A token of weight 0 adds exactly 0, and its loss gets gradient 0, even where the loss is inf or nan. (A function
    that goes on from there can still turn this 0 into nan, as the square of inf does: mask what goes into it.) The
    numerator keeps its graph when all tokens are masked.

    Args:
        token_losses: [batch, seq], of float32 or wider, one loss a token.
        inputs: The microbatch whose weights and shares count.
    """
    # where, not a selection by index: the host would have to wait for the number of selected tokens
    return _pair(torch.where(inputs.weights != 0, token_losses * inputs.weights, 0.0), inputs)


def weigh_sequences(sequence_losses: Tensor, inputs: TermInputs) -> LossPair:
    """Sums share x loss: how a loss of whole sequences ends, as `weigh` ends one of tokens.

    A sequence counts by its shares of the denominator, each of which lies at one token of one rank, so it counts once
    under any layout: by its sample weight in the aggregations of means over sequences, by its number of loss tokens in
    token-mean, and not at all where it has no loss token (unless loss.empty_sequences=include).

    Args:
        sequence_losses: [sequences], the same on all ranks that hold parts of the sequences; made with
            `TermInputs.sum_over_sequence`.
        inputs: The microbatch whose shares count.

    Raises:
        ConfigError: The term is divided by one number for the whole batch, which no sequence has a share of.
    """
    if inputs.aggregation in ("sum", "token-sum-norm"):
        raise ConfigError(
            f"loss.aggregation={inputs.aggregation} divides by 1, which no sequence has a share of, but the loss "
            "function weighs whole sequences; set loss.aggregation=seq-mean-token-sum"
        )
    losses = sequence_losses.double()[inputs.sequence_ids]
    return _pair(torch.where(inputs.denominator_weights != 0, losses * inputs.denominator_weights, 0.0), inputs)


def _pair(kept: Tensor, inputs: TermInputs) -> LossPair:
    """Of what each token, [batch, seq], adds to the numerator."""
    numerator, denominator = kept.sum().float(), inputs.denominator_weights.sum(dtype=torch.float64)
    if inputs.sources is None:
        return LossPair(numerator, denominator)
    divisors = sum_by_source(inputs.denominator_weights, inputs.sources)
    if inputs.aggregation in ("sum", "token-sum-norm"):
        # one number for the whole batch, which lies at one token of one source but divides all of them
        divisors = denominator.expand_as(divisors)
    by_source = torch.stack([sum_by_source(kept.detach(), inputs.sources), divisors])
    return LossPair(numerator, denominator, by_source)
