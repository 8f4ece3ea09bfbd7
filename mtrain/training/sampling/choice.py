"""Choice of the next token.

The random number of a token is a function of the seed, the number of the answer and the position in it. No state is
kept, so neither the layout nor other answers change an answer, and the random states of training are not touched.
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
    """Draws the next token of each row.

    Args:
        logits: Logits, [rows, vocab_size] float32, finite or -inf.
        places: Position of each row's token.
        sampling: Rules for drawing.

    Returns:
        Tokens, [rows] int64, and their log-probabilities in nats, [rows] float64, under the model itself (temperature
        1, no token excluded). A row with nan, or with nothing but -inf, gives token -1.
    """
    values = logits.double()
    likely = values.log_softmax(-1)
    if sampling.temperature == 0:
        tokens = values.argmax(-1)  # the first of equals
    else:
        shares = (values / sampling.temperature).softmax(-1)
        if sampling.top_k or sampling.top_p < 1:
            shares = _likeliest(shares, sampling)
        # in the order of the vocabulary: if sorted, two probabilities that differ by rounding could swap places
        sums = _running_sums(shares)
        numbers = [uniform(sampling.seed, place) for place in places]
        draws = torch.tensor(numbers, dtype=torch.float64, device=logits.device).unsqueeze(-1) * sums[:, -1:]
        # `right`: a token of probability 0 is never drawn, not even by the number 0
        tokens = torch.searchsorted(sums, draws, right=True).squeeze(-1).clamp_max(logits.shape[-1] - 1)
    found = likely.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    return torch.where(found.isfinite(), tokens, -1), found


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
