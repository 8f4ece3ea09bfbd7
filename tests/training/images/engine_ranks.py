"""What ranks do in the tests of Engine with images; the functions for `Pool.run`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest

from mtrain import Datum, Engine
from mtrain.base.errors import DataError
from mtrain.config import Config
from mtrain.core.ranks.groups import Groups
from mtrain.training.sampling.params import SamplingParams
from tests.training.engine_ranks import free

Prompt = tuple[Sequence[int], Sequence[Any]]


class Step(NamedTuple):
    """A step of a policy."""

    answers: list[tuple[list[int], list[float]]]
    """Tokens, and their log-probabilities as they were drawn."""
    before: list[list[float]]
    """Log-probabilities of all tokens but the first, of prompt and answer."""
    loss: float
    grad_norm: float
    after: list[list[float]]


def step_of_policy(
    groups: Groups,
    config: Config,
    prompts: Sequence[Prompt],
    sampling: SamplingParams,
    advantages: Sequence[float],
    shifts: Sequence[Sequence[float]],
    replays: bool,
) -> Step:
    """Draws an answer to each prompt, and trains on them once.

    Args:
        shifts: What the old log-probabilities of each answer differ by from those of the model.
    """
    with free(groups), Engine(config) as engine:
        images = [each for _, each in prompts]
        drawn = engine.generate([ids for ids, _ in prompts], sampling, images=images, routed_experts=replays)
        data = [
            Datum(
                [*ids, *answer.token_ids],
                [0.0] * len(ids) + [1.0] * len(answer.token_ids),
                routed_experts=answer.routed_experts,
                images=own,
            )
            for (ids, own), answer in zip(prompts, drawn, strict=True)
        ]
        before = [each.tolist() for each in engine.forward(data).log_probs]
        rollouts = []
        for datum, answer, scores, advantage, shift in zip(data, drawn, before, advantages, shifts, strict=True):
            length = len(answer.token_ids)
            old = [*scores[:-length], *(score + each for score, each in zip(scores[-length:], shift, strict=True))]
            extras: dict[str, Any] = {"advantages": advantage, "old_logprobs": old}
            rollouts.append(
                Datum(
                    datum.input_ids,
                    datum.weights,
                    extras=extras,
                    routed_experts=datum.routed_experts,
                    images=datum.images,
                )
            )
        engine.forward_backward(rollouts[:2], "ppo")
        engine.forward_backward(rollouts[2:], "ppo")
        done = engine.optim_step()
        after = [each.tolist() for each in engine.forward(data).log_probs]
        answers = [(answer.token_ids, answer.log_probs) for answer in drawn]
        return Step(answers, before, done.loss, done.grad_norm, after)


def scored(groups: Groups, config: Config, data: Sequence[Datum]) -> list[list[float]]:
    with free(groups), Engine(config) as engine:
        return [each.tolist() for each in engine.forward(data).log_probs]


def refusals(groups: Groups, config: Config, data: Sequence[Datum], prompts: Sequence[tuple[Any, Any]]) -> list[str]:
    """Returns the messages of samples and prompts that are refused."""
    found = []
    with free(groups), Engine(config) as engine:
        for datum in data:
            with pytest.raises(DataError) as fault:
                engine.forward([datum])
            assert fault.value.on_every_rank
            found.append(str(fault.value))
        for ids, images in prompts:
            with pytest.raises((DataError, ValueError)) as wrong:
                engine.generate(ids, SamplingParams(max_new_tokens=2), images=images)
            found.append(str(wrong.value))
    return found
