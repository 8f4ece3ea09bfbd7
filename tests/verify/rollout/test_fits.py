"""Every setting of a sampler that changes log-probabilities is found from these, alone and with another one.

The log-probabilities are those of transformers' processors of logits, in float32; penalties that transformers has not
are written here from vLLM's documentation.
"""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.generation import logits_process as theirs

from mtrain.verify.rollout.fits import BIASED, SEVERAL, SINGLES, fitted
from mtrain.verify.rollout.records import Rollout
from mtrain.verify.rollout.settings import TRUNCATIONS, DrawnTokens, Settings

VOCAB, NUM_ANSWERS, NUM_TOKENS = 80, 4, 16
DRAWS: dict[str, list[Any]] = {
    "temperature": [0.6, 0.7, 1.3, 0.35],
    "repetition_penalty": [1.05, 1.2, 0.9],
    "frequency_penalty": [0.3, -0.5, 1.1],
    "presence_penalty": [0.4, 1.5, -0.6],
    "min_p": [0.05, 0.1, 0.02],
    "top_k": [20, 5, 50],
    "top_p": [0.9, 0.8, 0.95],
    BIASED: [{"bias": {3: -math.inf}}, {"bias": {7: 2.5}}, {"min_tokens": 6}, {"bias": {4: -math.inf, 9: 1.0}}],
}
STOP = 5


def processed(row: Tensor, prompt: list[int], ids: list[int], said: dict[str, Any]) -> Tensor:
    """Returns the log-probabilities, [vocab] float32, of the token after some ids, in vLLM's order."""
    scores, read = row[None].float(), torch.tensor([prompt + ids])
    biased = said.get(BIASED, {})
    for token, value in biased.get("bias", {}).items():
        scores = theirs.SequenceBiasLogitsProcessor({(token,): value})(read, scores)
    if "min_tokens" in biased:
        length = theirs.MinNewTokensLengthLogitsProcessor(len(prompt), biased["min_tokens"], STOP, device="cpu")
        scores = length(read, scores)
    if "repetition_penalty" in said:
        scores = theirs.RepetitionPenaltyLogitsProcessor(said["repetition_penalty"])(read, scores)
    counts = torch.bincount(torch.tensor(ids, dtype=torch.int64), minlength=len(row))
    scores = scores - said.get("frequency_penalty", 0.0) * counts - said.get("presence_penalty", 0.0) * (counts > 0)
    if "temperature" in said:
        scores = theirs.TemperatureLogitsWarper(said["temperature"])(read, scores)
    for name, kind in (
        ("min_p", theirs.MinPLogitsWarper),
        ("top_k", theirs.TopKLogitsWarper),
        ("top_p", theirs.TopPLogitsWarper),
    ):
        if name in said:
            scores = kind(said[name])(read, scores)
    found: Tensor = scores[0].log_softmax(-1)
    return found


def answers(said: dict[str, Any], seed: int) -> list[tuple[Tensor, Rollout]]:
    """Draws answers of a sampler from logits that do not depend on them."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for number in range(NUM_ANSWERS):
        logits = 2 * torch.randn(NUM_TOKENS + 2, VOCAB, generator=generator, dtype=torch.float64)
        logits[:, STOP] += 1
        prompt = torch.randint(VOCAB, (9,), generator=generator).tolist()
        ids: list[int] = []
        log_probs: list[float] = []
        for row in logits[1:-1]:
            every = processed(row, prompt, ids, said)
            ids.append(int(torch.multinomial(every.exp(), 1, generator=generator)))
            log_probs.append(float(every[ids[-1]]))
        found.append((logits, Rollout(f"line {number}", prompt, ids, log_probs, [True] * NUM_TOKENS)))
    return found


def distance(found: Settings | None, given: list[tuple[Tensor, Rollout]]) -> float:
    if found is None:
        return math.inf
    every = [DrawnTokens.of(*each) for each in given]
    return max(float((places.log_probs(found) - places.engine_log_probs).abs().max()) for places in every)


HARD = (*((name, BIASED) for name in TRUNCATIONS), ("temperature", "top_k", "top_p"))
"""Settings that decide together which tokens are left."""
BY_NIGHT = [names for names in SEVERAL if "temperature" not in names and names not in HARD]
"""Pairs that the day finds with temperature in the place of another continuous setting."""


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(names, marks=[pytest.mark.nightly] if names in BY_NIGHT else [])
        for names in [*SINGLES, *SEVERAL]
        if names not in HARD
    ],
    ids="-".join,
)
def test_settings_are_found_from_log_probabilities(names: tuple[str, ...]) -> None:
    for seed in range(4 if names == (BIASED,) else 1):
        said = {name: DRAWS[name][seed % len(DRAWS[name])] for name in names}
        given = answers(said, seed)
        found = fitted(given, names, 1e-6)
        assert distance(found, given) < 2e-5, f"{found} of {said}"
        for name in set(names) - {BIASED}:
            assert f"{name}={said[name]:g}" in str(found), f"{found} of {said}"
        # no other setting alone gives these numbers
        for other in SINGLES if len(names) == 1 else ():
            assert other == names or distance(fitted(given, other, 1e-6), given) > 1e-3


def drawn(name: str, choose: random.Random) -> Any:
    """Draws a value of a setting; biases are strong, weak, of one token or two, or forbid."""
    match name:
        case "temperature":
            return round(choose.choice([choose.uniform(0.3, 0.95), choose.uniform(1.05, 1.8)]), 2)
        case "repetition_penalty":
            return round(choose.choice([choose.uniform(1.03, 1.5), choose.uniform(0.7, 0.97)]), 2)
        case "frequency_penalty" | "presence_penalty":
            return round(choose.choice([-1, 1]) * choose.uniform(0.1, 1.8), 1)
        case "min_p":
            return round(choose.uniform(0.02, 0.3), 2)
        case "top_k":
            return choose.randint(3, 60)
        case "top_p":
            return round(choose.uniform(0.5, 0.97), 2)
    first, second = choose.sample(range(VOCAB), 2)
    up, down = round(choose.uniform(3, 8), 1), -round(choose.uniform(0.5, 4), 1)
    biases = [{first: up}, {first: up, second: up - 1}, {first: down}, {first: -math.inf, second: -math.inf}]
    found: dict[str, Any] = choose.choice([{"bias": each} for each in biases] + [{"min_tokens": choose.randint(3, 9)}])
    return found


@pytest.mark.parametrize(
    ("names", "seed"),
    [
        pytest.param(names, seed, marks=[] if seed == 0 and names in HARD else [pytest.mark.nightly])
        for names in SEVERAL
        for seed in range(6 if names in HARD else 3)
    ],
    ids=lambda each: "-".join(each) if isinstance(each, tuple) else str(each),
)
def test_drawn_settings_are_found(names: tuple[str, ...], seed: int) -> None:
    choose = random.Random(f"{seed} {names}")
    said = {name: drawn(name, choose) for name in names}
    given = answers(said, seed)
    found = fitted(given, names, 1e-6)
    assert distance(found, given) < 2e-5, f"{found} of {said}"


@pytest.mark.parametrize(
    "said",
    [
        # one strong bias, as drawn above
        pytest.param({"min_p": 0.1, BIASED: {"bias": {7: 6.0}}}, marks=pytest.mark.nightly),
        {"top_p": 0.9, BIASED: {"bias": {3: 5.0, 11: 5.0}}},
        {"temperature": 0.6, "top_k": 20, "top_p": 0.8},
    ],
    ids=lambda said: "-".join(said),
)
def test_settings_are_found_where_a_truncation_leaves_few_tokens(said: dict[str, Any]) -> None:
    """Draws the same few tokens nearly everywhere, or leaves so few that an error of a temperature leaves others."""
    given = answers(said, 0)
    found = fitted(given, [*said], 1e-6)
    assert distance(found, given) < 2e-5, f"{found} of {said}"
