"""Work of ranks: a run whose sampler draws before and after a step, and a trainer that adds up experts otherwise."""

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

from mtrain import Completion, Config, Datum, Engine, SamplingParams
from mtrain.arch.layout import Layout
from mtrain.core.layers.moe import router
from mtrain.core.ranks.groups import Groups
from mtrain.verify.rollout.run import Scored, scores
from tests.pool import Pool
from tests.training.engine_ranks import free


def drawn_around_a_step(groups: Groups, config: Config, prompts: list[list[int]]) -> list[list[Completion]]:
    """Saves, draws, makes a step, saves and draws again; returns the answers of both draws."""
    found = []
    with free(groups), Engine(config) as engine:
        for step in range(2):
            if step:
                engine.forward_backward([Datum(prompt) for prompt in prompts])
                engine.optim_step()
            engine.save()
            found.append(engine.generate(prompts, SamplingParams(max_new_tokens=8, seed=step)))
    return found


def scores_with_rounded_experts(groups: Groups, *arguments: Any) -> Scored:
    """Rounds what experts say to bfloat16 before expert-parallel ranks exchange it."""
    exchanged = MoEAlltoAllTokenDispatcher.token_combine

    def rounded(self: Any, hidden: Any, *options: Any, **named: Any) -> Any:
        return exchanged(self, hidden.bfloat16().to(hidden.dtype), *options, **named)

    with patch.object(MoEAlltoAllTokenDispatcher, "token_combine", rounded):
        return scores(groups, *arguments)


def scores_with_other_experts(groups: Groups, *arguments: Any) -> Scored:
    """Lets routers take the next expert in place of the best one."""

    def next_places(ranking: Any, section: Any) -> Any:
        return ranking.topk(section.top_k + 1, dim=-1).indices[:, 1:]

    with patch.object(router, "best_places", next_places):
        return scores(groups, *arguments)


def scores_without_replay(groups: Groups, *arguments: Any) -> Scored:
    """Lets routers choose where experts are given."""
    choose = router.choose

    def own_choice(logits: Any, section: Any, expert_bias: Any, given: Any = None) -> Any:
        return choose(logits, section, expert_bias)

    with patch.object(router, "choose", own_choice):
        return scores(groups, *arguments)


class Faulty:
    """Pool whose ranks score with a fault."""

    def __init__(self, pool: Pool, fault: Callable[..., Any], is_faulty: Callable[..., bool]) -> None:
        self._pool, self._fault, self._is_faulty, self.device = pool, fault, is_faulty, pool.device

    def run(self, function: Any, layout: Layout, *arguments: Any) -> Any:
        is_faulty = function is scores and self._is_faulty(layout, *arguments)
        return self._pool.run(self._fault if is_faulty else function, layout, *arguments)
