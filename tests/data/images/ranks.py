"""Work of every rank in the tests of runs with images."""

from __future__ import annotations

from pathlib import Path

from mtrain.arch.lr import learning_rate
from mtrain.checkpoint.state.start_weights import load_hf_weights
from mtrain.config import Config
from mtrain.core.engine.rank_model import build_rank_model
from mtrain.core.loss.objective import Objective
from mtrain.core.ranks.groups import Groups
from mtrain.core.step.step import TrainingStep
from mtrain.data.loader import StepLoader


def losses(groups: Groups, config: Config) -> list[float]:
    """Trains the run's steps from its folder and its files; returns the loss of each."""
    model = build_rank_model(config, groups)
    assert config.model.hf is not None
    load_hf_weights(Path(config.model.hf), model)
    step = TrainingStep(model, Objective.from_config(config.loss, config.model))
    loader = None if groups.tp_rank else StepLoader(config, groups.dp_rank, groups.layout.dp)
    found = []
    for number in range(config.train.num_steps):
        totals = step.forward_backward(None if loader is None else loader.batches(number))
        step.update(totals, learning_rate(number, config.optimizer, config.train.num_steps))
        found.append(totals.objective)
    return found
