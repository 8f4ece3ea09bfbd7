"""Faults at edges, bounds and small summands, planted in the ranks of a check, which import this module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from mtrain.core.engine import optimizer
from mtrain.core.layers.attention import delta_net
from mtrain.core.layers.attention.mamba import MambaMixer
from mtrain.core.layers.attention.recurrent import chunks
from mtrain.core.layers.moe import router
from mtrain.core.loss.vocab_parallel import logits
from mtrain.core.loss.vocab_parallel.cross_entropy import row_slices
from mtrain.core.loss.vocab_parallel.logits import VocabParallelLogits
from tests.verify.planted.plants import Plant, configured, replacing

_carried, _inside, _places = chunks._carried, chunks._inside_documents, router.best_places


def _forgetting(given: Any, state: Any) -> Any:
    """Carries to the next chunk what a chunk adds, and nothing from before it."""
    return _carried(given._replace(decay=0 * given.decay), state)


def _leaking(*given: Any) -> Any:
    """Lets every token see the state before its chunk, also across the start of a document."""
    same, sees_start = _inside(*given)
    return same, torch.ones_like(sees_start)


def _untempered(self: VocabParallelLogits, temperature: Any) -> VocabParallelLogits:
    return self


def _any_step(self: MambaMixer, given: Any) -> Any:
    return torch.nn.functional.softplus(given + self.dt_bias.to(given.dtype))


def _second_is_first(local: Any) -> Any:
    """Takes the first block of logits for the second one."""
    first, *others = row_slices(local)
    return iter([first, *([first] if len(others) > 1 else others[:1]), *others[1:]])


def _first_block(gradients: Any) -> Any:
    return torch.stack([each.reshape(-1)[: optimizer.BLOCK].double().square().sum() for each in gradients]).sum()


def _without_clamp(modules: Any) -> None:
    for module in modules:
        for each in module.modules():
            if hasattr(getattr(each, "config", None), "activation_func_clamp_value"):
                each.config.activation_func_clamp_value = None


def _of(section: str, key: str, change: Callable[[Any], Any]) -> Plant:
    """Changes a value of the ranks' configuration, by a dotted key."""

    def changed(given: Any) -> dict[str, Any]:
        first, _, rest = key.partition(".")
        value = getattr(given, first)
        return {first: value.model_copy(update={rest: change(getattr(value, rest))}) if rest else change(value)}

    return Plant(config=configured(section, changed))


def _tenth_more(value: float) -> float:
    return 1.1 * value


FAULTS: dict[str, Plant] = {
    "state forgotten at a chunk": replacing(chunks, "_carried", _forgetting),
    "state leaked at a chunk": replacing(chunks, "_inside_documents", _leaking),
    "any step of mamba": replacing(MambaMixer, "_step", _any_step),
    "temperatures ignored": replacing(VocabParallelLogits, "divided_by", _untempered),
    "negative scores as 0": replacing(router, "best_places", lambda ranking, *own: _places(ranking.clamp(min=0), *own)),
    "second block of logits": replacing(logits, "row_slices", _second_is_first),
    "first block of the norm": replacing(optimizer, "_sum_by_blocks", _first_block),
    "length of keys": replacing(delta_net, "EPSILON", 2e-6),
    "no clamp": Plant(change_model=_without_clamp),
    "softcap": _of("model", "logit_softcap", _tenth_more),
    "norm epsilon": _of("model", "norm_epsilon", _tenth_more),
    "latent epsilon": _of("model", "mla.norm_epsilon", _tenth_more),
    "lower band": _of("model", "rope.low_freq_factor", _tenth_more),
    "upper band": _of("model", "rope.high_freq_factor", _tenth_more),
    "fast band": _of("model", "rope.beta_fast", lambda value: value / 4),
    "slow band": _of("model", "rope.beta_slow", lambda value: 4 * value),
    "base": _of("model", "rope.base", _tenth_more),
    "local base": _of("model", "rope.local_base", _tenth_more),
    "optimizer epsilon": _of("optimizer", "epsilon", _tenth_more),
    "decay": _of("optimizer", "weight_decay", _tenth_more),
    "first moment": _of("optimizer", "beta1", lambda value: 0.99 * value),
    "router z": _of("loss", "router.z_coefficient", _tenth_more),
    "router balance": _of("loss", "router.sequence_balance_coefficient", _tenth_more),
    "rollout cap": _of("loss", "options", lambda options: {"rollout_cap": 1.1 * options["rollout_cap"]}),
    "dual clip": _of("loss", "options", lambda options: {"dual_clip": 1.1 * options["dual_clip"]}),
}
