"""Log-probabilities, entropies and losses at the temperature of each sample are those of the oracle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mtrain import DataError, Datum
from mtrain.arch.lr import learning_rate
from mtrain.config.extras import TEMPERATURE
from mtrain.core.batch.datum import sample_of
from tests.messages import refuses
from tests.parity.batches import VOCAB
from tests.parity.cases import SINGLE, Case, case
from tests.parity.compare import at_night, relative
from tests.pool import Pool
from tests.reference import exact_steps, logits_of
from tests.training import engine_ranks
from tests.training.test_engine import parameters_of

ALL: dict[str, Any] = {
    "loss__function": "ppo",
    "loss__aggregation": "seq-mean-token-mean",
    "loss__side_terms": {
        "near": {"function": "kl", "coefficient": 0.1, "aggregation": "seq-mean-token-mean"},
        "bonus": {"function": "entropy", "coefficient": -0.5, "aggregation": "seq-mean-token-mean"},
    },
}
PACKED: dict[str, Any] = {"data__isolate_documents": True, "data__packing": {}}
LAYOUTS = [
    # a temperature divides the logits of a token, on whichever ranks they are: tests/verify/planted/test_reach.py
    at_night(case(2, num_layers=2, tp=2, pp=2), PACKED | {"loss__chunk_tokens": 5}),
    (case(2, num_layers=2, cp=2), {"loss__chunk_tokens": "whole"}),
    at_night(case(2, num_layers=2, dp=2), {}),
]
TEMPERATURES = (0.6, None, 1.4)


def rollouts() -> list[Datum]:
    rng = np.random.default_rng(6)
    data = []
    for slot in range(9):
        ids = rng.integers(1, VOCAB, 3 + 3 * slot).tolist()
        near = (-4.1 + 0.3 * rng.normal(size=len(ids))).tolist()
        extras = {"advantages": (-1.0) ** slot * (1 + slot), "old_logprobs": near, "ref_logprobs": near[::-1]}
        mask = [0.0, *[1.0] * (len(ids) - 1)]
        data.append(Datum(ids, mask, extras=extras, temperature=TEMPERATURES[slot % 3]))
    return data


@pytest.mark.parametrize(("case", "changes"), LAYOUTS, ids=lambda each: str(each) if isinstance(each, Case) else "")
def test_each_sample_has_a_temperature_of_its_own(
    pool: Pool, tmp_path: Path, case: Case, changes: dict[str, Any]
) -> None:
    """Compares loss, norm, updated weights, log-probabilities and entropies; an evaluation reads temperatures too."""
    config, data = case.config(**ALL, **changes), rollouts()
    runs = pool.run(engine_ranks.train, case.resolved(config), config, [data], 4 * 9, str(tmp_path))
    saved = [tmp_path / "checkpoints" / f"step_{step:08d}" for step in (0, 1)]
    names = ("advantages", "old_logprobs", "ref_logprobs", TEMPERATURE)
    samples = [sample_of(datum, "sample", config, names) for datum in data]
    rates = [learning_rate(step, config.optimizer, config.train.num_steps) for step in range(2)]
    exact, after = exact_steps(config, parameters_of(saved[0]), rates, [samples, samples])
    for run in runs:
        assert relative(run.steps[0].loss, exact.means["main"]) < 1e-5
        assert relative(run.steps[0].objective, exact.loss) < 1e-5
        assert relative(run.steps[0].grad_norm, exact.grad_norm) < 1e-5
        assert relative(run.evaluation.loss, after.means["main"]) < 1e-5
    found = parameters_of(saved[1])
    for name, wanted in exact.parameters.items():
        assert float((found[name] - wanted).norm() / wanted.norm()) < 1e-5, name
    for datum, log_probs, entropy in zip(data, runs[0].log_probs, runs[0].entropy, strict=True):
        ids = torch.tensor(datum.input_ids)
        logits = logits_of(exact.parameters, config.model, ids[None, :-1])[0].detach() / (datum.temperature or 1.0)
        likely = logits.log_softmax(-1)
        np.testing.assert_allclose(log_probs, likely.gather(1, ids[1:, None])[:, 0], rtol=0, atol=1e-5)
        np.testing.assert_allclose(entropy, -(likely.exp() * likely).sum(1), rtol=0, atol=1e-5)


def test_one_temperature_for_all_is_that_of_each(pool: Pool) -> None:
    """A call's temperature replaces those of the samples, to the bit; 1 is none."""
    config = SINGLE.config(**ALL)
    ((each, given, plain, one),) = pool.run(engine_ranks.forward_at, SINGLE.resolved(config), config, rollouts())
    assert all(np.array_equal(ours, theirs) for ours, theirs in zip(each, given, strict=True))
    assert all(np.array_equal(ours, theirs) for ours, theirs in zip(plain, one, strict=True))
    assert not np.array_equal(each[3], plain[3])


@pytest.mark.parametrize(
    ("change", "fact"),
    [
        ({"temperature": 0}, "sample 0: temperature is 0.0"),
        ({"temperature": -1.0}, "-1.0"),
        ({"temperature": 1e-46}, "1e-46"),  # 0 in float32, which would be taken for padding
        ({"temperature": [1.0, 2.0]}, "the shape [2]"),
        ({"extras": {"temperature": 1.0}}, "Datum.temperature"),
    ],
    ids=str,
)
def test_a_temperature_that_divides_nothing_is_refused(change: dict[str, Any], fact: str) -> None:
    with refuses(DataError, fact):
        sample_of(Datum([1, 2, 3], **change), "sample 0", SINGLE.config())
