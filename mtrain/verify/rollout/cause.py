"""Causes of a disagreement in words: what the engine did, and what to change."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mtrain.verify.rollout.settings import Settings


@dataclass(frozen=True)
class Cause:
    """Possible cause of the deviation."""

    name: str
    """Such as `temperature`."""
    fact: str
    """What the engine did, as a sentence without full stop."""
    remedy: str
    is_rounding: bool = False
    """Whether the engine rounds to bfloat16 somewhere, so that single tokens may be mispredicted."""


def sampler(settings: Settings, said: Sequence[float]) -> Cause:
    name = settings.cause()
    if name == "temperature":
        given = ", ".join(f"{each:g}" for each in said)
        return Cause(
            name,
            f"the log-probabilities are those at temperature {settings.temperature:g}, but the file says {given}",
            "let the engine give those after the temperature (vLLM: logprobs_mode=processed_logprobs), or say "
            f"temperature {settings.temperature:g} in the file and in Datum.temperature",
        )
    if name == "truncated vocabulary":
        fact = f"the log-probabilities are divided by the probability of the tokens that {settings} leaves"
    else:
        fact = f"the log-probabilities are those of a sampler with {settings}"
    return Cause(
        name,
        fact,
        "let the engine give those of the whole vocabulary (vLLM: logprobs_mode=raw_logprobs at temperature 1), or "
        "draw without these settings, which vLLM also takes from generation_config.json: a loss takes the whole "
        "distribution",
    )


def moved(shift: int) -> Cause:
    return Cause(
        "off by one",
        f"the log-probability of each token is given to the one {'before' if shift > 0 else 'after'} it",
        "shift log_probs by one: the first is that of the first token of the answer",
    )


def label_shift(shift: int) -> Cause:
    where = "after the token itself" if shift > 0 else "one token too early"
    return Cause(
        "off by one",
        f"the log-probability of each token is taken from the logits {where}",
        "take it from the logits of the position before the token",
    )


def padding(rows: int) -> Cause:
    return Cause(
        "padded vocabulary",
        f"the softmax of the engine counts {rows} rows more than the vocabulary has, with logits of 0",
        "let the engine leave out the rows that pad its table",
    )


def other_begin(what: str) -> Cause:
    return Cause(
        "missing bos" if what.startswith("without") else "doubled bos",
        f"the engine read the prompt {what}",
        "give the engine the token ids of the prompt instead of a text, or compare add_special_tokens on both sides",
    )


def other_order(what: str, example: str) -> Cause:
    return Cause(
        "rows in another order",
        f"each answer has the {what} of another row: {example}",
        "put the engine's outputs in the order of its prompts (vLLM: request_id)",
    )


def cut_prompt(count: int, is_end: bool) -> Cause:
    return Cause(
        "cut prompt",
        f"the engine read the {'last' if is_end else 'first'} {count} tokens of the prompt alone",
        "let the engine read whole prompts (vLLM: truncate_prompt_tokens, max_model_len), or write those that it read",
    )


def precision(dtype: torch.dtype) -> Cause:
    name = str(dtype).removeprefix("torch.")
    return Cause(
        "precision",
        f"the differences are as large as the rounding of an engine that computes in {name}",
        f"if the engine computes in {name}, say so by --dtype {name}; if not, it may have other weights (--weights)",
    )


def template(name: str) -> Cause:
    return Cause(
        "other template",
        f"the engine read {name} instead of the token ids in the file",
        "give the engine the token ids that the run's chat template makes",
    )


ROUTER = Cause(
    "bf16 router",
    "the routers of the engine compute in bfloat16, so that experts are weighed, and some chosen, otherwise",
    "let the engine compute its routers in float32, or replay its routes in the trainer",
    is_rounding=True,
)


def partial_sums(ranks: int) -> Cause:
    return Cause(
        "expert-parallel sum",
        f"the engine rounds the sum of the experts of each of {ranks} expert-parallel ranks to bfloat16 before it adds "
        "them up",
        "let the engine add up experts in float32, or with another number of expert-parallel ranks",
        is_rounding=True,
    )


ROUTES = Cause(
    "other routes",
    "the engine chose other experts; with its routes replayed its log-probabilities are right",
    "replay the routes in the trainer, or compute routers on both sides in float32",
)


def stale(name: str) -> Cause:
    return Cause(
        "stale weights",
        f"the log-probabilities are those of {name}",
        "send the weights before drawing, and empty the engine's prefix cache after it",
    )
