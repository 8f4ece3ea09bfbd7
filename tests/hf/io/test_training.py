"""Losses of steps in transformers, against float64 of all logits at once."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from mtrain.config.schema.train import AdamWSection
from mtrain.hf.io.training import StepInput, TrainingRows, transformers_logits, transformers_steps
from tests.hf.folders import save

DENOMINATOR = 70.5


def test_experts_may_have_rows_of_any_size(tmp_path: Path) -> None:
    """Grouped products of torch need rows of whole 16 bytes."""
    model = save("qwen3-moe", tmp_path, moe_intermediate_size=21)
    model.set_experts_implementation("eager")
    tokens = torch.arange(24)[None]
    with torch.no_grad():
        assert torch.equal(transformers_logits(tmp_path, tokens), model.float()(tokens).logits)


class Logits(torch.nn.Module):
    """A model whose only parameters are its logits."""

    def __init__(self, logits: Tensor) -> None:
        super().__init__()
        self.table = torch.nn.Parameter(logits)

    def forward(self, tokens: Tensor, **ignored: Any) -> Any:
        return SimpleNamespace(logits=self.table.expand(len(tokens), -1, -1))


@pytest.mark.parametrize(
    ("vocab_size", "num_tokens"),
    [pytest.param(152_064, 120, marks=pytest.mark.nightly), (97, 40)],  # parts spare memory
    ids=["in parts", "at once"],
)
def test_losses_are_those_of_float64(vocab_size: int, num_tokens: int) -> None:
    """Tokens are likely and the vocabulary large: most of a float32 sum over it is lost next to the largest term."""
    torch.manual_seed(0)
    labels = torch.randint(vocab_size, (1, num_tokens))
    logits = torch.randn(num_tokens, vocab_size)
    logits.scatter_(1, labels.T, logits.exp().sum(1, keepdim=True).log() + 1.5)
    weights = torch.rand(1, num_tokens) * (torch.arange(num_tokens) % 3 > 0)
    logits[0, 0] = torch.inf  # masked: its loss does not count
    exact = logits.double().requires_grad_()
    kept = weights[0] > 0
    losses = torch.nn.functional.cross_entropy(exact[kept], labels[0, kept], reduction="none")
    numerator = (losses * weights[0, kept].double()).sum()
    (gradient,) = torch.autograd.grad(numerator / DENOMINATOR, exact)
    assert 0.05 < losses.mean() < 0.5

    model = Logits(logits)
    rows = TrainingRows(labels, labels, weights)
    (found,) = transformers_steps(model, AdamWSection(lr=1.0, clip_grad=0.0), [StepInput([rows], DENOMINATOR, 0.0)])
    assert found.numerator == pytest.approx(numerator.item(), rel=1e-13)
    assert model.table.grad is not None
    torch.testing.assert_close(model.table.grad, gradient.float(), rtol=1e-6, atol=0)
    assert found.grad_norm == pytest.approx(gradient.norm().item(), rel=1e-7)
