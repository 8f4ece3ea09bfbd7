"""Choice of the next token.

The random number of a token is a function of the seed, the number of the answer and the position in it, so neither the
layout nor other answers change an answer, and the random states of training are not touched.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mtrain.training.sampling.params import SamplingParams


@dataclass(frozen=True)
class TokenPlace:
    """Position of a token that is drawn."""

    answer: int
    """Number of the answer's prompt, from 0."""
    token: int
    """Number of the token in the answer, from 0."""


def choose(logits: Tensor, places: Sequence[TokenPlace], sampling: SamplingParams) -> tuple[Tensor, Tensor]:
    """Draws the next token of each row of logits, [rows, vocab_size] float32, finite or -inf.

    Returns:
        Tokens, [rows] int64, and their log-probabilities in nats, [rows] float64; see `log_probs`. A row with nan, or
            with nothing but -inf, gives token -1.
    """
    values = logits.double()
    shares = None if sampling.temperature == 0 else _shares(values, sampling)
    if shares is None:
        tokens = values.argmax(-1)  # the first of equals
    else:
        # in the order of the vocabulary: if sorted, two probabilities that differ by rounding could swap places
        sums = _running_sums(shares)
        numbers = [uniform(sampling.seed, place) for place in places]
        draws = torch.tensor(numbers, dtype=torch.float64, device=logits.device).unsqueeze(-1) * sums[:, -1:]
        # `right`: a token of probability 0 is never drawn, not even by the number 0
        tokens = torch.searchsorted(sums, draws, right=True).squeeze(-1).clamp_max(logits.shape[-1] - 1)
    found = _log_probs(values, shares, sampling).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    return torch.where(found.isfinite(), tokens, -1), found


def log_probs(logits: Tensor, sampling: SamplingParams) -> Tensor:
    """Returns log-probabilities in nats, [rows, vocab_size] float64.

    They are those of the model itself (temperature 1, no token excluded); with `sampling.log_probs_of_draw` those of
    the distribution that tokens are drawn from, -inf where a token is excluded. At temperature 0 nothing is drawn, so
    they are the model's.

    Args:
        logits: Logits, [rows, vocab_size] float32.
    """
    values = logits.double()
    is_of_model = sampling.temperature == 0 or not sampling.log_probs_of_draw
    return _log_probs(values, None if is_of_model else _shares(values, sampling), sampling)


def _log_probs(values: Tensor, shares: Tensor | None, sampling: SamplingParams) -> Tensor:
    if shares is None or not sampling.log_probs_of_draw:
        return values.log_softmax(-1)
    return _scaled(values, sampling).masked_fill(shares == 0, -torch.inf).log_softmax(-1)


def _shares(values: Tensor, sampling: SamplingParams) -> Tensor:
    """Returns the share of each token, [rows, vocab_size]; rows need not sum to 1."""
    shares = _scaled(values, sampling).softmax(-1)
    return _likeliest(shares, sampling) if sampling.top_k or sampling.top_p < 1 else shares


def _scaled(values: Tensor, sampling: SamplingParams) -> Tensor:
    # the largest becomes 0, which no temperature, however small, makes infinite
    return (values - values.amax(-1, keepdim=True)) / sampling.temperature


def _likeliest(shares: Tensor, sampling: SamplingParams) -> Tensor:
    """Sets the probability of excluded tokens to 0, [rows, vocab_size]; rows need not sum to 1.

    `top_k` is applied first, then `top_p` to the rest, as in transformers and vLLM; the token that reaches top_p is
    included.

    Source: Holtzman et al. 2020, The Curious Case of Neural Text Degeneration, arXiv 1904.09751, section 3.1.
    """
    ranked, order = shares.sort(dim=-1, descending=True, stable=True)
    if sampling.top_k:
        ranked[:, sampling.top_k :] = 0.0
    before = _running_sums(ranked) - ranked
    ranked = torch.where(before < sampling.top_p * ranked.sum(-1, keepdim=True), ranked, 0.0)
    return torch.zeros_like(shares).scatter(-1, order, ranked)


def _running_sums(values: Tensor) -> Tensor:
    # torch refuses to add them on a GPU in a deterministic run
    where = values.cpu() if torch.are_deterministic_algorithms_enabled() else values
    return where.cumsum(-1).to(values.device)


def uniform(seed: int, place: TokenPlace) -> float:
    """Returns a number in [0, 1), uniformly distributed over places."""
    content = struct.pack("<QQQ", seed, place.answer, place.token)
    digest = hashlib.blake2b(content, digest_size=8).digest()
    # 53 bits, which a float holds exactly
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53
