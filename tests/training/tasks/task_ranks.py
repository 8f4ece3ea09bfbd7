"""What ranks do in the tests of tasks; the functions for `Pool.run`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mtrain.base.errors import DataError, MtrainError
from mtrain.config import Config
from mtrain.core.ranks.groups import Groups
from mtrain.hf.tokenizer.tokenizer import load_tokenizer
from mtrain.training.sampling.generate import loaded_model
from mtrain.training.tasks.leading import led
from mtrain.training.tasks.model import ScoredRow, TaskModel
from mtrain.training.tasks.requests import Answering, TextModel


def answers(
    groups: Groups,
    config: Config,
    max_length: int,
    pairs: Sequence[tuple[str, str]],
    texts: Sequence[str],
    asked: Sequence[tuple[str, dict[str, Any]]],
) -> Any:
    """Returns the results of the three kinds of requests, as the ranks got them from the first."""
    tokenizer = load_tokenizer(Path(str(config.model.hf)))

    def all_kinds(model: Answering) -> Any:
        text_model = TextModel(model, tokenizer, max_length, frozenset({tokenizer.eos_id}))
        scores = [tuple(score) for score in text_model.loglikelihood(pairs)]
        return scores, text_model.loglikelihood_rolling(texts), text_model.generate_until(asked)

    model = loaded_model(None, config, groups)
    found = led(TaskModel(model, tokenizer), all_kinds)
    assert all(chunk.training for chunk in model.chunks)
    return found


def faults(groups: Groups, config: Config) -> list[str]:
    """Returns the messages of two faults: one of the first rank alone, and one in a call that all ranks make."""
    task_model = TaskModel(loaded_model(None, config, groups), load_tokenizer(Path(str(config.model.hf))))

    def fault_alone(model: Answering) -> None:
        model.log_likelihoods([ScoredRow([1, 3, 4], 2)])
        raise DataError("a fault of the task")

    def fault_together(model: Answering) -> None:
        try:
            model.log_likelihoods([ScoredRow([1, 3, 10_000], 1)])
        except MtrainError:
            raise ValueError("lm-eval might replace it") from None

    found = []
    for action in (fault_alone, fault_together):
        try:
            led(task_model, action)
        except MtrainError as fault:
            found.append(f"{type(fault).__name__}: {fault}")
    return found
