"""Work of every rank in the tests of images: runs with a planted fault, and bits of two runs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from torch import Tensor

from mtrain.checkpoint.state.load import save_checkpoint
from mtrain.checkpoint.state.start_weights import load_hf_weights
from mtrain.config import Config
from mtrain.core.engine import host_moments
from mtrain.core.engine.rank_model import build_model, build_rank_model
from mtrain.core.engine.sharded_model import DataParallel
from mtrain.core.layers import vision
from mtrain.core.layers.attention.rotary import Rotary, ThreeAxesRotary
from mtrain.core.layers.build import unwrap
from mtrain.core.layers.vision import VisionTower
from mtrain.core.loss.objective import Objective
from mtrain.core.ranks.groups import Groups
from mtrain.core.step.step import TrainingStep
from mtrain.verify.core.worker import Job, run_layout
from mtrain.verify.core.worker import Outcome as Checked
from tests.parity.batches import GlobalBatch
from tests.parity.ranks import Built, Outcome, run_step, train

FAULTS = (
    "features of the next place",
    "positions of one axis",
    "a mean over ranks that share the work",
    "a mean over data-parallel ranks",
    "places counted in a rank's slice",
    "one rank's features",
)


@contextlib.contextmanager
def planted(fault: str, groups: Groups) -> Iterator[None]:
    """Makes a mistake of other programs inside the block."""
    features, gather = VisionTower._features, gather_from_sequence_parallel_region
    forward, scale = VisionTower.forward, DataParallel.scale_gradients
    change: Any
    match fault:
        case "features of the next place":
            change = mock.patch.object(VisionTower, "_features", lambda *each: features(*each).roll(1, 0))
        case "positions of one axis":
            change = mock.patch.object(
                ThreeAxesRotary,
                "forward",
                lambda self, each: Rotary.forward(self, each if each.dim() == 2 else each[..., 0]),
            )
        case "a mean over ranks that share the work":

            def divided(padded: Tensor, group: Any) -> Tensor:
                found: Tensor = gather(padded, group=group)
                if found.requires_grad:
                    found.register_hook(lambda gradient: gradient / group.size())
                return found

            change = mock.patch.object(vision, "gather_from_sequence_parallel_region", divided)
        case "one rank's features":  # a gather whose backward takes only the own part

            def cut(padded: Tensor, group: Any) -> Tensor:
                found = gather(padded.detach(), group=group)
                own = torch.arange(len(found)).div(len(padded), rounding_mode="floor") == group.rank()
                return torch.where(own[:, None], padded.repeat(group.size(), 1), found)

            change = mock.patch.object(vision, "gather_from_sequence_parallel_region", cut)
        case "a mean over data-parallel ranks":

            def scaled(self: Any, factor: Any) -> None:
                scale(self, factor)
                for chunk in self.chunks:
                    for name, parameter in chunk.named_parameters():
                        if "vision." in name and parameter.requires_grad:
                            parameter.main_grad.div_(groups.layout.dp)

            change = mock.patch.object(DataParallel, "scale_gradients", scaled)
        case "places counted in a rank's slice":

            def counted(self: Any, embedded: Tensor, images: Any, places: Tensor | None) -> Any:
                if places is not None:
                    marked = places >= 0
                    places = torch.where(marked, marked.flatten().cumsum(0).view_as(places) - 1, -1)
                return forward(self, embedded, images, places)

            change = mock.patch.object(VisionTower, "forward", counted)
        case "no zeros":
            change = mock.patch.object(VisionTower, "_connected", lambda self, values: values)
        case _:
            raise AssertionError(fault)
    with change:
        yield


def train_with(
    groups: Groups,
    fault: str,
    config: Config,
    parameters: Mapping[str, Any],
    batches: Sequence[GlobalBatch],
) -> Outcome:
    """Trains with a planted fault."""
    with planted(fault, groups):
        return train(groups, config, parameters, batches)


@dataclass(frozen=True)
class LayoutWithFault:
    """Function of ranks that runs a layout of `mtrain verify parity` with a planted fault."""

    fault: str
    __name__ = "run_layout"

    def __call__(self, groups: Groups, job: Job) -> Checked:
        with planted(self.fault, groups):
            return run_layout(groups, job)


def train_both(
    groups: Groups, configs: Sequence[Config], parameters: Mapping[str, Any], batches: Sequence[GlobalBatch]
) -> list[Outcome]:
    """Trains each configuration from the same parameters; one without a tower leaves those of the tower."""
    return [train(groups, config, parameters, batches) for config in configs]


def train_by_place(
    groups: Groups, configs: Sequence[Config], parameters: Mapping[str, Any], batches: Sequence[GlobalBatch]
) -> list[Outcome]:
    """Trains each configuration; moments on the host move a few parameters at a time."""
    with mock.patch.object(host_moments, "MOMENTS_AT_ONCE_BYTES", 2**13):
        return train_both(groups, configs, parameters, batches)


def train_from_folder(groups: Groups, config: Config, batches: Sequence[GlobalBatch], checkpoints: Path) -> None:
    """Starts from `model.hf`, trains one step for each batch, and saves a checkpoint."""
    model = build_rank_model(config, groups)
    assert config.model.hf is not None
    load_hf_weights(Path(config.model.hf), model)
    built = Built(model, TrainingStep(model, Objective.from_config(config.loss, config.model)))
    for number, batch in enumerate(batches):
        run_step(built, groups, config, batch, number)
    model.sharded.gather_parameters()
    save_checkpoint(checkpoints, model, len(batches))


def frequencies(groups: Groups, config: Config) -> tuple[list[Any], Any]:
    """Builds the model; returns the buffers of its tower, and the dtype of its parameters."""
    (chunk,) = build_model(config, groups).chunks
    tower = unwrap(chunk).vision.tower
    return [buffer.numpy() for buffer in tower.buffers()], {str(each.dtype) for each in tower.parameters()}
