"""Known faults of images, as replacements of named functions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from torch import Tensor

from mtrain.config import towers
from mtrain.config.schema.vision import square_patches
from mtrain.core.engine.finalize import finalize_gradients
from mtrain.core.engine.loss_reduction import GlobalTotals, StepSums
from mtrain.core.engine.sharded_model import ShardedModel
from mtrain.core.layers import language_model, vision
from mtrain.core.layers.attention import core_attention
from mtrain.core.layers.attention.key_set import key_set
from mtrain.core.layers.attention.rotary import Rotary, ThreeAxesRotary
from mtrain.core.layers.language_model import LanguageModel
from mtrain.core.layers.vision import VisionTower
from mtrain.core.ranks.groups import Groups
from mtrain.core.step.teacher import Teacher
from tests.verify.planted.plants import Plant, in_step, replacing

_patches = square_patches
_features, _forward, _gather = VisionTower._features, VisionTower.forward, gather_from_sequence_parallel_region
_angles, _take_received = ThreeAxesRotary.forward, LanguageModel._take_received
_with_features, _run_now = language_model._with_features, Teacher._run_now


def _of_the_next_place(self: Any, images: Any) -> Tensor:
    return _features(self, images).roll(1, 0)


def _by_time(self: Any, positions: Tensor) -> Any:
    return Rotary.forward(self, positions if positions.dim() == 2 else positions[..., 0])


def _by_slice(self: Any, positions: Tensor) -> Any:
    """Counts positions anew in each context-parallel rank's part of a row."""
    return _angles(self, positions - positions[:, :1])


def _mean_over_sharing(padded: Tensor, group: Any) -> Tensor:
    """Gathers, and in the backward pass takes the mean over the ranks that share the work."""
    found: Tensor = _gather(padded, group=group)
    if found.requires_grad:
        found.register_hook(lambda gradient: gradient / group.size())
    return found


def _diluted(self: Any, images: Any) -> Tensor:
    """Takes the mean over the ranks that share the work, if one of them has no image to encode."""
    found = _features(self, images)
    if self._sharing.size() > len(images.grids) and found.requires_grad:
        found.register_hook(lambda gradient: gradient / self._sharing.size())
    return found


def _of_own_part(padded: Tensor, group: Any) -> Tensor:
    """Gathers, and in the backward pass takes this rank's part of its own gradient."""
    found = _gather(padded.detach(), group=group)
    own = torch.arange(len(found)).div(len(padded), rounding_mode="floor") == group.rank()
    return torch.where(own[:, None], padded.repeat(group.size(), 1), found)


def _mean_over_dp(sharded: ShardedModel, sums: StepSums, groups: Groups, *others: Any) -> GlobalTotals:
    totals = finalize_gradients(sharded, sums, groups, *others)
    for chunk in sharded.chunks:
        for name, parameter in chunk.named_parameters():
            if "vision." in name and parameter.requires_grad:
                gradient: Any = parameter.main_grad  # type: ignore[attr-defined]
                gradient.div_(groups.layout.dp)
    return totals


def _counted_in_slices(self: Any, embedded: Tensor, images: Any, places: Tensor | None, ahead: Any) -> Any:
    if places is not None:
        marked = places >= 0
        places = torch.where(marked, marked.flatten().cumsum(0).view_as(places) - 1, -1)
    return _forward(self, embedded, images, places, ahead)


def _cut_at_borders(self: Any, embedded: Tensor, images: Any, places: Tensor | None, ahead: Any) -> Any:
    """Drops the part of an image whose beginning is on another rank."""
    if places is not None:
        counts = images.grids.prod(1) // self._per_feature
        starts = counts.cumsum(0) - counts
        image = torch.bucketize(places.cpu(), starts, right=True) - 1
        is_begun = torch.isin(starts, places.cpu())
        places = torch.where((places >= 0) & is_begun[image.clamp(min=0)].to(places.device), places, -1)
    return _forward(self, embedded, images, places, ahead)


def _without_deeper(self: Any, *given: Any) -> Any:
    found = _forward(self, *given)
    return found._replace(deep=None if found.deep is None else torch.zeros_like(found.deep))


def _from_the_table(self: Any, batch: Any, depth: int, features: Any) -> Tensor:
    """Reads the row of the image token in the place of a feature."""
    found: Tensor = self._embed(batch.mtp[depth].tokens)
    return found


def _ahead_in_slices(self: Any, embedded: Tensor, images: Any, places: Tensor | None, ahead: Tensor | None) -> Any:
    """Takes the feature of the next position in each context-parallel rank's part of a row."""
    if places is not None and ahead is not None:
        ahead = torch.stack([places.roll(-1 - depth, 1) for depth in range(ahead.shape[-1])], dim=-1)
    return _forward(self, embedded, images, places, ahead)


def _only_at_first(*given: Any) -> Any:
    """Adds deeper features in the forward pass alone, which computes no gradients in recomputed layers."""
    hidden_states, _ = given[-1]
    found = _with_features(*given)
    return (hidden_states, found[1]) if torch.is_grad_enabled() else found


def _of_text(self: Any, batch: Any) -> Any:
    return _run_now(self, replace(batch, images=None))


def _without_gradient(self: Any, batch: Any) -> Any:
    """Keeps the gradient of features on the stage that reads them."""
    return [each.detach() for each in _take_received(self, batch)]


def _rows_reversed(self: Any, images: Any) -> Tensor:
    """Reverses each row of an image's features, if patches merge two by two."""
    rows = [(int(count), columns // 2) for _, count, columns in images.grids.tolist() for count in [count // 2]]
    order = [torch.arange(count * columns).view(count, columns).flip(1).flatten() for count, columns in rows]
    firsts = [0, *torch.tensor([len(each) for each in order]).cumsum(0).tolist()]
    return _features(self, images)[torch.cat([each + first for each, first in zip(order, firsts)])]


def _patches_by_columns(pixels: Any, size: int) -> Any:
    """Cuts an image into patches column by column."""
    found, grid = _patches(pixels, size)
    _, rows, columns = grid
    return found.reshape(rows, columns, -1).swapaxes(0, 1).reshape(rows * columns, -1), grid


IMAGE_PLANTS: dict[str, Plant] = {
    "features-of-the-next-place": replacing(VisionTower, "_features", _of_the_next_place),
    "positions-by-time-alone": replacing(ThreeAxesRotary, "forward", _by_time),
    "tower-gradient-mean-over-sharing": replacing(vision, "gather_from_sequence_parallel_region", _mean_over_sharing),
    "tower-gradient-mean-over-dp": in_step("finalize_gradients", _mean_over_dp),
    "tower-gradient-of-one-rank": replacing(vision, "gather_from_sequence_parallel_region", _of_own_part),
    "ranks-without-images-dilute": replacing(VisionTower, "_features", _diluted),
    "places-counted-in-slices": replacing(VisionTower, "forward", _counted_in_slices),
    "images-cut-at-cp-border": replacing(VisionTower, "forward", _cut_at_borders),
    "deeper-features-dropped": replacing(VisionTower, "forward", _without_deeper),
    "depths-read-the-table": replacing(LanguageModel, "_embed_ahead", _from_the_table),
    "features-ahead-of-a-slice": replacing(VisionTower, "forward", _ahead_in_slices),
    "features-ahead-without-gradient": replacing(LanguageModel, "_take_received", _without_gradient),
    "deeper-features-not-recomputed": replacing(language_model, "_with_features", _only_at_first),
    "teacher-without-images": replacing(Teacher, "_run_now", _of_text),
}
ON_OWN_DATA: dict[str, Plant] = {
    "rows-of-features-reversed": replacing(VisionTower, "_features", _rows_reversed),
    "patches-by-columns": replacing(towers, "square_patches", _patches_by_columns),
}
"""Faults between a user's files and the features, which random images do not meet."""
POSITIONS_IN_SLICES = replacing(ThreeAxesRotary, "forward", _by_slice)
NO_ZEROS = replacing(VisionTower, "_connected", lambda self, values: values)
"""Ranks without images give the tower no gradient, and others wait for it."""
ONLY_THE_PAST = replacing(language_model, "with_image_ends", lambda starts, ends: starts)
"""Tokens of an image do not see its later ones, as in Gemma."""
AHEAD_IN_WIDE_LAYERS = replacing(core_attention, "key_set", lambda starts, window, _: key_set(starts, window))
"""Tokens of an image see its later ones in layers without a window as well, unlike in Gemma 4."""
