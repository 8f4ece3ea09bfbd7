"""Work of every rank in the comparison with transformers."""

from __future__ import annotations

from pathlib import Path

from mtrain.config import Config
from mtrain.mcore.distributed.groups import Groups
from mtrain.mcore.engine.rank_model import RankModel
from mtrain.mcore.model.build import build_model
from mtrain.mcore.state.start_weights import load_hf_weights
from mtrain.training.build import opened_loader
from mtrain.training.step import TrainingStep
from mtrain.verify.core.result import StepValues
from mtrain.verify.core.worker import own_objective, step_values
from mtrain.verify.planted.collaborators import SOUND, Collaborators
from mtrain.verify.planted.faults import PLANTS


def run_from_hf(groups: Groups, config: Config, num_steps: int, fault: str | None) -> list[StepValues]:
    """Trains the first steps of the run from the weights of `model.hf`, and returns their values. Collective.

    Args:
        groups: Process groups.
        config: Configuration of the run, with the layout.
        num_steps: Number of steps.
        fault: Name of the fault to plant; None: none.

    Raises:
        DataError: The weights or the training data cannot be read.
        NumericError: A number cannot be trusted.
    """
    return _run(groups, config, num_steps, SOUND if fault is None else PLANTS[fault])


def _run(groups: Groups, config: Config, num_steps: int, made_of: Collaborators) -> list[StepValues]:
    config = made_of.config(config)
    assert config.model.hf is not None, "the command line names it"
    loader = opened_loader(groups, lambda: made_of.loader(config, groups.dp_rank, groups.layout.dp, made_of.collate))
    chunks = build_model(config, groups, weights_follow=True)
    made_of.change_model(chunks)
    model = RankModel(config, groups, chunks, made_of.optimizer(config, chunks, groups))
    load_hf_weights(Path(config.model.hf), model)
    training = TrainingStep(model, own_objective(config), None, made_of.step(groups))
    values = []
    for number in range(num_steps):
        totals = training.forward_backward(None if loader is None else loader.batches(number))
        update = training.update(totals, made_of.rate(number, config.optimizer, config.train.num_steps))
        values.append(step_values(number, totals, 0.0 if update is None else update.grad_norm))
    return values
