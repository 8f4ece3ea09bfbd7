"""Implementation of the faults of `inject`: each replaces a function of the training step."""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mtrain.config.schema.loss import MAIN_TERM
from mtrain.core.batch.batch import Microbatch
from mtrain.core.batch.images import MicrobatchImages
from mtrain.core.engine.finalize import finalize_gradients
from mtrain.core.engine.loss_reduction import GlobalTotals, StepSums
from mtrain.core.engine.sharded_model import ShardedModel
from mtrain.core.layers.norm import Norm
from mtrain.core.layers.output_layer import Logits
from mtrain.core.loss.pair import LossPair
from mtrain.core.ranks.broadcast import slice_for_rank
from mtrain.core.ranks.groups import Groups
from mtrain.core.step import step
from mtrain.core.step.loss import OutputLoss, ScalarOf
from mtrain.verify.planted.inject import DROPPED_ELEMENT, WRONG_SUM


def _share(batch: Microbatch) -> float:
    return float(batch.denominator_weights[MAIN_TERM].sum())


class _MicrobatchMeans(OutputLoss):
    """Multiplies the objective of each microbatch; reported sums stay right."""

    def __init__(self, whole: Sequence[Microbatch] | None, rows: Sequence[Microbatch], *others: Any) -> None:
        super().__init__(whole, rows, *others)
        self._mean = sum(map(_share, rows)) / len(rows)

    def scalar(
        self, logits: Logits, batch: Microbatch, scalar_of: ScalarOf, expected_gradient: Tensor
    ) -> tuple[Tensor, dict[str, LossPair]]:
        share = _share(batch)
        factor = self._mean / share if share > 0 else 0.0
        # inside, since the gradient of the output layer is formed in the forward pass
        return super().scalar(logits, batch, lambda pairs: scalar_of(pairs) * factor, expected_gradient)


class _EveryTpRank(Groups):
    @property
    def counts_loss(self) -> bool:
        return self.pp_rank == self.layout.pp - 1


def _tp_counts_again(sharded: ShardedModel, sums: StepSums, groups: Groups, *arguments: Any) -> GlobalTotals:
    return finalize_gradients(sharded, sums, _EveryTpRank(**vars(groups)), *arguments)


def _norms_not_reduced(sharded: ShardedModel, sums: StepSums, groups: Groups, *arguments: Any) -> GlobalTotals:
    modules = (module for chunk in sharded.chunks for module in chunk.modules())
    for norm in (module for module in modules if isinstance(module, Norm)):
        for parameter in norm.parameters():
            marked: Any = parameter
            marked.sequence_parallel = False
    return finalize_gradients(sharded, sums, groups, *arguments)


ALONE = dist.ProcessGroup(0, 1)  # type: ignore[call-arg]
"""Process group of this rank alone; never communicates."""


def _without_tied_group(sharded: ShardedModel, sums: StepSums, groups: Groups, *arguments: Any) -> GlobalTotals:
    collection = copy.copy(groups.collection)
    collection.embd = ALONE
    return finalize_gradients(sharded, sums, replace(groups, collection=collection), *arguments)


def _averaged_over_shards(sharded: ShardedModel, sums: StepSums, groups: Groups, *arguments: Any) -> GlobalTotals:
    """Divides gradients by the number of ranks, as fully_shard does by default."""
    totals = finalize_gradients(sharded, sums, groups, *arguments)
    if groups.layout.shard == "weights":
        sharded.scale_gradients(1 / groups.dp_cp.size())
    return totals


def _consecutive_positions(batches: Sequence[Microbatch], groups: Groups) -> list[Microbatch]:
    cuts = slice_for_rank(batches, groups)
    if groups.layout.cp == 1:
        return cuts
    length = cuts[0].tokens.shape[1]
    first = groups.cp_rank * length
    return [
        replace(cut, positions=rows.positions[:, first : first + length])
        for rows, cut in zip(batches, cuts, strict=True)
    ]


def _one_row_one_document(batches: Sequence[Microbatch], groups: Groups) -> list[Microbatch]:
    """Drops the document boundaries that attention reads; positions still restart at each document."""
    cuts = slice_for_rank(batches, groups)
    return [
        cut if cut.document_starts is None else replace(cut, document_starts=torch.zeros_like(cut.document_starts))
        for cut in cuts
    ]


def _with_images(
    change: Callable[[MicrobatchImages], Mapping[str, Tensor]],
) -> Callable[[Sequence[Microbatch], Groups], list[Microbatch]]:
    """Returns a function of the step that changes the images of every microbatch."""

    def changed(batches: Sequence[Microbatch], groups: Groups) -> list[Microbatch]:
        cuts = slice_for_rank(batches, groups)
        return [
            cut if cut.images is None else replace(cut, images=replace(cut.images, **change(cut.images)))
            for cut in cuts
        ]

    return changed


def _of_the_next_image(images: MicrobatchImages) -> dict[str, Tensor]:
    """Takes the patches of the next image, as if images were in another order than their tokens."""
    return {"pixels": images.pixels.roll(-int(images.grids[0].prod()), 0)}


PLANTS: dict[str, tuple[str, Callable[..., Any]]] = {
    "microbatch-means": ("OutputLoss", _MicrobatchMeans),
    "tp-counts-again": ("finalize_gradients", _tp_counts_again),
    "sp-norms-not-reduced": ("finalize_gradients", _norms_not_reduced),
    "tied-gradient-missed": ("finalize_gradients", _without_tied_group),
    "sharded-gradients-averaged": ("finalize_gradients", _averaged_over_shards),
    "positions-not-zigzag": ("slice_for_rank", _consecutive_positions),
    "document-boundary-crossed": ("slice_for_rank", _one_row_one_document),
    "images-misplaced": ("slice_for_rank", _with_images(_of_the_next_image)),
    "image-positions-on-one-axis": (
        "slice_for_rank",
        _with_images(lambda images: {"axes": images.axes[..., :1].expand_as(images.axes)}),
    ),
}
"""Name of the replaced function of the step, and its replacement, by fault."""


@contextmanager
def planted(fault: str | None) -> Iterator[None]:
    """Plants a fault in this process while the block runs; None plants none."""
    if fault is None:
        yield
        return
    name, faulty = PLANTS[fault]
    sound = getattr(step, name)
    setattr(step, name, faulty)
    try:
        yield
    finally:
        setattr(step, name, sound)


def spoil(fault: str | None, collective: str, is_last_rank: bool, output: Tensor) -> None:
    """Plants a fault of `verify machine` in the output of a collective, [n] without zeros; None plants none."""
    if fault == DROPPED_ELEMENT.name and collective == "all_gather":
        output[-1] = 0
    if fault == WRONG_SUM.name and collective == "all_reduce" and is_last_rank:
        output[0] += 1
