"""Router terms of the objective, and the token counts that move the biases of routers.

In every forward pass a router passes its logits and its choice to its watch. The watch acts only in passes of a
training step that autograd records. Exactly one such pass exists for each layer and microbatch, since with
recomputation the first pass is not recorded. So validation, teachers and recomputation need no special case. The
sequences come as an argument, so a recomputed pass sees those of its own microbatch.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, assert_never

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from mtrain.config import Config
from mtrain.config.schema.experts import ExpertsSection
from mtrain.core.engine.loss_reduction import PairAccumulator, TermTotals
from mtrain.core.layers.build import unwrap
from mtrain.core.layers.moe.router import Router
from mtrain.core.loss import router as losses
from mtrain.core.ranks.groups import Groups

Factors = Callable[[], Tensor]
"""Returns the factor of the sum of each term before backward, [router_terms] float64 on the device."""


@dataclass(frozen=True)
class _Step:
    """One pass of a step in progress."""

    accumulator: PairAccumulator
    factors: Factors
    counts: Tensor
    """Number of text tokens that this rank has sent to each expert, [routers, experts] int64."""
    running: Tensor
    """Choices of all ranks so far, [routers, experts] int64; for the balance on running counts."""
    num_sequences: int
    """Largest number of sequences in a microbatch; smaller microbatches count 0 for the sequences they lack."""


class _Weighted(NamedTuple):
    """One term of one router for one microbatch, by token."""

    losses: Tensor
    """[seq_local, batch]."""
    weights: Tensor
    """[seq_local, batch] float64, without a graph."""
    denominator_weights: Tensor
    """Contributions of this rank to the denominator; counts that add up to it."""


class _Load(NamedTuple):
    """The load of a router's experts in one microbatch."""

    scores: Tensor
    """Normalized scores, [seq_local, batch, experts]."""
    choices: Tensor
    """Number of choices of each expert in each whole sequence, [sequences, experts] int64."""
    ids: Tensor
    """Sequence number of each position, [seq_local, batch] int64; 0 at padding."""


class RouterBalance:
    """The routers of this rank's chunks, and their counts."""

    def __init__(self, config: Config, groups: Groups, chunks: Sequence[torch.nn.Module]) -> None:
        """Makes a watch for every router, and attaches it."""
        self.terms = tuple(losses.ROUTER_TERMS[name] for name in config.loss.router.coefficients)
        self._groups = groups
        self.routers = [module for chunk in chunks for module in unwrap(chunk).modules() if isinstance(module, Router)]
        self._rate = 0.0 if config.model.experts is None else config.model.experts.bias_update_rate
        depths = [model.mtp for model in map(unwrap, chunks) if model.mtp_process]
        # MTP depths read fewer tokens than layers; if they counted, per_layer() could not divide by the number of
        # layers
        of_depths = {module for depth in depths for module in depth.modules()}
        self._num_layers = sum(config.model.has_experts(layer) for layer in range(config.model.num_layers))
        self.counts: Tensor | None = None
        """Number of text tokens that this rank sent to each expert in the last step, [routers, experts] int64."""
        self.step: _Step | None = None
        self._watches = [
            RouterStats(self, index, router.section, groups, router not in of_depths)
            for index, router in enumerate(self.routers if self.terms or self._rate else [])
        ]
        self.watch()

    def watch(self) -> None:
        """Attaches the watches to the routers, in place of those of other adapters on the same frozen model."""
        for router, watch in zip(self.routers, self._watches, strict=False):
            router.watch = watch

    @contextmanager
    def watching(self, accumulator: PairAccumulator, factors: Factors, num_sequences: int) -> Iterator[None]:
        """Watches the routers inside the block, which is one pass of a step, and adds their pairs to the accumulator.

        `factors` is called in the first forward pass; `num_sequences` is the largest number in a microbatch.
        """
        shape = (len(self.routers), self.routers[0].section.num_experts if self.routers else 0)
        # integers, whose sums are exact in any order of microbatches and ranks
        counts, running = torch.zeros(2, *shape, dtype=torch.int64, device=self._groups.device)
        self.step = _Step(accumulator, factors, counts, running, num_sequences)
        try:
            yield
        finally:
            self.step = None
        # a step may run the schedule several times
        self.counts = counts if self.counts is None else self.counts + counts

    def clear_counts(self) -> None:
        """Clears the counts at the beginning of a step."""
        self.counts = None

    def per_layer(self, terms: Mapping[str, TermTotals]) -> dict[str, TermTotals]:
        """Returns the terms with the denominators of one layer, as planned, since the router of every layer has counted
        its tokens. Numerators remain sums over all layers and MTP depths."""
        return {
            term: replace(totals, denominator=totals.denominator / self._num_layers) if term in self.terms else totals
            for term, totals in terms.items()
        }

    @torch.no_grad()
    def move_biases(self) -> None:
        """Moves the bias of each expert by the rate, towards an even load in the step just watched.

        One all-reduce of [routers, experts] integers over the ranks of a pipeline stage; none if biases are constant.

        Source: bias += rate x sign(mean count - count), Wang et al. 2024 (arXiv 2408.15664), algorithm 1.
        """
        if not self._rate or not self.routers:
            return
        assert self.counts is not None, "no step has run"
        self._sum_loads(self.counts)
        # the sign of mean - count, computed exactly in integers as sum - count x number of experts
        signs = (self.counts.sum(1, keepdim=True) - self.counts * self.counts.shape[1]).sign()
        for router, sign in zip(self.routers, signs, strict=True):
            assert router.expert_bias is not None  # a rule of the section
            router.expert_bias.add_(sign, alpha=self._rate)
        self.counts = None

    def _sum_loads(self, counts: Tensor) -> None:
        # over TP x CP x DP, which together have routed every token of the batch through these layers exactly once
        _sum_over(self._groups.stage, counts)


class RouterStats:
    """The watch of one router: adds its terms to the objective, and counts the tokens of each expert."""

    def __init__(
        self, balance: RouterBalance, index: int, section: ExpertsSection, groups: Groups, is_counted: bool
    ) -> None:
        """Watches router `index`; `is_counted` is False for routers of MTP depths, which see fewer tokens."""
        self._balance, self._index, self._section, self._is_counted = balance, index, section, is_counted
        self._counts_sequences = groups.tp_rank == 0 and groups.cp_rank == 0
        self._sharers, self._replicas = groups.collection.tp_cp, groups.collection.dp

    def logits(self, logits: Tensor, sequence_ids: Tensor | None) -> Tensor:
        """Adds this router's terms to the objective; returns the logits, [seq_local, batch, experts].

        A balancing loss takes one all-reduce of [sequences, experts] integers over TP x CP; on running counts it takes
        another one of [experts] over data-parallel ranks. `sequence_ids`, [seq_local, batch] int64, are negative at
        padding.
        """
        step = self._balance.step
        if step is None or not self._balance.terms or not torch.is_grad_enabled():
            return logits
        assert sequence_ids is not None, "a router needs to know what is padding"
        # the loss mask is not used, since prompts load experts as well
        weighted = self._weighted(logits, sequence_ids, step)
        numerators = torch.stack([(term.losses * term.weights.to(logits.dtype)).sum() for term in weighted])
        shares = torch.stack([term.denominator_weights.sum() * self._is_counted for term in weighted])
        step.accumulator.add_router(numerators, shares)
        # the sum enters backward here, not with the loss, which exists only on the last stage
        return _Attached.apply(logits, (numerators * step.factors()).sum())  # type: ignore[no-untyped-call]

    def choice(self, chosen: Tensor, sequence_ids: Tensor | None) -> None:
        """Counts the text tokens for each expert, from the choice, [seq_local x batch, experts] bool, and sequence ids
        as in `logits`."""
        step = self._balance.step
        if step is not None and torch.is_grad_enabled():
            assert sequence_ids is not None, "a router needs to know what is padding"
            # before capacity drops tokens, so this is the load that the router requested
            step.counts[self._index] += (chosen & (sequence_ids >= 0).reshape(-1, 1)).sum(0)

    def _weighted(self, logits: Tensor, sequence_ids: Tensor, step: _Step) -> list[_Weighted]:
        is_text = sequence_ids >= 0
        load = self._load(logits, sequence_ids, step) if self._balance.terms != (losses.Z,) else None
        return [self._term(term, logits, is_text, load, step) for term in self._balance.terms]

    def _load(self, logits: Tensor, sequence_ids: Tensor, step: _Step) -> _Load:
        scores = losses.normalised_scores(logits, self._section.score, sequence_ids >= 0)
        choices = losses.choices_by_sequence(scores, self._section.top_k, sequence_ids, step.num_sequences)
        # ranks of TP x CP hold parts of the same sequences, and afterwards have the counts of whole sequences
        _sum_over(self._sharers, choices)
        return _Load(scores, choices, sequence_ids.clamp(min=0))

    def _term(
        self, term: losses.RouterTerm, logits: Tensor, is_text: Tensor, load: _Load | None, step: _Step
    ) -> _Weighted:
        weights, shares = is_text.double(), is_text
        if load is None or term == losses.Z:
            return _Weighted(losses.squared_logsumexp(logits, is_text), weights, is_text)
        match term:
            case "router_sequence_balance":
                # [sequences]; every text token has made top_k choices
                num_tokens = load.choices.sum(-1) // self._section.top_k
                # clamped for sequences without text, whose weights are 0 anyway
                weights = weights / num_tokens.double().clamp(min=1)[load.ids]
                choices = load.choices[load.ids]
                # sequences with text, which all ranks of TP x CP see but only one counts
                shares = (num_tokens > 0) & self._counts_sequences
            case "router_microbatch_balance":
                choices = load.choices.sum(0)
            case "router_global_balance":
                choices = self._so_far(load.choices.sum(0), step)
            case _:
                assert_never(term)
        return _Weighted(losses.balance_losses(load.scores, choices), weights, shares)

    def _so_far(self, choices: Tensor, step: _Step) -> Tensor:
        """Returns the choices of all ranks in this and all earlier microbatches, [experts]."""
        _sum_over(self._replicas, choices)
        # a copy, since backward reads it after later microbatches have been added
        return step.running[self._index].add_(choices).clone()


def _sum_over(group: dist.ProcessGroup, counts: Tensor) -> None:
    if dist.get_world_size(group) > 1:
        dist.all_reduce(counts, group=group)


class _Attached(torch.autograd.Function):
    """(values, addend) -> values; backward differentiates the addend as if it had been added to the loss."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, addend: Tensor) -> Tensor:
        ctx.like = addend.detach()  # for its dtype and device
        return values.view_as(values)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        # 1, since the addend already contains its factors and the fp16 loss scale
        return gradient, torch.ones_like(ctx.like)
