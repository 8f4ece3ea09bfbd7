"""Losses of the service without HTTP: one token, whose gradient is known without a model, and several targets."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from mtrain.core.loss.pair import Extras
from mtrain.serve.losses import Batch
from mtrain.serve.protocol import SentDatum
from tests.core.loss.microbatches import VOCAB, term_inputs
from tests.parity.cases import case
from tests.parity.compare import relative
from tests.pool import Pool
from tests.serve import service_ranks
from tests.serve.oracle import Oracle
from tests.serve.service import sequences
from tests.training.test_engine import parameters_of


@pytest.mark.parametrize("advantage", [1.5, -0.5])
def test_a_ratio_at_a_bound_has_its_whole_gradient(advantage: float) -> None:
    """Tinker's own clamp has the gradient of the ratio at its bounds, where the first update on new tokens can be."""
    sent = SentDatum(
        np.array([1], np.int32), {"target_tokens": np.array([2]), "advantages": np.array([advantage], np.float32)}
    )
    gradients = []
    for low, high in ((0.5, 2.0), (1.0, 2.0), (0.5, 1.0), (1.0, 1.0)):
        inputs = term_inputs(torch.ones(1, 1))
        own = -inputs.logits.cross_entropy(torch.tensor([[2]])).detach()
        sent.inputs["logprobs"] = own[0].numpy()
        bounds = {"clip_low_threshold": low, "clip_high_threshold": high}
        batch = Batch.of([sent], "ppo", bounds, VOCAB)
        extras = {name: torch.from_numpy(values)[None] for name, values in batch.data[0].extras.items()}
        pair = batch.function(replace(inputs, extras=Extras(extras)))
        gradients.append(torch.autograd.grad(pair.numerator, inputs.logits.local)[0])
    assert gradients[0].any()
    assert all(torch.equal(each, gradients[0]) for each in gradients)


@pytest.mark.parametrize("width", [1, 3])
def test_several_targets_of_a_token_are_weighed_by_themselves(pool: Pool, tmp_path: Path, width: int) -> None:
    rng, one = np.random.default_rng(width), case(2, num_layers=1, cp=2)
    config = one.config(loss__aggregation="sum")
    size = config.model.vocab_size
    tokens = sequences(4, (5, 1, 31), size)
    targets = [rng.integers(0, size, (len(each) - 1, width)) for each in tokens]
    weights = [rng.normal(size=each.shape).astype(np.float32) for each in targets]
    sent = [
        SentDatum(np.array(each[:-1], np.int32), {"target_tokens": wanted, "weights": given})
        for each, wanted, given in zip(tokens, targets, weights, strict=True)
    ]
    found = pool.run(service_ranks.step_of, one.resolved(config), config, sent, "cross_entropy", str(tmp_path))[0]
    oracle = Oracle(config, parameters_of(tmp_path / "checkpoints" / "step_00000000"))
    exact = [
        each.gather(-1, torch.from_numpy(wanted))
        for each, wanted in zip(oracle.distributions(tokens), targets, strict=True)
    ]
    for ours, theirs in zip(found.log_probs, exact, strict=True):
        np.testing.assert_allclose(ours, theirs.detach().numpy(), rtol=0, atol=1e-5)
    loss = -torch.stack([(each * torch.from_numpy(by)).sum() for each, by in zip(exact, weights, strict=True)]).sum()
    loss.backward()
    norm = torch.stack([each.grad.norm() for each in oracle.parameters.values() if each.grad is not None]).norm()
    assert relative(found.loss, float(loss.detach())) < 1e-5
    assert relative(found.grad_norm, float(norm)) < 1e-5
