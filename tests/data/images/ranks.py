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
from mtrain.runs.folder import RunFolder
from mtrain.training.build import build_run


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


def scores_and_loss(groups: Groups, config: Config) -> tuple[list[float], float]:
    """Starts a run; returns the scores of its reference model, and the loss of its first step."""
    run = build_run(config, groups, RunFolder(Path(config.run.dir)))
    assert run.loader is not None
    (source,) = run.loader.preferences.values()
    assert source.references is not None
    return source.references.tolist(), run.training.forward_backward(run.loader.batches(0)).objective
