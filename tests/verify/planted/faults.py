"""Known faults of layouts, adapters and of what all layouts share, as replacements of named functions.

Each occurred in a real trainer. Those that `--inject` plants are in `mtrain.verify.planted`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import _GeneratorContextManager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mtrain.arch import padded_vocab_size
from mtrain.config.schema.loss import MAIN_TERM
from mtrain.core.batch.batch import Microbatch
from mtrain.core.engine import optimizer
from mtrain.core.engine.finalize import NumeratorFactors, finalize_gradients
from mtrain.core.engine.loss_reduction import GlobalTotals, PairAccumulator, StepSums
from mtrain.core.engine.muon import Muon
from mtrain.core.engine.optimizer import Optimizer, Update
from mtrain.core.engine.rank_model import RankModel
from mtrain.core.engine.router_balance import Factors, RouterBalance
from mtrain.core.engine.schedule import LossOfLogits
from mtrain.core.engine.sharded_model import ShardedModel
from mtrain.core.layers.adapters.adapter import Adapter, is_adapter_key
from mtrain.core.layers.adapters.linear import LinearAdapter
from mtrain.core.layers.attention.core_attention import RowAttention
from mtrain.core.layers.attention.full_width_norm import FullWidthNorm
from mtrain.core.layers.attention.key_source import Gathered, Ring, Whole
from mtrain.core.layers.attention.recurrent.core import CoreParameters, Inputs, RecurrentCore
from mtrain.core.layers.norm import Norm
from mtrain.core.layers.output_layer import Logits
from mtrain.core.loss.objective import Objective
from mtrain.core.loss.pair import LossPair
from mtrain.core.ranks.all_reduce import AsyncAllReduce
from mtrain.core.ranks.broadcast import slice_for_rank
from mtrain.core.ranks.groups import Groups
from mtrain.core.step.loss import OutputLoss, ScalarOf
from mtrain.verify.planted.faults import ALONE
from tests.verify.planted.image_faults import IMAGE_PLANTS
from tests.verify.planted.plants import Plant, become, configured, in_step, in_worker, modules, replacing
from tests.verify.planted.shared_faults import SHARED_PLANTS


class _SummedAgain(LinearAdapter):
    def _same_gradient(self, narrow: Tensor) -> Tensor:
        return super()._same_gradient(super()._same_gradient(narrow))


class _NormsOfRank(LinearAdapter):
    def _over_ranks(self, squares: Tensor) -> Tensor:
        return squares


def _all_become(kind: type[LinearAdapter]) -> Callable[[Sequence[nn.Module]], None]:
    def change(chunks: Sequence[nn.Module]) -> None:
        for adapter in modules(chunks, LinearAdapter):
            if type(adapter) is LinearAdapter:  # no subclass, such as one that returns a matrix
                become(adapter, kind)

    return change


def _not_marked(chunks: Sequence[nn.Module]) -> None:
    for parameter in (each for adapter in modules(chunks, Adapter) for each in adapter.parameters()):
        marked: Any = parameter
        marked.sequence_parallel = False


class _FrozenDecayed(Optimizer):
    @torch.no_grad()
    def update(self, lr: float, grad_norm: float) -> Update:
        parameters = (each for chunk in self.sharded.chunks for each in chunk.parameters())
        for frozen in (each for each in parameters if not each.requires_grad):
            frozen.mul_(1 - lr * self._weight_decay)
        return super().update(lr, grad_norm)


def _without_scale(section: Any) -> dict[str, Any]:
    return {"alpha_pattern": {part: section.alpha_of(part) / section.scale_of(part) for part in section.parts}}


def _whole_times_tp(sharded: ShardedModel, sums: StepSums, groups: Groups, *others: Any) -> GlobalTotals:
    named = (each for chunk in sharded.chunks for each in chunk.named_parameters())
    of_adapters: set[Tensor] = {parameter for name, parameter in named if is_adapter_key(name)}
    for parameter, gradient in sharded.local_gradients():
        if parameter not in of_adapters:
            gradient.mul_(groups.layout.tp)
    return finalize_gradients(sharded, sums, groups, *others)


ADAPTER_PLANTS: dict[str, Plant] = {
    "adapter-gradient-times-tp": Plant(change_model=_all_become(_SummedAgain)),
    "adapter-gradient-not-reduced": Plant(change_model=_not_marked),
    "adapter-scale-dropped": Plant(config=configured("adapter", _without_scale)),
    "magnitude-by-tp-rank": Plant(change_model=_all_become(_NormsOfRank)),
    "frozen-weights-decayed": in_worker("Optimizer", _FrozenDecayed),
    "saved-module-times-tp": in_step("finalize_gradients", _whole_times_tp),
}


_Factor = Callable[[Microbatch], float]


def _with_loss(change: Callable[[LossOfLogits, Sequence[Microbatch], Groups], LossOfLogits]) -> Plant:
    """Replaces the loss of the microbatches of a step."""

    class Faulty(OutputLoss):
        def __init__(self, whole: Any, rows: Any, model: RankModel, *others: Any) -> None:
            super().__init__(whole, rows, model, *others)
            self._others: tuple[Any, ...] = ()
            self._changed = change(self._sound, rows, model.groups)

        def scalar(self, logits: Logits, batch: Microbatch, *others: Any) -> tuple[Tensor, dict[str, LossPair]]:
            self._others = others
            scalar, pairs = self._changed(logits, batch)
            return scalar, dict(pairs)

        def _sound(self, logits: Logits, batch: Microbatch) -> tuple[Tensor, Mapping[str, LossPair]]:
            return super().scalar(logits, batch, *self._others)

    return in_step("OutputLoss", Faulty)


def _scaled(factors: Callable[[Sequence[Microbatch], Groups], _Factor]) -> Plant:
    """Multiplies the objective of each microbatch by a factor; reported sums stay right."""

    class Faulty(OutputLoss):
        def __init__(self, whole: Any, rows: Any, model: RankModel, *others: Any) -> None:
            super().__init__(whole, rows, model, *others)
            self._factor = factors(rows, model.groups)

        def scalar(
            self, logits: Logits, batch: Microbatch, scalar_of: ScalarOf, expected_gradient: Tensor
        ) -> tuple[Tensor, dict[str, LossPair]]:
            # inside, since the gradient of the output layer is formed in the forward pass
            factor = self._factor(batch)
            return super().scalar(logits, batch, lambda pairs: scalar_of(pairs) * factor, expected_gradient)

    return in_step("OutputLoss", Faulty)


def _share(batch: Microbatch) -> float:
    return float(batch.denominator_weights[MAIN_TERM].sum())


def _dp_means(batches: Sequence[Microbatch], groups: Groups) -> _Factor:
    own = torch.tensor(sum(map(_share, batches)), dtype=torch.float64, device=groups.device)
    everyone = own.clone()
    dist.all_reduce(own, group=groups.cp)
    dist.all_reduce(everyone, group=groups.dp_cp)
    factor = float(everyone / (groups.layout.dp * own)) if own > 0 else 0.0
    return lambda batch: factor


class _WithoutTheLast(OutputLoss):
    """Loss that neither differentiates nor counts the last of several microbatches."""

    def __init__(self, whole: Any, rows: Any, *others: Any) -> None:
        super().__init__(whole, rows, *others)
        self._is_alone, self._num_left = len(rows) == 1, len(rows)

    def scalar(
        self, logits: Logits, batch: Microbatch, scalar_of: ScalarOf, expected_gradient: Tensor
    ) -> tuple[Tensor, dict[str, LossPair]]:
        self._num_left -= 1
        kept = 1.0 if self._is_alone or self._num_left else 0.0
        scalar, pairs = super().scalar(logits, batch, lambda pairs: scalar_of(pairs) * kept, expected_gradient)
        return scalar, {term: _times(pair, kept) for term, pair in pairs.items()}


def _times(pair: LossPair, factor: float) -> LossPair:
    return replace(pair, numerator=pair.numerator * factor, denominator=pair.denominator * factor)


def _denominator(change: Callable[[Tensor], Tensor]) -> Plant:
    """Changes the denominator of every microbatch before it is added up."""

    def faulty(loss: LossOfLogits, batches: Sequence[Microbatch], groups: Groups) -> LossOfLogits:
        def changed(logits: Logits, batch: Microbatch) -> tuple[Tensor, Mapping[str, LossPair]]:
            objective, pairs = loss(logits, batch)
            return objective, {
                term: replace(pair, denominator=change(pair.denominator)) for term, pair in pairs.items()
            }

        return changed

    return _with_loss(faulty)


def _sliced(change: Callable[[Microbatch, Microbatch, int], dict[str, Any]]) -> Plant:
    """Changes fields of rows sliced for context parallelism, from the full rows, their slice and cp_rank."""

    def faulty(batches: Sequence[Microbatch], groups: Groups) -> list[Microbatch]:
        cuts = slice_for_rank(batches, groups)
        if groups.layout.cp == 1:
            return cuts
        return [replace(cut, **change(rows, cut, groups.cp_rank)) for rows, cut in zip(batches, cuts, strict=True)]

    return in_step("slice_for_rank", faulty)


def _whole_shares(rows: Microbatch, cut: Microbatch, cp_rank: int) -> dict[str, Any]:
    shares = {term: torch.zeros_like(each) for term, each in cut.denominator_weights.items()}
    for term, each in rows.denominator_weights.items():
        shares[term][:, 0] = each.sum(1)
    return {"denominator_weights": shares}


def _shifted_labels(rows: Microbatch, cut: Microbatch, cp_rank: int) -> dict[str, Any]:
    return {"labels": torch.cat((cut.tokens[:, 1:], cut.labels[:, -1:]), dim=1)}


def _norm_parameters(**marks: bool) -> Plant:
    """Sets wrong marks on the parameters of norms."""

    def change(chunks: Sequence[nn.Module]) -> None:
        for parameter in (each for norm in modules(chunks, Norm) for each in norm.parameters()):
            for name, mark in marks.items():
                setattr(parameter, name, mark)

    return Plant(change_model=change)


def _finalized(change: Callable[[Groups], Groups]) -> Plant:
    """Reduces the gradients and sums of a step over other groups."""

    def faulty(sharded: ShardedModel, sums: StepSums, groups: Groups, *others: Any) -> GlobalTotals:
        return finalize_gradients(sharded, sums, change(groups), *others)

    return in_step("finalize_gradients", faulty)


class _OwnReplica(Groups):
    @property
    def stage(self) -> dist.ProcessGroup:
        group: dist.ProcessGroup = self.collection.tp_cp
        return group


def _rank_not_reduced(sharded: ShardedModel, sums: StepSums, groups: Groups, *others: Any) -> GlobalTotals:
    if groups.dp_rank == 1:
        sharded.scale_gradients(0.0)
    return finalize_gradients(sharded, sums, groups, *others)


def _totals_in_half(sharded: ShardedModel, sums: StepSums, groups: Groups, *others: Any) -> GlobalTotals:
    if groups.layout.dp > 1:  # as ranks send them that add up in bfloat16
        sums.pairs.sums.copy_(sums.pairs.sums.bfloat16())
    return finalize_gradients(sharded, sums, groups, *others)


def _gradients_in_half(sharded: ShardedModel, sums: StepSums, groups: Groups, *others: Any) -> GlobalTotals:
    if groups.layout.dp > 1:
        for _, gradient in sharded.local_gradients():
            gradient.copy_(gradient.bfloat16())
    return finalize_gradients(sharded, sums, groups, *others)


class _LocalPlan(NumeratorFactors):
    def __init__(self, planned: Sequence[float], objective: Objective, is_fp16: bool, groups: Groups) -> None:
        super().__init__(planned, objective, is_fp16, _OwnReplica(**vars(groups)))


class _DepthsByMain(NumeratorFactors):
    def of_terms(self) -> Mapping[str, float | Tensor]:
        factors, given = super().of_terms(), self._coefficients
        return {name: given[name] if name.startswith("mtp_") else factors[name] for name in factors}


class _PaddingIsReal(OutputLoss):
    def __init__(self, whole: Any, rows: Any, model: RankModel, *others: Any) -> None:
        size = padded_vocab_size(model.config.model, model.groups.layout.tp)
        config = configured("model", lambda model: {"vocab_size": size})(model.config)
        super().__init__(whole, rows, replace(model, config=config), *others)


def _keys_in_rank_order(chunks: Sequence[nn.Module]) -> None:
    def unordered(rows: Tensor) -> tuple[Tensor, Tensor]:
        order = torch.arange(len(rows), device=rows.device)
        return order, order

    for attention in modules(chunks, RowAttention):
        if isinstance(attention.layout_source, Gathered):
            attention.layout_source.orders = unordered  # type: ignore[method-assign]


def _ring_without_hops(chunks: Sequence[nn.Module]) -> None:
    for attention in modules(chunks, RowAttention):
        if isinstance(attention.layout_source, Ring):
            attention.layout_source = Whole()


class _NormOfRank(FullWidthNorm):
    def forward(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        tp, self.tp = self.tp, ALONE  # only here: elsewhere the group says how the weights are sharded
        try:
            return super().forward(query, key)
        finally:
            self.tp = tp


def _full_width_norm_by_rank(chunks: Sequence[nn.Module]) -> None:
    for norm in modules(chunks, FullWidthNorm):
        become(norm, _NormOfRank)


class _OneDocument(RecurrentCore):
    def _computed(self, inputs: Inputs, parameters: CoreParameters, document_starts: Tensor | None) -> Tensor:
        return super()._computed(inputs, parameters, None)


class _HalfDecay(RecurrentCore):
    def _computed(self, inputs: Inputs, parameters: CoreParameters, document_starts: Tensor | None) -> Tensor:
        rounded = inputs.log_decay.bfloat16().to(inputs.log_decay.dtype)
        return super()._computed(inputs._replace(log_decay=rounded), parameters, document_starts)


class _StateDropped(RecurrentCore):
    def _states_before(self, maps: Tensor) -> Tensor:
        return torch.zeros_like(super()._states_before(maps))


def _cores_become(kind: type[RecurrentCore]) -> Callable[[Sequence[nn.Module]], None]:
    def change(chunks: Sequence[nn.Module]) -> None:
        for core in modules(chunks, RecurrentCore):
            become(core, type(kind.__name__, (kind, type(core)), {}))

    return change


class _SharedOut(RouterBalance):
    def watching(
        self, accumulator: PairAccumulator, factors: Factors, num_sequences: int
    ) -> _GeneratorContextManager[None]:
        sharers = self._groups.layout.tp * self._groups.layout.cp
        return super().watching(accumulator, lambda: factors() / sharers, num_sequences)


class _LoadsOfRank(RouterBalance):
    def _sum_loads(self, counts: Tensor) -> None:
        pass


class _ClipsTheSum(Optimizer):
    _of_sum: Tensor

    def local_grad_norm_sq(self) -> Tensor:
        self._of_sum = super().local_grad_norm_sq()
        return self._of_sum

    def _clip(self, grad_norm: float) -> None:
        super()._clip(math.sqrt(AsyncAllReduce(self._of_sum.view(1).clone()).get().item()))


class _ExpertsLeftOut(Optimizer):
    def _counts_here(self, part: Any) -> bool:
        is_of_experts = any(group["is_expert_parallel"] for group in part.param_groups)
        return super()._counts_here(part) and not (is_of_experts and self._collection.ep.rank() > 0)


class _MuonByTpRank(Muon):
    def _orthogonalize(self, name: str, whole: Tensor) -> None:
        is_divided = name.endswith(("linear_qkv.weight", "linear_proj.weight"))
        for shard in whole.chunk(self._groups.layout.tp if is_divided else 1, dim=int("linear_proj" in name)):
            super()._orthogonalize(name, shard)


class _FusedMuon(Muon):
    def _segments(self, name: str, num_rows: int) -> list[int]:
        return [num_rows]


PLANTS: dict[str, Plant] = {
    "dp-means": _scaled(_dp_means),
    "cp-counts-again": _sliced(_whole_shares),
    "dp-size-in-denominator": _scaled(lambda batches, groups: lambda batch: float(groups.layout.dp)),
    "cp-scaled-loss": _scaled(lambda batches, groups: lambda batch: float(groups.layout.cp)),
    "dropped-microbatch": in_step("OutputLoss", _WithoutTheLast),
    "labels-shifted-after-slicing": _sliced(_shifted_labels),
    "keys-in-rank-order": Plant(change_model=_keys_in_rank_order),
    "hops-left-out": Plant(change_model=_ring_without_hops),
    "clip-before-normalisation": in_worker("Optimizer", _ClipsTheSum),
    "clamped-denominator": _denominator(lambda value: value.clamp(min=1)),
    "epsilon-in-denominator": _denominator(lambda value: value + 1e-8),
    "int32-weights": _denominator(lambda value: value.to(torch.int32).to(torch.float64)),
    "dp-rank-not-reduced": in_step("finalize_gradients", _rank_not_reduced),
    "totals-in-half": in_step("finalize_gradients", _totals_in_half),
    "gradients-in-half": in_step("finalize_gradients", _gradients_in_half),
    "dropout-left-on": Plant(config=configured("model", lambda model: {"hidden_dropout": 0.1})),
    "vocabulary-padding-in-softmax": in_step("OutputLoss", _PaddingIsReal),
    "local-side-term-denominators": in_step("NumeratorFactors", _LocalPlan),
    "norms-decayed": Plant(config=configured("optimizer", lambda section: {"decay_norms_and_biases": True})),
    "norms-counted-per-tp-rank": _norm_parameters(tensor_model_parallel=True),
    "full-width-norm-by-tp-rank": Plant(change_model=_full_width_norm_by_rank),
    "state-across-documents": Plant(change_model=_cores_become(_OneDocument)),
    "state-dropped-at-parts": Plant(change_model=_cores_become(_StateDropped)),
    "decay-in-half-precision": Plant(change_model=_cores_become(_HalfDecay)),
    "router-losses-shared-out": in_step("RouterBalance", _SharedOut),
    "expert-loads-per-rank": in_step("RouterBalance", _LoadsOfRank),
    "experts-left-out-of-norm": in_worker("Optimizer", _ExpertsLeftOut),
    "depths-divided-by-main": in_step("NumeratorFactors", _DepthsByMain),
    "matrices-by-tp-rank": replacing(optimizer, "Muon", _MuonByTpRank),
    "matrices-fused": replacing(optimizer, "Muon", _FusedMuon),
    **ADAPTER_PLANTS,
    **IMAGE_PLANTS,
    **SHARED_PLANTS,
}
