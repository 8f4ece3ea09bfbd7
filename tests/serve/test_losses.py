"""Losses of the service on one token, where their gradients are known without a model."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from mtrain.loss.pair import Extras
from mtrain.serve.losses import Batch
from mtrain.serve.protocol import SentDatum
from tests.loss.microbatches import VOCAB, term_inputs


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
