"""Policy-gradient losses and their diagnostics equal the papers' formulas on one process, under every layout."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from mtrain.config.schema.loss import LossSection
from mtrain.core.batch.sample import Sample
from tests.parity.batches import VOCAB, GlobalBatch
from tests.parity.cases import Case, case
from tests.parity.compare import at_night, deviation, initial_parameters, relative, run_oracle, without_padding
from tests.parity.naive import train_each_naively
from tests.parity.objectives.test_seed_faults import distance, oracle_gradients
from tests.parity.ranks import Outcome, Run, train_each
from tests.pool import Pool
from tests.reference import doubles, token_losses_of

LENGTHS = [32, 3, 1, 0, 7, 12, 20, 5, 9, 31, 2, 16, 4, 11, 6, 8]
"""Number of positions of each rollout: one fills a row, one has no text."""
PACKED: dict[str, Any] = {"data__isolate_documents": True, "data__packing": {}}
NORM = {"aggregation": "seq-mean-token-sum-norm", "norm_length": 20}
EVERYTHING_WHOLE: dict[str, Any] = {
    "loss__function": "ppo",
    "loss__options": {"clip_high": 0.28, "dual_clip": 1.3, "rollout_cap": 1.1},
    "loss__side_terms": {
        "near": {"function": "kl", "coefficient": 0.1},
        "sequences": {
            "function": "gspo",
            "options": {"clip_low": 0.05, "clip_high": 0.1},
            "aggregation": "seq-mean-token-mean",
            "coefficient": 0.7,
        },
        "bonus": {"function": "entropy", "coefficient": -0.02},
    },
}
"""Terms of PPO and its extensions, KL, GSPO (which sees whole microbatches) and an entropy bonus; one advantage
each."""
BY_TOKEN: dict[str, Any] = {
    "loss__chunk_tokens": 7,
    "loss__function": "ppo",
    "loss__aggregation": "seq-mean-token-mean",
    "loss__side_terms": {
        "k1": {"function": "kl", "options": {"estimator": "k1"}, "aggregation": "seq-mean-token-mean"},
        "k2": {"function": "kl", "options": {"estimator": "k2"}, "coefficient": 0.3},
        "soft": {"function": "cispo", "options": {"clip_low": 0.3, "rollout_cap": 1.2}, "coefficient": 0.6},
        "one_sided": {"function": "cispo", "options": {"clip_high": 0.1}, "coefficient": 0.4},
        "likely": {"function": "dft", "coefficient": 0.2} | NORM,
        "without_length": {"function": "ppo", "coefficient": 0.8} | NORM,
    },
}
"""Terms of GRPO and Dr. GRPO, CISPO, DFT and other estimators of KL, a few tokens at a time; an advantage per token."""
AGGREGATED: dict[str, Any] = {
    "loss__function": "ppo",
    "loss__aggregation": "sum",
    "loss__side_terms": {
        "power": {"function": "ppo", "aggregation": "seq-mean-token-power", "length_power": 0.3, "coefficient": 0.9},
        "sqrt": {"function": "cispo", "aggregation": "seq-mean-token-sqrt", "coefficient": 0.7},
        "norm": {"function": "ppo", "aggregation": "token-sum-norm", "norm_length": 5, "coefficient": 1.1},
        "sums": {"function": "kl", "aggregation": "seq-mean-token-sum", "empty_sequences": "include"},
    },
}
SAMPLED_ELSEWHERE: dict[str, Any] = {
    "loss__function": "gspo",
    "loss__aggregation": "seq-mean-token-mean",
    "loss__options": {
        "clip_low": 0.05,
        "clip_high": 0.1,
        "rollout_cap": 1.6,
        "rollout_floor": 0.6,
        "rollout_correction": "sequence-mask",
        "temperature": 0.8,
    },
    "loss__side_terms": {
        "near": {"function": "kl", "options": {"temperature": 0.8}, "coefficient": 0.1},
        "bonus": {"function": "entropy", "options": {"temperature": 1.7}, "coefficient": -0.5},
        "product": {
            "function": "ppo",
            "options": {"rollout_cap": 1.4, "rollout_correction": "sequence-truncate"},
            "coefficient": 0.6,
        },
        "mean": {
            "function": "cispo",
            "options": {"rollout_cap": 1.05, "rollout_floor": 0.95, "rollout_correction": "sequence-mean-mask"},
            "coefficient": 0.4,
        },
        "tokens": {
            "function": "ppo",
            "options": {"rollout_floor": 0.9, "rollout_correction": "token-mask", "temperature": 0.8},
            "coefficient": 0.8,
        },
    },
}
"""Terms at two temperatures, with importance weights that are bounded in every way."""
LAYOUTS = [
    (case(4, num_layers=2, cp=2), PACKED),
    (case(8, num_layers=2, pp=2), PACKED),
    # log-probabilities are the plain loss's; what is reported goes over dp and cp alike
    at_night(case(2, num_layers=2, dp=2), {}),
    at_night(case(4, num_layers=2, dp=4), PACKED),  # some ranks have no sequence
    at_night(case(8, num_layers=2, tp=2, sp=True), {}),
    at_night(case(8, num_layers=2, tp=2, cp=2), {}),
]


@cache
def rollouts(one_advantage: bool) -> GlobalBatch:
    """Draws prompts with answers of ragged lengths, four without a loss token, and two with only one.

    Two groups have nothing to win; other policies' log-probabilities are near the model's own, and absurd where
    masked."""
    rng = np.random.default_rng(21)
    plain = [_rollout(rng, length, slot) for slot, length in enumerate(LENGTHS)]
    config = case(num_layers=2).config()
    losses = token_losses_of(doubles(initial_parameters(config)), config.model, plain)
    return [_with_extras(rng, *each, slot, one_advantage) for slot, each in enumerate(zip(plain, losses, strict=True))]


def _rollout(rng: np.random.Generator, length: int, slot: int) -> Sample:
    ids, mask = rng.integers(1, VOCAB, length + 1), np.zeros(length)
    if slot == 6:
        mask[11] = 1.0
    elif slot % 5 != 4:
        mask[length // 4 :] = 1.0
    return Sample(ids[:-1], ids[1:], mask, (1.0, 0.25, 2.5)[slot % 3])


def _with_extras(rng: np.random.Generator, sample: Sample, losses: Tensor, slot: int, one_advantage: bool) -> Sample:
    own = -losses.numpy()
    advantages = np.full(sample.width, rng.normal(0.7)) if one_advantage else rng.normal(0.7, 1, sample.width)
    if slot in (5, 9):
        advantages[:] = 0.0
    old = own + rng.normal(0, 0.3, len(own))
    extras = {"old_logprobs": old, "rollout_logprobs": old + rng.normal(0, 0.2, len(own)), "ref_logprobs": own + 0.4}
    masked = {name: np.where(sample.mask > 0, each, -200.0) for name, each in extras.items()}
    masked["ref_logprobs"] = np.where(sample.mask > 0, masked["ref_logprobs"], 200.0)
    given: dict[str, NDArray[Any]] = {name: _positions(each) for name, each in masked.items()}
    return replace(sample, extras={**given, "advantages": advantages.astype(np.float32)})


def _positions(values: NDArray[Any]) -> NDArray[np.float32]:
    return values.astype(np.float32) if len(values) else np.zeros(1, np.float32)


RUNS = [(EVERYTHING_WHOLE, True), (BY_TOKEN, False), (AGGREGATED, False), (SAMPLED_ELSEWHERE, True)]


@pytest.mark.parametrize(("case", "layout"), LAYOUTS, ids=lambda each: str(each) if isinstance(each, Case) else "")
def test_every_policy_loss_is_its_formula(pool: Pool, case: Case, layout: dict[str, Any]) -> None:
    """Compares numerator and denominator of each term, every gradient of their weighted sum, the updated weights, and
    the diagnostics."""
    configs = [case.config(**layout, **changes) for changes, _ in RUNS]
    runs = [
        Run(config, initial_parameters(config), [rollouts(one_advantage)])
        for config, (_, one_advantage) in zip(configs, RUNS, strict=True)
    ]
    found: list[list[Outcome]] = pool.run(train_each, case.resolved(configs[0]), runs)
    for number, (run, outcome) in enumerate(zip(runs, found[0], strict=True)):
        reports = [rank[number].steps[0]._replace(gradients=None) for rank in found]
        assert all(each == reports[0] for each in reports)
        plain = case.config(**RUNS[number][0])
        exact = run_oracle(plain, list(run.batches))
        deviation(outcome, exact, plain).assert_below()
        for term, total in outcome.steps[0].terms.items():
            assert relative(total.mean, exact[0].means[term]) < 1e-5, term
        assert_reported(outcome.steps[0].diagnostics, plain.loss, run.batches[0])


def assert_reported(found: Any, loss: LossSection, batch: GlobalBatch) -> None:
    """Checks clip fraction, approximate KL, mean and largest ratio of all loss tokens, each counted once."""
    config = case(num_layers=2).config()
    parameters = doubles(initial_parameters(config))
    wanted: dict[str, float] = {}
    for name, term in {"main": loss, **loss.side_terms}.items():
        if term.function not in ("ppo", "gspo", "cispo"):
            continue
        ratios, clipped = [], 0
        losses = token_losses_of(parameters, config.model, batch, term.options.get("temperature", 1.0))
        for each, own in zip(batch, losses, strict=True):
            kept = each.mask > 0
            extras = {name: torch.from_numpy(values).double()[: len(kept)] for name, values in each.extras.items()}
            gaps = (-own - extras["old_logprobs"])[kept]
            if term.function == "gspo" and len(gaps):
                gaps = gaps.mean().expand(len(gaps))
            ratios += gaps.exp().tolist()
            for ratio, advantage in zip(gaps.exp().tolist(), extras["advantages"][kept].tolist(), strict=True):
                clipped += _is_clipped(ratio, advantage, term.function, **term.options)
        prefix = "" if name == "main" else f"{name}/"
        wanted |= {
            f"{prefix}clip_fraction": clipped / len(ratios),
            f"{prefix}approximate_kl": sum(r - 1 - math.log(r) for r in ratios) / len(ratios),
            f"{prefix}ratio": sum(ratios) / len(ratios),
            f"{prefix}ratio_max": max(ratios),
        }
    assert found == pytest.approx(wanted, rel=2e-5)
    assert 0.05 < found["clip_fraction"] < 0.95


def _is_clipped(
    ratio: float,
    advantage: float,
    function: str,
    clip_low: float | None = None,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    **of_weights: Any,
) -> bool:
    if function == "cispo":
        return ratio > 1 + clip_high or (clip_low is not None and ratio < 1 - clip_low)
    low = 0.2 if clip_low is None else clip_low
    if advantage > 0:
        return ratio > 1 + clip_high
    return advantage < 0 and (ratio < 1 - low or (dual_clip is not None and ratio > dual_clip))


@pytest.mark.nightly  # it shows faults of others; ours: above
def test_the_faults_of_verl_change_the_policy(pool: Pool) -> None:
    """Tests pull requests 906 and 4510, on the same rollouts and ranks for which our gradient is right."""
    one, batch = case(2, num_layers=2, dp=2), [replace(each, weight=1.0) for each in rollouts(False)]
    mean: dict[str, Any] = {}
    sequences = {"loss__aggregation": "seq-mean-token-mean"}
    formulas = {
        "policy_mean_of_means": mean,
        "policy_weighted_by_samples": mean,
        "policy_sequences_times_ranks": sequences,
    }
    measured = {"loss__denominator": "measured"}
    configs = [
        *(one.config(loss__function=f"tests.parity.naive:{each}", **measured, **formulas[each]) for each in formulas),
        *(one.config(loss__function="ppo", **each) for each in (mean, sequences)),
    ]
    runs = [Run(config, initial_parameters(config), [batch]) for config in configs]
    *naive, by_tokens, by_sequences = pool.run(train_each_naively, one.resolved(configs[0]), runs)[0]
    for found, config in ((by_tokens, configs[3]), (by_sequences, configs[4])):
        deviation(found, run_oracle(config, [batch]), config).assert_below()
    for found, config, exact in zip(naive, configs, [configs[3], configs[3], configs[4]], strict=False):
        gradients = without_padding(found.steps[0].gradients, config.model.vocab_size)
        assert distance(gradients, oracle_gradients(run_oracle(exact, [batch])[0])) > 0.1, config.loss.function
