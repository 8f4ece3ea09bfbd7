"""Rotary position embedding by the papers' formulas, pair by pair of dimensions.

Sources: RoFormer (Su et al. 2021); position interpolation (Chen et al. 2023); Llama 3.1 as released; YaRN (Peng et al.
2023), section 3.2, with the magnitudes of DeepSeek's released models.
"""

import math
from typing import assert_never

import torch
from torch import Tensor

from mtrain.config.schema.rope import RopeSection


def rotated(x: Tensor, positions: Tensor, rope: RopeSection) -> Tensor:
    """Rotates the pairs (i, i + size / 2) of [batch, seq, heads, size] at [batch, seq] positions, or at one for each
    pair, [batch, seq, pairs]."""
    half = x.shape[-1] // 2
    frequencies = torch.tensor([frequency(rope, x.shape[-1], pair) for pair in range(half)], dtype=x.dtype)
    by_pair = positions if positions.dim() == 3 else positions.unsqueeze(-1)
    angles = (by_pair.to(x.dtype) * frequencies.to(x.device)).unsqueeze(2)
    cosine, sine = angles.cos() * magnitude(rope), angles.sin() * magnitude(rope)
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1)


def frequency(rope: RopeSection, size: int, pair: int) -> float:
    """Returns the frequency of the pair (pair, pair + size / 2) in radians per position."""
    plain = math.pow(rope.base, -2.0 * pair / size)
    turns = rope.original_max_positions * plain / (2 * math.pi)
    match rope.scaling:
        case "none":
            share = 1.0
        case "linear":
            share = 0.0
        case "proportional":
            if 2 * (pair + 1) > rope.partial * size:
                return 0.0
            share = 0.0
        case "llama3":
            share = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
        case "yarn":
            share = _yarn_share(rope, size, pair)
        case _:
            assert_never(rope.scaling)
    share = min(1.0, max(0.0, share))
    return plain * (share + (1 - share) / rope.factor)


def _yarn_share(rope: RopeSection, size: int, pair: int) -> float:
    """Returns the unscaled share, from 1 at the pair with beta_fast turns in the context to 0 at beta_slow."""

    def pair_with(turns: float) -> float:
        return size * math.log(rope.original_max_positions / (2 * math.pi * turns)) / (2 * math.log(rope.base))

    fast, slow = pair_with(rope.beta_fast), pair_with(rope.beta_slow)
    if rope.truncate:
        fast, slow = math.floor(fast), math.ceil(slow)
    fast, slow = max(fast, 0), min(slow, size - 1)
    width = slow - fast if slow != fast else 0.001  # as in the released code
    return 1 - (pair - fast) / width


def temperature(positions: Tensor, rope: RopeSection) -> Tensor:
    """Returns the factor of queries at [batch, seq] positions: 1 + b ln(1 + n) after n original contexts.

    Source: Ministral 3 as released.
    """
    contexts = positions // rope.original_max_positions
    return 1 + rope.attention_temperature * torch.log(1 + contexts.double())


def magnitude(rope: RopeSection) -> float:
    """Returns the factor of cos and sin."""
    if rope.scaling != "yarn":
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale is None or rope.mscale_all_dim is None:
        return growth(rope, 1.0)
    return growth(rope, rope.mscale) / growth(rope, rope.mscale_all_dim)


def growth(rope: RopeSection, coefficient: float) -> float:
    """Computes 0.1 c ln(factor) + 1."""
    return 1.0 + 0.1 * coefficient * math.log(rope.factor)
