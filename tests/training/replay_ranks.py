"""What ranks do in the tests of routing replay; the functions for `Pool.run`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from mtrain import Datum, Engine, GroupMember, MtrainError, SamplingParams, StepResult
from mtrain.checkpoint.state.gather import parameter_shards
from mtrain.config import Config
from mtrain.core.ranks.groups import Groups
from tests.core.state.gathering import gather_whole
from tests.parity.ranks import Arrays, arrays
from tests.training.engine_ranks import free

Batch = list[Datum]


class Replayed(NamedTuple):
    """Results of a rank; the same on all ranks."""

    step: StepResult
    evaluation: float
    log_probs: list[bytes]
    """Log-probabilities before the step and after it."""
    routes: list[bytes]
    """Experts of the tokens before the step."""


def own_choice(groups: Groups, config: Config, batch: Batch) -> list[Replayed]:
    """Makes a step by the routers' own choice, one that replays it for all tokens, and one that does for some."""
    with free(groups), Engine(config) as engine:
        routes = engine.forward(batch, routed_experts=True).routed_experts
    everywhere = [replace(datum, routed_experts=each) for datum, each in zip(batch, routes, strict=True)]
    for each in (partly := [routes.clone() for routes in routes]):
        each[::3] = -1
    somewhere = [
        replace(datum, routed_experts=None if slot % 4 == 1 else each.tolist())
        for slot, (datum, each) in enumerate(zip(batch, partly, strict=True))
    ]
    return [_step(groups, config, given, batch) for given in (batch, everywhere, somewhere)]


def _step(groups: Groups, config: Config, given: Batch, plain: Batch) -> Replayed:
    with free(groups), Engine(config) as engine:
        before, loss = engine.forward(given, routed_experts=True), engine.evaluate([given]).loss
        engine.forward_backward(given)
        step, after = engine.optim_step(), engine.forward(plain)
    log_probs = [each.numpy().tobytes() for each in [*before.log_probs, *after.log_probs]]
    return Replayed(step, loss, log_probs, [each.numpy().tobytes() for each in before.routed_experts])


class Rollouts(NamedTuple):
    """Answers of a sampler, and what the trainer makes of them."""

    answers: list[list[int]]
    routes: list[Any]
    """Experts of prompts and answers, as numpy."""
    of_forward: list[Any]
    """Experts that a forward pass over the same tokens chooses, as numpy."""
    sampled: list[list[float]]
    """Log-probabilities of the sampler."""
    replayed: list[list[float]]
    """Log-probabilities of a forward pass that replays the sampler's choice."""


def rollouts(groups: Groups, config: Config, prompts: Sequence[Sequence[int]], sampling: SamplingParams) -> Rollouts:
    """Samples, and replays the sampler's choice in a forward pass."""
    with free(groups), Engine(config) as engine:
        answers = engine.generate(prompts, sampling, max_sequences=2, routed_experts=True)
        plain = [Datum([*prompt, *answer.token_ids]) for prompt, answer in zip(prompts, answers, strict=True)]
        given = [replace(datum, routed_experts=answer.routed_experts) for datum, answer in zip(plain, answers)]
        of_forward = engine.forward(plain, routed_experts=True).routed_experts
        replayed = engine.forward(given).log_probs
    ends = [len(prompt) - 1 for prompt in prompts]
    return Rollouts(
        [answer.token_ids for answer in answers],
        [answer.routed_experts.numpy() for answer in answers if answer.routed_experts is not None],
        [each.numpy() for each in of_forward],
        [answer.log_probs for answer in answers],
        [each[end:].tolist() for each, end in zip(replayed, ends, strict=True)],
    )


class Trained(NamedTuple):
    """Passes over the first batch, steps, and the weights around these."""

    log_probs: list[Any]
    """Log-probabilities of each sample, as numpy; so are the experts."""
    routes: list[Any]
    loss: float
    """Loss of an evaluation."""
    scores: list[float]
    """Scores for a preference loss."""
    before: Arrays | None
    """Global tensors by name on rank 0, else None; so is `after`."""
    steps: list[StepResult]
    after: Arrays | None


def train(groups: Groups, config: Config, batches: Sequence[Batch]) -> Trained:
    """Makes one step for each batch, after passes without a gradient over the first one."""
    with free(groups), Engine(config) as engine:
        before = _weights(engine)
        found, loss = engine.forward(batches[0], routed_experts=True), engine.evaluate([batches[0]]).loss
        members = [GroupMember(group, "chosen") for group in range(len(batches[0]))]
        scores = engine.scores([replace(datum, member=each) for datum, each in zip(batches[0], members)])
        steps = _made(engine, batches)
        log_probs, routes = ([each.numpy() for each in of] for of in (found.log_probs, found.routed_experts))
        return Trained(log_probs, routes, loss, scores, before, steps, _weights(engine))


class Steps(NamedTuple):
    """Steps with the loss of the configuration, and the weights around them."""

    before: Arrays | None
    """Global tensors by name on rank 0, else None; so is `after`."""
    steps: list[StepResult]
    after: Arrays | None


def steps_of(groups: Groups, config: Config, batches: Sequence[Batch]) -> Steps:
    """Makes one step for each batch."""
    with free(groups), Engine(config) as engine:
        return Steps(_weights(engine), _made(engine, batches), _weights(engine))


def _made(engine: Engine, batches: Sequence[Batch]) -> list[StepResult]:
    """Makes one step for each batch."""
    steps = []
    for batch in batches:
        engine.forward_backward(batch)
        steps.append(engine.optim_step())
    return steps


def _weights(engine: Engine) -> Arrays | None:
    model = engine._built().model
    model.sharded.gather_parameters()
    return arrays(gather_whole(parameter_shards(model.chunks, model.groups)))


def refusals(groups: Groups, config: Config, wrong: Sequence[Datum]) -> list[tuple[int, str]]:
    """Returns exit code and message of each datum; the engine stays usable."""
    found = []
    with free(groups), Engine(config) as engine:
        for datum in wrong:
            try:
                engine.forward_backward([Datum([1, 2, 3]), datum])
            except MtrainError as error:
                found.append((error.exit_code, str(error)))
        engine.forward_backward([Datum([1, 2, 3])])
        assert engine.optim_step().denominator == 2
    return found


def unreported(groups: Groups, config: Config) -> list[tuple[int, str]]:
    """Returns exit code and message of a forward pass that is asked for experts, and of an answer."""
    found = []
    with free(groups), Engine(config) as engine:
        asked = [
            lambda: engine.forward([Datum([1, 2, 3])], routed_experts=True),
            lambda: engine.generate([[1, 2]], SamplingParams(max_new_tokens=1), routed_experts=True),
        ]
        for ask in asked:
            try:
                ask()
            except MtrainError as error:
                found.append((error.exit_code, str(error)))
    return found
