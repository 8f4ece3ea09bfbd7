"""The choice of the next token."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from mtrain.training.sampling.params import SamplingParams
from mtrain.training.sampling.sampler import TokenPosition, choose, log_probs, uniform
from tests.messages import refuses

LOGITS = torch.tensor([1.5, -0.3, 0.9, float("-inf"), 2.2, 0.0, -1.0, 2.1])
MANY = [TokenPosition(answer, token) for answer in range(50) for token in range(100)]


def drawn(sampling: SamplingParams) -> torch.Tensor:
    return choose(LOGITS.expand(len(MANY), -1), MANY, sampling)[0]


@pytest.mark.parametrize(("top_p", "top_k"), [(1.0, 0), (0.7, 0), (1.0, 3), (0.8, 4), (0.01, 0)])
def test_tokens_come_as_often_as_the_distribution_of_transformers_says(top_p: float, top_k: int) -> None:
    warped = TemperatureLogitsWarper(0.9)(None, LOGITS[None].double())
    warped = warped if top_k == 0 else TopKLogitsWarper(top_k)(None, warped)
    shares = TopPLogitsWarper(top_p)(None, warped).softmax(-1)[0]
    counts = drawn(SamplingParams(temperature=0.9, top_p=top_p, top_k=top_k, seed=3)).bincount(minlength=8).double()
    # five standard deviations of a binomial count; 0 where a token is left out
    assert ((counts - len(MANY) * shares).abs() <= 5 * (len(MANY) * shares * (1 - shares)).sqrt() + 1e-9).all()


def test_a_draw_follows_from_seed_answer_and_place_alone() -> None:
    """Other draws of the same call change nothing."""
    sampling = SamplingParams(temperature=1.3, seed=5)
    together = drawn(sampling)
    one = torch.cat([choose(LOGITS[None], [place], sampling)[0] for place in MANY[:200]])
    assert torch.equal(together[:200], one)
    assert not torch.equal(together, drawn(SamplingParams(temperature=1.3, seed=6)))
    numbers = {uniform(seed, place) for seed in (0, 1) for place in MANY}
    assert len(numbers) == 2 * len(MANY)


def test_a_deterministic_run_draws_the_same_tokens() -> None:
    sampling = SamplingParams(temperature=1.3, top_p=0.9, seed=5)
    torch.use_deterministic_algorithms(True)
    try:
        found = drawn(sampling)
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(found, drawn(sampling))


def test_log_probabilities_are_those_of_the_model_itself() -> None:
    sampling = SamplingParams(temperature=0.5, top_p=0.6, seed=1)
    tokens, likely = choose(LOGITS.expand(9, -1), MANY[:9], sampling)
    assert torch.allclose(likely, LOGITS.double().log_softmax(-1)[tokens], rtol=0, atol=1e-12)


def warped(logits: torch.Tensor, temperature: float, top_p: float, top_k: int) -> torch.Tensor:
    """Returns the log-probabilities of the distribution as transformers makes it, in float64."""
    found = TemperatureLogitsWarper(temperature)(None, logits.double())
    found = TopKLogitsWarper(top_k)(None, found) if top_k else found
    kept: torch.Tensor = TopPLogitsWarper(top_p)(None, found) if top_p < 1 else found
    return kept.log_softmax(-1)


@settings(max_examples=60, deadline=None)
@given(
    temperature=st.floats(0.05, 20.0),
    top_p=st.sampled_from([1.0, 0.95, 0.6, 0.05]),
    top_k=st.sampled_from([0, 1, 3, 40, 10**6]),
    seed=st.integers(0, 2**48),
)
def test_log_probabilities_of_the_draw_are_those_of_transformers(
    temperature: float, top_p: float, top_k: int, seed: int
) -> None:
    logits = torch.randn(20, 41, generator=torch.Generator().manual_seed(seed)) * 3
    sampling = SamplingParams(temperature=temperature, top_p=top_p, top_k=top_k, seed=seed, log_probs_of_draw=True)
    tokens, likely = choose(logits, MANY[:20], sampling)
    exact = warped(logits, temperature, top_p, min(top_k, 41))
    assert torch.allclose(likely, exact.gather(-1, tokens[:, None])[:, 0], rtol=0, atol=1e-9)
    assert torch.allclose(log_probs(logits, sampling), exact, rtol=0, atol=1e-9)


@given(temperature=st.floats(0, 1.79e308, exclude_min=True, allow_subnormal=True), seed=st.integers(0, 2**48))
@example(5e-324, 0)
@example(1e-310, 1)
@example(1.7e308, 2)
def test_no_temperature_is_too_small_or_too_large_to_draw_at(temperature: float, seed: int) -> None:
    """Draws the likeliest token where the others have no probability left, and any token at the highest."""
    logits = torch.randn(8, 13, generator=torch.Generator().manual_seed(seed)) * 5
    for of_draw in (False, True):
        tokens, likely = choose(
            logits, MANY[:8], SamplingParams(temperature=temperature, seed=seed, log_probs_of_draw=of_draw)
        )
        assert likely.isfinite().all()
        if temperature < 1e-9:
            assert torch.equal(tokens, logits.argmax(-1))
            assert not of_draw or likely.eq(0).all()
        if temperature > 1e9 and of_draw:
            assert torch.allclose(likely, torch.full_like(likely, -np.log(13)))


def test_at_temperature_0_nothing_is_drawn() -> None:
    """So log-probabilities are the model's, whichever are asked for, as other engines give them."""
    sampling = SamplingParams(temperature=0.0, top_p=0.1, top_k=1, log_probs_of_draw=True)
    tokens, likely = choose(LOGITS[None], MANY[:1], sampling)
    assert tokens.tolist() == [4]
    assert torch.equal(likely, LOGITS.double().log_softmax(-1)[tokens])


def test_nan_gives_no_token() -> None:
    rows = torch.stack((LOGITS, LOGITS.clone().fill_(float("nan")), LOGITS.clone().fill_(float("-inf"))))
    for temperature in (0.0, 1.0):
        tokens, _ = choose(rows, MANY[:3], SamplingParams(temperature=temperature))
        assert tokens.tolist()[1:] == [-1, -1]
        assert tokens[0] >= 0


@pytest.mark.parametrize(
    "wrong",
    [{"temperature": -1.0}, {"top_p": 0.0}, {"top_k": -1}, {"max_new_tokens": 0}, {"temperature": float("inf")}]
    + [{"max_new_tokens": 2.5}, {"max_new_tokens": True}, {"top_k": 1.0}, {"seed": "1"}]
    + [{"stop_token_ids": frozenset({each})} for each in (2.0, True, "</s>", -1, None)],
    ids=str,
)
def test_values_that_cannot_be_are_refused(wrong: dict[str, object]) -> None:
    with refuses(ValueError, next(iter(wrong))):
        SamplingParams(**wrong)  # type: ignore[arg-type]


def test_stop_tokens_may_be_integers_of_numpy_and_torch() -> None:
    given = frozenset({2, np.int32(3), torch.tensor(4)})
    assert SamplingParams(stop_token_ids=given).stop_token_ids == {2, 3, 4}  # type: ignore[arg-type]
