"""How each fault of `inject` is planted: one function or attribute is replaced while a run lasts."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mtrain.data.batch import Microbatch
from mtrain.data.zigzag import slice_for_context_parallel
from mtrain.loss.objective import side_term_factors
from mtrain.loss.pair import MAIN_TERM, LossPair
from mtrain.loss.vocab_parallel.logits import VocabParallelLogits
from mtrain.mcore.distributed import broadcast
from mtrain.mcore.distributed.all_reduce import AsyncAllReduce
from mtrain.mcore.distributed.groups import Groups
from mtrain.mcore.engine import finalize, loss_reduction, muon, numerator_factors, optimizer
from mtrain.mcore.engine.schedule import run_schedule
from mtrain.mcore.model import norm, transformer_config
from mtrain.mcore.model.attention import context_parallel, full_width_norm
from mtrain.mcore.model.moe import balance
from mtrain.mcore.model.output_layer import Logits
from mtrain.training import step
from mtrain.verify.planted.adapter_faults import ADAPTER_PLANTS
from mtrain.verify.planted.planting import Plant, replaced
from mtrain.verify.planted.shared_faults import SHARED_PLANTS

_Factor = Callable[[Microbatch], float]


def _scaled(factors: Callable[[Sequence[Microbatch], Groups], _Factor]) -> Plant:
    """Multiplies what each microbatch back-propagates; reported sums stay right."""

    original = step.TrainingStep.accumulate

    def faulty(self: step.TrainingStep, *arguments: Any, **options: Any) -> None:
        def scaled_schedule(chunks: Any, batches: Any, loss: Any, accumulator: Any, config: Any) -> None:
            factor = factors(batches, self._groups)

            def scaled_loss(logits: Logits, batch: Microbatch) -> tuple[Tensor, Mapping[str, LossPair]]:
                objective, parts = loss(logits, batch)
                return objective * factor(batch), parts

            run_schedule(chunks, batches, scaled_loss, accumulator, config)

        with replaced(step, "run_schedule", scaled_schedule):
            original(self, *arguments, **options)

    return lambda: replaced(step.TrainingStep, "accumulate", faulty)


def _share(batch: Microbatch) -> float:
    return float(batch.denominator_weights[MAIN_TERM].sum())


def _microbatch_means(batches: Sequence[Microbatch], groups: Groups) -> _Factor:
    if len(batches) == 1:
        return lambda batch: 1.0
    mean = sum(map(_share, batches)) / len(batches)
    return lambda batch: mean / _share(batch) if _share(batch) > 0 else 0.0


def _dp_means(batches: Sequence[Microbatch], groups: Groups) -> _Factor:
    own = torch.tensor(sum(map(_share, batches)), dtype=torch.float64, device=groups.device)
    everyone = own.clone()
    dist.all_reduce(own, group=groups.cp)
    dist.all_reduce(everyone, group=groups.dp_cp)
    factor = float(everyone / (groups.layout.dp * own)) if own > 0 else 0.0
    return lambda batch: factor


def _dropped_microbatch() -> contextlib.AbstractContextManager[None]:
    def faulty(chunks: Any, batches: Any, loss: Any, accumulator: Any, config: Any) -> None:
        seen = 0

        def lossy(logits: Logits, batch: Microbatch) -> tuple[Tensor, Mapping[str, LossPair]]:
            nonlocal seen
            seen += 1
            objective, parts = loss(logits, batch)
            kept = 0.0 if seen == len(batches) > 1 else 1.0
            return objective * kept, {term: LossPair(*(part * kept for part in pair)) for term, pair in parts.items()}

        run_schedule(chunks, batches, lossy, accumulator, config)

    return replaced(step, "run_schedule", faulty)


def _sliced(change: Callable[[Microbatch, Microbatch, int], dict[str, Any]]) -> Plant:
    """Changes fields of (full rows, their cut, cp_rank) where rows are cut over context parallelism."""

    def faulty(microbatch: Microbatch, cp_size: int, cp_rank: int) -> Microbatch:
        cut = slice_for_context_parallel(microbatch, cp_size, cp_rank)
        return cut if cp_size == 1 else replace(cut, **change(microbatch, cut, cp_rank))

    return lambda: replaced(broadcast, "slice_for_context_parallel", faulty)


def _whole_shares(rows: Microbatch, cut: Microbatch, cp_rank: int) -> dict[str, Any]:
    shares = {term: torch.zeros_like(each) for term, each in cut.denominator_weights.items()}
    for term, each in rows.denominator_weights.items():
        shares[term][:, 0] = each.sum(1)
    return {"denominator_weights": shares}


def _shifted_labels(rows: Microbatch, cut: Microbatch, cp_rank: int) -> dict[str, Any]:
    return {"labels": torch.cat((cut.tokens[:, 1:], cut.labels[:, -1:]), dim=1)}


def _consecutive_positions(rows: Microbatch, cut: Microbatch, cp_rank: int) -> dict[str, Any]:
    length = cut.tokens.shape[1]
    return {"positions": rows.positions[:, cp_rank * length : (cp_rank + 1) * length]}


def _denominator(change: Callable[[Tensor], Tensor]) -> Plant:
    """Changes the denominator of every microbatch as it is added up."""
    original = loss_reduction.PairAccumulator.add

    def faulty(self: loss_reduction.PairAccumulator, parts: Mapping[str, LossPair]) -> None:
        original(self, {term: pair._replace(denominator=change(pair.denominator)) for term, pair in parts.items()})

    return lambda: replaced(loss_reduction.PairAccumulator, "add", faulty)


def _norm_parameters(**marks: bool) -> Plant:
    """Marks the norms' parameters as something that they are not."""
    original = norm.Norm._parameter

    def faulty(value: Tensor, config: Any) -> Any:
        parameter = original(value, config)
        for name, mark in marks.items():
            setattr(parameter, name, mark)
        return parameter

    return lambda: replaced(norm.Norm, "_parameter", staticmethod(faulty))


@contextlib.contextmanager
def _tied_gradient_missed() -> Iterator[None]:
    names: dict[str, Any] = vars(finalize)["finalize_model_grads"].__globals__
    original = names["_allreduce_word_embedding_grads"]
    names["_allreduce_word_embedding_grads"] = lambda *arguments, **options: None
    try:
        yield
    finally:
        names["_allreduce_word_embedding_grads"] = original


def _every_tp_rank_counts() -> contextlib.AbstractContextManager[None]:
    return replaced(Groups, "counts_loss", property(lambda groups: groups.pp_rank == groups.layout.pp - 1))


def _one_row_one_document() -> contextlib.AbstractContextManager[None]:
    def faulty(document_starts: Tensor) -> list[list[tuple[int, int]]]:
        return [[(0, document_starts.shape[1])] for _ in document_starts]

    return replaced(context_parallel, "_document_runs", faulty)


def _clip_before() -> contextlib.AbstractContextManager[None]:
    original = step.TrainingStep.update

    def faulty(self: step.TrainingStep, totals: loss_reduction.StepTotals, lr: float) -> Any:
        clip, denominator = self._optimizer._clip, totals.terms[MAIN_TERM].denominator
        self._optimizer._clip = lambda grad_norm: clip(grad_norm * denominator)  # type: ignore[method-assign]
        try:
            return original(self, totals, lr)
        finally:
            self._optimizer._clip = clip  # type: ignore[method-assign]

    return replaced(step.TrainingStep, "update", faulty)


def _rank_not_reduced() -> contextlib.AbstractContextManager[None]:
    original = finalize.finalize_gradients

    def faulty(chunks: Any, sums: Any, groups: Groups, *arguments: Any) -> Any:
        if groups.dp_rank == 1:
            for chunk in chunks:
                chunk.scale_gradients(0.0)
        return original(chunks, sums, groups, *arguments)

    return replaced(step, "finalize_gradients", faulty)


def _dropout() -> contextlib.AbstractContextManager[None]:
    original = transformer_config._architecture
    return replaced(transformer_config, "_architecture", lambda model: original(model) | {"hidden_dropout": 0.1})


def _local_plan() -> contextlib.AbstractContextManager[None]:
    def faulty(self: loss_reduction.PlannedTotals, planned: Sequence[float], groups: Groups, everywhere: bool) -> None:
        vector = torch.tensor(planned, dtype=torch.float64, device=groups.device)
        self._sum = AsyncAllReduce(vector, groups.tp)  # known to the rank that reads the data

    return replaced(loss_reduction.PlannedTotals, "__init__", faulty)


def _rank_order() -> contextlib.AbstractContextManager[None]:
    def faulty(seq: int, cp: int, device: torch.device) -> tuple[Tensor, Tensor]:
        order = torch.arange(seq, device=device)
        return order, order

    return replaced(context_parallel, "_row_order", faulty)


def _full_width_norm_by_rank() -> contextlib.AbstractContextManager[None]:
    def faulty(sums: list[Tensor], inputs: Sequence[Tensor], tp: dist.ProcessGroup) -> Tensor:
        widths = [x.shape[-2] * x.shape[-1] for x in inputs]
        return torch.stack([each / width for each, width in zip(sums, widths)])

    return replaced(full_width_norm, "_means", faulty)


def _router_losses_shared_out() -> contextlib.AbstractContextManager[None]:
    original = balance.RouterStats.logits

    def faulty(self: balance.RouterStats, logits: Tensor, is_padding: Tensor | None) -> Tensor:
        whole = self._balance.step
        if whole is None:
            return original(self, logits, is_padding)
        sharers = dist.get_world_size(self._sharers)
        self._balance.step = replace(whole, factors=lambda: whole.factors() / sharers)
        try:
            return original(self, logits, is_padding)
        finally:
            self._balance.step = whole

    return replaced(balance.RouterStats, "logits", faulty)


def _experts_left_out() -> contextlib.AbstractContextManager[None]:
    original = optimizer.Optimizer._counts_here

    def faulty(self: optimizer.Optimizer, part: Any) -> bool:
        is_of_experts = any(group["is_expert_parallel"] for group in part.param_groups)
        return original(self, part) and not (is_of_experts and self._collection.ep.rank() > 0)

    return replaced(optimizer.Optimizer, "_counts_here", faulty)


def _depths_by_main() -> contextlib.AbstractContextManager[None]:
    def faulty(planned: Tensor, coefficients: Mapping[str, float]) -> dict[str, Any]:
        factors = side_term_factors(planned, coefficients)
        return {name: coefficients[name] if name.startswith("mtp_") else factors[name] for name in factors}

    return replaced(numerator_factors, "side_term_factors", faulty)


def _matrices_by_tp_rank() -> contextlib.AbstractContextManager[None]:
    original = muon.Muon._orthogonalize

    def faulty(self: muon.Muon, name: str, whole: Tensor) -> None:
        is_divided = name.endswith(("linear_qkv.weight", "linear_proj.weight"))
        for shard in whole.chunk(self._groups.layout.tp if is_divided else 1, dim=int("linear_proj" in name)):
            original(self, name, shard)

    return replaced(muon.Muon, "_orthogonalize", faulty)


PLANTS: dict[str, Plant] = {
    "microbatch-means": _scaled(_microbatch_means),
    "dp-means": _scaled(_dp_means),
    "cp-counts-again": _sliced(_whole_shares),
    "tp-counts-again": _every_tp_rank_counts,
    "dp-size-in-denominator": _scaled(lambda batches, groups: lambda batch: float(groups.layout.dp)),
    "cp-scaled-loss": _scaled(lambda batches, groups: lambda batch: float(groups.layout.cp)),
    "sp-norms-not-reduced": _norm_parameters(sequence_parallel=False),
    "tied-gradient-missed": _tied_gradient_missed,
    "dropped-microbatch": _dropped_microbatch,
    "labels-shifted-after-slicing": _sliced(_shifted_labels),
    "positions-not-zigzag": _sliced(_consecutive_positions),
    "keys-in-rank-order": _rank_order,
    "document-boundary-crossed": _one_row_one_document,
    "clip-before-normalisation": _clip_before,
    "clamped-denominator": _denominator(lambda value: value.clamp(min=1)),
    "epsilon-in-denominator": _denominator(lambda value: value + 1e-8),
    "int32-weights": _denominator(lambda value: value.to(torch.int32).to(torch.float64)),
    "dp-rank-not-reduced": _rank_not_reduced,
    "dropout-left-on": _dropout,
    "vocabulary-padding-in-softmax": lambda: replaced(
        VocabParallelLogits, "_num_real", property(lambda logits: logits.local.shape[-1])
    ),
    "local-side-term-denominators": _local_plan,
    "norms-decayed": lambda: replaced(optimizer, "get_standard_config_overrides", lambda translated: {}),
    "norms-counted-per-tp-rank": _norm_parameters(tensor_model_parallel=True),
    "full-width-norm-by-tp-rank": _full_width_norm_by_rank,
    "router-losses-shared-out": _router_losses_shared_out,
    "expert-loads-per-rank": lambda: replaced(balance, "_sum_over", lambda group, counts: None),
    "experts-left-out-of-norm": _experts_left_out,
    "depths-divided-by-main": _depths_by_main,
    "matrices-by-tp-rank": _matrices_by_tp_rank,
    "matrices-fused": lambda: replaced(muon, "segments", lambda name, num_rows, model: [num_rows]),
    **ADAPTER_PLANTS,
    **SHARED_PLANTS,
}
