"""What every rank does to be compared with transformers."""

from __future__ import annotations

from pathlib import Path

from mtrain.config import Config
from mtrain.data.loader import StepLoader
from mtrain.loss.objective import Objective
from mtrain.mcore.distributed.groups import Groups
from mtrain.mcore.engine.optimizer import Optimizer
from mtrain.mcore.model.build import build_model
from mtrain.mcore.state.import_hf import load_hf_weights
from mtrain.training.step import TrainingStep
from mtrain.verify.core.result import StepValues
from mtrain.verify.core.worker import rate, step_values
from mtrain.verify.planted.faults import PLANTS
from mtrain.verify.planted.planting import planted


def run_from_hf(groups: Groups, config: Config, num_steps: int, fault: str | None) -> list[StepValues]:
    """The first steps of the run, from the weights of `model.hf`. Collective.

    Args:
        groups: The process groups.
        config: Of the run, with the layout.
        num_steps: How many.
        fault: Name of the one to plant.

    Raises:
        DataError: The weights or the training data cannot be read.
        NumericError: A number cannot be trusted.
    """
    with planted(fault, PLANTS):
        return _run(groups, config, num_steps)


def _run(groups: Groups, config: Config, num_steps: int) -> list[StepValues]:
    assert config.model.hf is not None, "the command line names it"
    loader = StepLoader(config, groups.dp_rank, groups.layout.dp) if groups.tp_rank == 0 else None
    chunks = build_model(config, groups)
    optimizer = Optimizer(config, chunks, groups)
    load_hf_weights(Path(config.model.hf), chunks, optimizer, groups, config)
    training = TrainingStep(config, groups, chunks, optimizer, Objective.from_config(config.loss, 0), None)
    values = []
    for number in range(num_steps):
        totals = training.forward_backward(None if loader is None else loader.batches(number))
        update = training.update(totals, rate(config, number))
        values.append(step_values(number, totals, 0.0 if update is None else update.grad_norm))
    return values
