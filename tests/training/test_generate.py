"""Continuing a prompt."""

import torch
from torch import Tensor

from mtrain.training.generate import continue_ids

EOS = 0


def counting(ids: Tensor) -> Tensor:
    """Logits of a model over 10 tokens that likes the last token plus one, and nothing else much."""
    logits = torch.zeros(10)
    logits[(int(ids[-1]) + 1) % 10] = 5.0
    return logits


def test_the_likeliest_tokens_follow_up_to_the_end_token() -> None:
    assert continue_ids([6], counting, 20, EOS, 0.0, torch.Generator()) == [7, 8, 9]


def test_no_more_tokens_than_asked_for() -> None:
    assert continue_ids([1, 2], counting, 3, EOS, 0.0, torch.Generator()) == [3, 4, 5]


def test_sampling_follows_the_seed_and_the_temperature() -> None:
    def sampled(seed: int, temperature: float) -> list[int]:
        return continue_ids([1], counting, 30, -1, temperature, torch.Generator().manual_seed(seed))

    assert sampled(1, 5.0) == sampled(1, 5.0)
    assert sampled(1, 5.0) != sampled(2, 5.0)
    assert sampled(1, 0.1) == [(2 + i) % 10 for i in range(30)]
