"""Drawing the next token.

The random number of a token is a function of the seed, the number of the answer and the place in it: nothing is carried
along, so neither the layout nor what is generated beside it changes an answer, and the random states of training are
not touched.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mtrain.data.numbers import whole_number


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are drawn, and when an answer ends."""

    max_new_tokens: int = 64
    """Most tokens to add."""
    temperature: float = 1.0
    """Logits are divided by it; 0 takes the likeliest token."""
    top_p: float = 1.0
    """Only the likeliest tokens that together reach this probability are drawn from."""
    top_k: int = 0
    """Only so many of the likeliest tokens are drawn from; 0: all."""
    seed: int = 0
    """Of the drawing."""
    stop_token_ids: frozenset[int] = frozenset()
    """Each of them ends the answer, as its last token."""

    def __post_init__(self) -> None:
        """Raises ValueError where a value cannot be."""
        whole = {name: whole_number(getattr(self, name)) for name in ("max_new_tokens", "top_k", "seed")}
        stops = [whole_number(each) for each in self.stop_token_ids]
        rules = {
            "max_new_tokens must be a whole number of at least 1": (whole["max_new_tokens"] or 0) >= 1,
            "temperature must be 0 or above": math.isfinite(self.temperature) and self.temperature >= 0,
            "top_p must be above 0 and at most 1": 0 < self.top_p <= 1,
            "top_k must be a whole number, 0 or above": whole["top_k"] is not None and whole["top_k"] >= 0,
            "seed must be a whole number, 0 or above": whole["seed"] is not None and whole["seed"] >= 0,
            "stop_token_ids must be whole numbers, 0 or above": all(each is not None and each >= 0 for each in stops),
        }
        broken = [f"{rule}, but is {getattr(self, rule.split()[0])}" for rule, holds in rules.items() if not holds]
        if broken:
            raise ValueError("; ".join(broken))
        # a tensor is equal to its number, but is not found in a set by it
        object.__setattr__(self, "stop_token_ids", frozenset(stops))


@dataclass(frozen=True)
class TokenPlace:
    """Which token is drawn."""

    answer: int
    """Its number among the prompts."""
    token: int
    """Its number in the answer, from 0."""


def choose(logits: Tensor, places: Sequence[TokenPlace], sampling: SamplingParams) -> tuple[Tensor, Tensor]:
    """The next token of each row.

    Args:
        logits: [rows, vocab_size] float32, finite or -inf.
        places: Of each row.
        sampling: How.

    Returns:
        [rows] int64, and [rows] float64: the log-probability of each in nats, under the model itself (temperature 1,
        nothing left out). A row with nan, or with nothing but -inf, gives token -1.
    """
    values = logits.double()
    likely = values.log_softmax(-1)
    if sampling.temperature == 0:
        tokens = values.argmax(-1)  # the first of equals
    else:
        shares = (values / sampling.temperature).softmax(-1)
        if sampling.top_k or sampling.top_p < 1:
            shares = _likeliest(shares, sampling)
        # In the vocabulary's order: in that of the probabilities, two that differ by rounding would swap their places.
        sums = shares.cumsum(-1)
        numbers = [uniform(sampling.seed, place) for place in places]
        draws = torch.tensor(numbers, dtype=torch.float64, device=logits.device).unsqueeze(-1) * sums[:, -1:]
        # `right`: a token of probability 0 is never drawn, not even by the number 0
        tokens = torch.searchsorted(sums, draws, right=True).squeeze(-1).clamp_max(logits.shape[-1] - 1)
    found = likely.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    return torch.where(found.isfinite(), tokens, -1), found


def _likeliest(shares: Tensor, sampling: SamplingParams) -> Tensor:
    """[rows, vocab_size] with 0 for tokens that are not drawn from; rows need not sum to 1.

    First `top_k`, then `top_p` of what remains, as transformers and vLLM have it; the token that reaches top_p is in.

    Source: Holtzman et al. 2020, The Curious Case of Neural Text Degeneration, arXiv 1904.09751, section 3.1.
    """
    ranked, order = shares.sort(dim=-1, descending=True, stable=True)
    if sampling.top_k:
        ranked[:, sampling.top_k :] = 0.0
    before = ranked.cumsum(-1) - ranked
    ranked = torch.where(before < sampling.top_p * ranked.sum(-1, keepdim=True), ranked, 0.0)
    return torch.zeros_like(shares).scatter(-1, order, ranked)


def uniform(seed: int, place: TokenPlace) -> float:
    """A number in [0, 1), evenly distributed over places."""
    content = struct.pack("<QQQ", seed, place.answer, place.token)
    digest = hashlib.blake2b(content, digest_size=8).digest()
    # 53 bits, which a float holds exactly
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53
