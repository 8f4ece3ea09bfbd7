"""Settings of a sampler, found from the log-probabilities that it gave."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from mtrain.verify.rollout.exact import log_probs
from mtrain.verify.rollout.records import Rollout

Answer = tuple[Tensor, Rollout]
"""Logits as in `Pass`, float64, with the rollout."""
_COLDEST, _HOTTEST = 0.02, 50.0
_MOST_TOKENS = 256
"""Tokens from which the temperature is found; all of them judge it."""
_GOLDEN = (math.sqrt(5) - 1) / 2


def fitted_temperature(answers: Sequence[Answer]) -> float:
    """Returns the temperature at which the log-probabilities are nearest to the engine's.

    A round number is preferred to one that differs from it by less than 0.1 %.
    """
    logits, ids, said = (each[:_MOST_TOKENS] for each in _drawn(answers, divides=False))
    rows = torch.arange(len(ids))

    def distance(temperature: float) -> float:
        return float(((logits / temperature).log_softmax(-1)[rows, ids] - said).square().mean())

    grid = [_COLDEST * (_HOTTEST / _COLDEST) ** (step / 40) for step in range(41)]
    best = min(range(41), key=lambda number: distance(grid[number]))
    found = _least(distance, grid[max(0, best - 1)], grid[min(40, best + 1)])
    tidy = [round(found, digits) for digits in range(1, 5)]
    return next((each for each in tidy if each > 0 and abs(each - found) < 1e-3 * found), found)


def _least(distance: Callable[[float], float], low: float, high: float) -> float:
    """Searches the least value of a function with one minimum between two numbers by golden sections."""
    for _ in range(60):
        first, second = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
        if distance(first) < distance(second):
            high = second
        else:
            low = first
    return (low + high) / 2


def fitted_top_k(answers: Sequence[Answer]) -> int:
    """Returns the number of likeliest tokens whose probability the engine's log-probabilities are relative to."""
    logits, ids, said = _drawn(answers)
    own = logits.log_softmax(-1)
    missing = own[torch.arange(len(ids)), ids] - said  # log of the probability that is left
    distance = torch.zeros(logits.shape[-1], dtype=torch.float64)
    for row, wanted in zip(own, missing, strict=True):
        distance += (row.sort(descending=True).values.exp().cumsum(0).log() - wanted).square()
    return int(distance.argmin()) + 1


def fitted_top_p(answers: Sequence[Answer], tolerance: float) -> float | None:
    """Returns a probability whose nuclei the engine's log-probabilities are relative to; None if there is none.

    Args:
        answers: Answers of the engine.
        tolerance: Rounding of a log-probability.
    """
    logits, ids, said = _drawn(answers)
    own = logits.log_softmax(-1)
    missing = own[torch.arange(len(ids)), ids] - said
    low, high = 0.0, 1.0
    for row, wanted in zip(own, missing, strict=True):
        reached = row.sort(descending=True).values.exp().cumsum(0)
        fits = ((reached.log() - wanted).abs() <= 32 * tolerance).nonzero()
        if not len(fits):
            return None
        first, last = int(fits[0]), int(fits[-1])
        # the nucleus is the fewest tokens that reach p: one token fewer does not
        low = max(low, float(reached[first - 1]) if first else 0.0)
        high = min(high, float(reached[last]))
    if not low < high:
        return None
    tidy = (math.ceil(low * 10**digits + 1e-9) / 10**digits for digits in range(1, 7))
    return next((each for each in tidy if low < each <= high), (low + high) / 2)


def fitted_padding(answers: Sequence[Answer]) -> int:
    """Returns how many rows with logits of 0 the engine's softmax seems to count too; at least 0."""
    logits, ids, said = _drawn(answers)
    own = logits.log_softmax(-1)[torch.arange(len(ids)), ids]
    rows = (torch.exp(own - said) - 1) * logits.logsumexp(-1).exp()
    found = float(rows.median())
    return max(0, round(found)) if math.isfinite(found) and found < 1e6 else 0


def truncated(logits: Tensor, rollout: Rollout, top_k: int | None = None, top_p: float = 1.0) -> Tensor:
    """Returns log-probabilities among the tokens that are left; -inf for a token that is not."""
    own = logits[1 : 1 + len(rollout.ids)] / rollout.temperature
    ordered = own.sort(-1, descending=True)
    reached = ordered.values.softmax(-1).cumsum(-1)
    is_left = torch.zeros_like(own, dtype=torch.bool)
    places = torch.arange(own.shape[-1])
    kept = places < (own.shape[-1] if top_k is None else top_k)
    # a token is left if those before it do not reach p
    kept = kept & (torch.cat([torch.zeros_like(reached[:, :1]), reached[:, :-1]], -1) < top_p)
    is_left.scatter_(-1, ordered.indices, kept)
    padded = torch.cat([logits[:1], own.masked_fill(~is_left, -math.inf), logits[-1:]])
    return log_probs(padded, rollout.ids, 1.0)


def _drawn(answers: Sequence[Answer], divides: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    """Returns logits, ids and log-probabilities of the drawn tokens of all answers.

    Args:
        answers: Answers of the engine.
        divides: Whether the logits are divided by the temperature that the file says.
    """
    logits, ids, said = [], [], []
    for given, rollout in answers:
        mask = torch.tensor(rollout.mask)
        own = given[1 : 1 + len(rollout.ids)][mask]
        logits.append(own / rollout.temperature if divides else own)
        ids.append(torch.tensor(rollout.ids)[mask])
        said.append(torch.tensor(rollout.log_probs, dtype=torch.float64)[mask])
    return torch.cat(logits), torch.cat(ids), torch.cat(said)
