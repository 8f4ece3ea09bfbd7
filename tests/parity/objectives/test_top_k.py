"""Distillation from a teacher's cached log-probabilities: equal to the sum over the whole vocabulary, on every
layout."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from mtrain.core.batch.sample import Sample
from mtrain.verify.reference.objective import Scene
from tests.parity.batches import VOCAB, GlobalBatch
from tests.parity.cases import Case, case
from tests.parity.compare import at_night, deviation, initial_parameters, relative, run_oracle
from tests.parity.ranks import Outcome, Run, train_each
from tests.pool import Pool
from tests.reference import USER_TERMS

K = 5
LENGTHS = [32, 3, 1, 0, 7, 12, 20, 5, 9, 31, 2, 16, 4, 11, 6, 8]
"""Number of positions of each sequence: one fills a row, one has no text."""
PACKED: dict[str, Any] = {"data__isolate_documents": True, "data__packing": {}}
WITH_OTHERS: dict[str, Any] = {
    "loss__function": "topk_distillation",
    "loss__options": {"k": K},
    "loss__aggregation": "seq-mean-token-mean",
    "loss__side_terms": {
        "renormalised": {"function": "topk_distillation", "options": {"k": 3, "remainder": "drop"}, "coefficient": 0.6},
        "text": {"coefficient": 0.3},
    },
}
"""Configuration with whole logits, whose exponentials other terms need before or afterwards."""
IN_CHUNKS: dict[str, Any] = {
    "loss__function": "topk_distillation",
    "loss__options": {"k": K},
    "loss__chunk_tokens": 7,
}
LAYOUTS = [
    (case(8, num_layers=1, tp=2, sp=True), {}),
    (case(4, num_layers=1, cp=2), PACKED),
    # the given values are next to their token, as weights are, and follow it everywhere
    at_night(case(2, num_layers=1, dp=2), PACKED),
    at_night(case(4, num_layers=1, tp=2), PACKED),
    at_night(case(8, num_layers=2, pp=2), {}),
    at_night(case(8, num_layers=1, tp=2, cp=2), {}),
]


def _divergence(scene: Scene, k: int, remainder: str = "bucket") -> Tensor:
    """Computes KL from k given probabilities and, as one more outcome, the rest, token by token."""
    losses = []
    for row, place in scene.weights.nonzero().tolist():
        log_probs = scene.logits[row, place].log_softmax(-1)
        ids = [int(scene.extras[f"topk_ids[{number}]"][row, place]) for number in range(k)]
        teacher = torch.stack([scene.extras[f"topk_logprobs[{number}]"][row, place] for number in range(k)]).exp()
        others = [each for each in range(len(log_probs)) if each not in ids]
        model = log_probs[ids]
        if remainder == "bucket":
            teacher = torch.cat([teacher, 1 - teacher.sum()[None]])
            model = torch.cat([model, log_probs[others].logsumexp(0)[None]])
        target = torch.distributions.Categorical(probs=teacher).probs
        losses.append(scene.weights[row, place] * (target * (target.log() - model)).sum())
    return torch.stack([scene.logits.sum() * 0.0, *losses]).sum()


USER_TERMS["topk_distillation"] = _divergence


@cache
def cached() -> GlobalBatch:
    """Draws ragged answers, some of one token or none; the cached tokens have most of the probability, or little."""
    rng = np.random.default_rng(5)
    return [_sequence(rng, length, slot) for slot, length in enumerate(LENGTHS)]


def _sequence(rng: np.random.Generator, length: int, slot: int) -> Sample:
    ids, mask = rng.integers(1, VOCAB, length + 1), np.zeros(length)
    if slot == 6:
        mask[11] = 1.0
    elif slot % 5 != 4:
        mask[length // 4 :] = 1.0
    width = max(1, length)
    tokens = np.stack([rng.permutation(VOCAB)[:K] for _ in range(width)])
    logits = rng.normal(0, 2, (width, VOCAB))
    given = np.log(np.exp(logits) / np.exp(logits).sum(1, keepdims=True))[:, :K]
    # masked positions must not matter, so their probabilities add up to more than 1
    given[:length][mask == 0], tokens[:length][mask == 0] = 0.0, 0
    columns = {f"topk_ids[{j}]": tokens[:, j] for j in range(K)} | {
        f"topk_logprobs[{j}]": given[:, j] for j in range(K)
    }
    sample = Sample(ids[:-1], ids[1:], mask, (1.0, 0.25, 2.5)[slot % 3])
    return replace(sample, extras={name: each.astype(np.float32) for name, each in columns.items()})


@pytest.mark.parametrize(("case", "layout"), LAYOUTS, ids=lambda each: str(each) if isinstance(each, Case) else "")
def test_the_divergence_is_written_out_over_the_vocabulary(pool: Pool, case: Case, layout: dict[str, Any]) -> None:
    """Compares each term, every gradient, and the updated weights; a second step without loss tokens changes
    nothing."""
    masked = [replace(each, mask=np.zeros_like(each.mask)) for each in cached()]
    configs = [case.config(**layout, **changes) for changes in (WITH_OTHERS, IN_CHUNKS)]
    runs = [Run(configs[0], initial_parameters(configs[0]), [cached()])]
    runs += [Run(configs[1], initial_parameters(configs[1]), [cached(), masked])]
    found: list[list[Outcome]] = pool.run(train_each, case.resolved(configs[0]), runs)
    for run, outcome, changes in zip(runs, found[0], (WITH_OTHERS, IN_CHUNKS), strict=True):
        plain = case.config(**changes)
        exact = run_oracle(plain, list(run.batches))
        deviation(outcome, exact, plain).assert_below()
        for term, total in outcome.steps[0].terms.items():
            assert relative(total.mean, exact[0].means[term]) < 1e-5, term
            assert total.mean > 0.1
    assert found[0][1].steps[1].loss == 0
    assert found[0][1].steps[1].grad_norm == 0
