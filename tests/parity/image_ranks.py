"""Work of every rank in the tests of images: runs with a planted fault, and bits of two runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from mtrain.checkpoint.state.load import save_checkpoint
from mtrain.checkpoint.state.start_weights import load_hf_weights
from mtrain.config import Config
from mtrain.core.engine import host_moments
from mtrain.core.engine.rank_model import build_model, build_rank_model
from mtrain.core.layers.build import unwrap
from mtrain.core.loss.objective import Objective
from mtrain.core.ranks.groups import Groups
from mtrain.core.step.step import TrainingStep
from mtrain.training.resume import initialize
from tests.parity.batches import GlobalBatch
from tests.parity.ranks import Built, Outcome, own_microbatches, run_step, train
from tests.verify.planted.image_faults import (
    AHEAD_IN_WIDE_LAYERS,
    IMAGE_PLANTS,
    NO_ZEROS,
    ONLY_THE_PAST,
    POSITIONS_IN_SLICES,
)

FAULTS = {
    **IMAGE_PLANTS,
    "images-see-ahead-in-wide-layers": AHEAD_IN_WIDE_LAYERS,
    "images-see-only-the-past": ONLY_THE_PAST,
    "no-zeros": NO_ZEROS,
    "positions-counted-in-slices": POSITIONS_IN_SLICES,
}


def train_with(
    groups: Groups,
    fault: str,
    config: Config,
    parameters: Mapping[str, Any],
    batches: Sequence[GlobalBatch],
) -> Outcome:
    """Trains with a planted fault."""
    with FAULTS[fault].planted():
        return train(groups, config, parameters, batches)


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


def loss_after(
    groups: Groups, config: Config, batches: Sequence[GlobalBatch], last: GlobalBatch, checkpoints: Path | None
) -> float:
    """Starts as a run does, trains one step for each batch, saves a checkpoint, and returns the loss of `last`."""
    model = build_rank_model(config, groups, weights_follow=True)
    initialize(model)
    built = Built(model, TrainingStep(model, Objective.from_config(config.loss, config.model)))
    for number, batch in enumerate(batches):
        run_step(built, groups, config, batch, number)
    model.sharded.gather_parameters()
    if checkpoints is not None:
        save_checkpoint(checkpoints, model, len(batches))
    return built.training.forward_backward(own_microbatches(last, groups, config)).objective


def frequencies(groups: Groups, config: Config) -> tuple[list[Any], Any]:
    """Builds the model; returns the buffers of its tower, and the dtype of its parameters."""
    (chunk,) = build_model(config, groups).chunks
    tower = unwrap(chunk).vision.tower
    return [buffer.numpy() for buffer in tower.buffers()], {str(each.dtype) for each in tower.parameters()}


def refused_rate(groups: Groups, config: Config, lr: float) -> str:
    """Returns the message about a learning rate that a caller gives for the next update."""
    try:
        build_rank_model(config, groups).optimizer.check_rate(lr)
    except ValueError as error:
        return str(error)
    return ""
