"""Routing replay through `Engine`: what a rollout or an earlier pass chose, taken by the routers of later passes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from mtrain import ConfigError, DataError, Datum, SamplingParams
from mtrain.arch.lr import learning_rate
from mtrain.config import Config
from mtrain.core.batch.datum import sample_of
from tests.messages import refuses
from tests.parity.batches import SEQ, VOCAB
from tests.parity.cases import SINGLE, Case, case
from tests.parity.compare import TOLERANCE, at_night, relative, without_padding, worst
from tests.parity.expert_models import DEEPSEEK, MIXTRAL, QWEN, with_experts
from tests.parity.models.test_routing_replay import FULL, SIGMOID, SOFTMAX
from tests.parity.replay import drawn_routes, replaying
from tests.pool import Pool
from tests.reference import doubles, exact_steps, token_losses_of
from tests.training import replay_ranks

PACKED: dict[str, Any] = {"data__isolate_documents": True, "data__packing": {}}
DEPTHS = {"model__mtp_depths": 1}
LAYOUTS = [
    (case(2, num_layers=2, tp=2, sp=True, ep=2), SIGMOID | PACKED | FULL),
    at_night(case(2, num_layers=2, cp=2, ep=2), SOFTMAX | DEPTHS),  # tests/parity/models/test_routing_replay.py
    at_night(case(2, num_layers=4, pp=2, vpp=2), SIGMOID | PACKED),
    at_night(case(2, num_layers=2, cp=2, cp_comm="ulysses", dp=2, ep=4), SIGMOID | PACKED),
    at_night(case(2, num_layers=2), QWEN),
]
NAMES = ["tp2sp ep2 packed", "cp2 ep2 depths", "pp2 vpp2 packed", "ulysses dp2 ep4 packed", "one process"]


def rollouts(config: Config | None = None, seed: int = 6) -> list[Datum]:
    """Draws prompts and answers, one of a single token; with a configuration, most of them with experts."""
    rng, data = np.random.default_rng(seed), []
    for slot in range(9):
        ids = rng.integers(1, VOCAB, 1 + (4 * slot) % SEQ).tolist()
        routes = None
        if config is not None and slot != 4:
            routes = drawn_routes(rng, len(ids) - slot % 2, config.model)
            routes[: len(ids) // 3] = -1  # as of a prompt of which nobody knows the experts
        data.append(Datum(ids, [0.0, *(rng.random(len(ids) - 1) < 0.8)], routed_experts=routes))
    return data


@pytest.mark.parametrize(
    ("case", "changes"),
    LAYOUTS,
    ids=NAMES,
)
@pytest.mark.nightly  # by day another choice, below, and the sampler returns its own
def test_replaying_the_own_choice_changes_nothing(pool: Pool, case: Case, changes: dict[str, Any]) -> None:
    """Compares bits: of all tokens, and of some, the others choosing."""
    config = case.config(**changes)
    for own, everywhere, somewhere in pool.run(replay_ranks.own_choice, case.resolved(config), config, rollouts()):
        assert everywhere == own
        assert somewhere == own


@pytest.mark.parametrize(("case", "changes"), LAYOUTS, ids=NAMES)
def test_another_choice_is_replayed(pool: Pool, case: Case, changes: dict[str, Any]) -> None:
    """Compares losses, norms and updated weights of two steps with the oracle, and passes without a gradient before
    them; rows of len(input_ids) or one less."""
    config = case.config(**changes)
    batches = [rollouts(config), rollouts(config, seed=7)]
    runs = pool.run(replay_ranks.train, case.resolved(config), config, batches)
    before = without_padding(runs[0].before, config.model.vocab_size)
    samples = [[sample_of(datum, "sample", config) for datum in batch] for batch in batches]
    rates = [learning_rate(step, config.optimizer, config.train.num_steps) for step in range(2)]
    exact = exact_steps(config, before, rates, samples)
    for run in runs:
        for found, wanted in zip(run.steps, exact, strict=True):
            assert relative(found.objective, wanted.loss) < TOLERANCE
            assert relative(found.grad_norm, wanted.grad_norm) < TOLERANCE
    with replaying(samples[0], config.model):
        token_losses = token_losses_of(doubles(before), config.model, samples[0])
    first = runs[0]
    assert relative(first.loss, exact[0].means["main"]) < TOLERANCE
    for likely, routes, score, losses, sample in zip(
        first.log_probs, first.routes, first.scores, token_losses, samples[0], strict=True
    ):
        counts = sample.mask > 0
        np.testing.assert_allclose(likely[counts], -losses.detach().numpy()[counts], rtol=0, atol=1e-5)
        assert score == pytest.approx(float(likely[counts].sum()), rel=1e-5)
        if sample.choices and len(sample.tokens):
            given = sample.choices["routed_experts"]
            np.testing.assert_array_equal(np.where(given >= 0, routes, -1), given)
    weights = {name: value.numpy() for name, value in exact[-1].parameters.items()}
    assert worst(runs[0].after, weights, config) < TOLERANCE


@pytest.mark.parametrize(
    ("case", "changes"),
    [
        at_night(case(2, num_layers=2, tp=2, sp=True, pp=2, ep=2), DEEPSEEK),
        (case(2, num_layers=2, dp=2, ep=2), MIXTRAL),  # answers by tensor ranks and stages: sampling/test_sampler.py
        at_night(case(2, num_layers=2, cp=2, ep=2), QWEN),
    ],
    ids=["tp2sp pp2 ep2", "dp2 ep2", "cp2 ep2"],
)
def test_the_sampler_returns_its_choice(pool: Pool, case: Case, changes: dict[str, Any]) -> None:
    """Checks that it is the choice of a forward pass over the same tokens, and that it fits a datum as it is."""
    config = case.config(**changes, train__device="cpu")
    rng = np.random.default_rng(3)
    prompts = [rng.integers(1, VOCAB, size).tolist() for size in (3, 1, 6, 4, 2)]
    runs = pool.run(
        replay_ranks.rollouts, case.resolved(config), config, prompts, SamplingParams(max_new_tokens=7, seed=4)
    )
    shape = (config.model.num_layers, config.model.experts.top_k) if config.model.experts else ()
    for found in runs:
        assert found.answers == runs[0].answers
        for prompt, answer, routes, of_forward in zip(
            prompts, found.answers, found.routes, found.of_forward, strict=True
        ):
            assert routes.shape == (len(prompt) + len(answer) - 1, *shape)
            np.testing.assert_array_equal(np.sort(routes), np.sort(of_forward))
        for sampled, replayed in zip(found.sampled, found.replayed, strict=True):
            np.testing.assert_allclose(replayed, sampled, rtol=0, atol=1e-5)


LAYERS, EXPERTS = 2, 8
RIGHT = np.tile(np.array([[0, 0, 0, 0], [5, 1, 7, 2]]), (3, 1, 1))  # vLLM writes 0 in a dense layer


def changed(token: int, layer: int, experts: list[int]) -> Any:
    found = RIGHT.copy()
    found[token, layer] = experts
    return found


WRONG: list[tuple[Any, list[str]]] = [
    (RIGHT[:1], ["sample 1 has 4 tokens", "shape [1, 2, 4]", "[3, 2, 4]"]),
    (RIGHT[:, 1:], ["shape [3, 1, 4]", "including dense ones"]),
    (RIGHT[..., :3], ["shape [3, 2, 3]", "model.experts.top_k"]),
    (RIGHT.reshape(3, 8), ["shape [3, 8]"]),
    ([[[1, 2], [3]]], ["rows of equal lengths"]),
    (RIGHT.astype(np.float32), ["dtype float32", "integers"]),
    (torch.ones(3, 2, 4, requires_grad=True), ["dtype float32", "numbers of experts"]),
    (torch.ones(3, 2, 4, dtype=torch.int64, device="meta"), ["cannot be read"]),
    (np.ma.array(RIGHT, mask=RIGHT == 7), ["dtype object", "the numbers"]),
    (changed(2, 1, [0, 1, 2, 8]), ["token 2 in layer 1", "[0, 1, 2, 8]", "0 to 7"]),
    (changed(0, 1, [0, 1, 2, -2]), ["0 to 7", "token 0 in layer 1"]),
    (changed(1, 1, [0, -1, 2, 3]), ["token 1 in layer 1", "must be 4 experts"]),
    (changed(1, 1, [3, 1, 2, 3]), ["token 1 in layer 1", "different experts"]),
]


@pytest.mark.parametrize(("routes", "facts"), WRONG, ids=[facts[-1] for _, facts in WRONG])
def test_a_choice_that_cannot_be_is_refused(routes: Any, facts: list[str]) -> None:
    config = case(num_layers=LAYERS).config(**DEEPSEEK)
    with refuses(DataError, *facts):
        sample_of(Datum([1, 2, 3, 4], routed_experts=routes), "sample 1", config)


def test_every_form_of_a_choice_is_taken() -> None:
    """Takes lists, tensors, small integers, one row more than is read, and -1; and reads nothing of dense layers."""
    config = case(num_layers=LAYERS).config(**DEEPSEEK)
    more, small, unknown = np.concatenate([RIGHT, RIGHT[:1] - 9]), RIGHT.astype(np.int16), changed(1, 1, [-1] * 4)
    for given in (RIGHT, RIGHT.tolist(), torch.from_numpy(RIGHT), more, small, torch.from_numpy(small)):
        found = sample_of(Datum([1, 2, 3, 4], routed_experts=given), "sample", config).choices["routed_experts"]
        np.testing.assert_array_equal(found[:, 1], RIGHT[:, 1])
        assert (found[:, 0] == -1).all()
    found = sample_of(Datum([1, 2, 3, 4], routed_experts=unknown), "sample", config).choices["routed_experts"]
    np.testing.assert_array_equal(found[:, 1], unknown[:, 1])
    alone = sample_of(Datum([1], routed_experts=[]), "sample", config)
    assert alone.choices["routed_experts"].shape == (1, LAYERS, 4)


@pytest.mark.parametrize(
    ("changes", "fact"),
    [
        ({}, "the model has no experts"),
        (with_experts(MIXTRAL, capacity_factor=1.0) | {"loss__allow_layout_dependent": True}, "capacity_factor=1.0"),
    ],
    ids=["dense", "capacity"],
)
def test_a_model_that_cannot_replay_is_refused(pool: Pool, changes: dict[str, Any], fact: str) -> None:
    config = SINGLE.config(**changes)
    with refuses(ConfigError, "sample 0 has routed_experts", fact):
        sample_of(Datum([1, 2, 3], routed_experts=np.zeros((2, 4, 2), int)), "sample 0", config)
    for code, message in pool.run(replay_ranks.unreported, SINGLE.resolved(config), config)[0]:
        assert code == 2
        assert fact in message


def test_an_engine_goes_on_after_a_refusal(pool: Pool) -> None:
    config = case(2, num_layers=LAYERS, tp=2, sp=True).config(**DEEPSEEK)
    wrong = [Datum([1, 2, 3, 4], routed_experts=routes) for routes, _ in WRONG]
    wrong += [Datum([1, 2, 3, 4], extras={"routed_experts": [1.0] * 4})]
    layout = case(2, num_layers=LAYERS, tp=2, sp=True).resolved(config)
    for found in pool.run(replay_ranks.refusals, layout, config, wrong):
        assert [code for code, _ in found] == [3] * len(wrong)
        assert "give it as Datum.routed_experts" in found[-1][1]
