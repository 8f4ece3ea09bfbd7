"""The oracle's aggregations match results by hand, its gradients finite differences, its optimizer torch's."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from mtrain.config.schema.loss import LossSection, SideTermSection, TermSection
from mtrain.config.schema.model import ModelSection
from mtrain.config.schema.train import AdamWSection
from mtrain.data.samples.sample import Sample
from tests.oracle.loss import Sequence, aggregate, objective, term_values
from tests.oracle.model import logits_of, random_parameters
from tests.oracle.run import oracle_steps

MODEL = ModelSection(
    num_layers=2, hidden_size=16, ffn_hidden_size=24, num_attention_heads=4, num_query_groups=2, vocab_size=23
)
LOSS = LossSection(
    aggregation="seq-mean-token-mean",
    side_terms={"z": SideTermSection(function="z_loss", coefficient=0.1)},
)


def sequence(weights: list[float], sample_weight: float = 1.0, seed: int = 0) -> Sequence:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(MODEL.vocab_size, (len(weights) + 1,), generator=generator)
    return Sequence(tokens[:-1], tokens[1:], torch.tensor(weights, dtype=torch.float64), sample_weight)


def random_batch(seed: int, sizes: tuple[int, ...] = (5, 9, 3, 9)) -> list[Sequence]:
    generator = torch.Generator().manual_seed(seed)
    return [
        sequence((torch.rand(size, generator=generator) > 0.4).double().tolist(), 1.0 + i, seed=seed + i)
        for i, size in enumerate(sizes)
    ]


@pytest.mark.parametrize(
    ("term", "numerator", "denominator"),
    [
        (TermSection(aggregation="token-mean"), 2 * 7.0 + 3 * 3.0, 2 * 2.0 + 3 * 1.0),
        (TermSection(aggregation="seq-mean-token-sum"), 2 * 7.0 + 3 * 3.0, 5.0),
        (TermSection(aggregation="seq-mean-token-sum", empty_sequences="include"), 23.0, 10.0),
        (TermSection(aggregation="seq-mean-token-mean"), 2 * 3.5 + 3 * 3.0, 5.0),
        (TermSection(aggregation="seq-mean-token-mean", empty_sequences="include"), 16.0, 10.0),
        (TermSection(aggregation="seq-mean-token-sum-norm", norm_length=8), 23.0 / 8, 5.0),
        (TermSection(aggregation="token-sum-norm", norm_length=8), 23.0 / 8, 1.0),
        (
            TermSection(aggregation="seq-mean-token-sqrt"),
            2 * 7.0 / math.sqrt(2) + 3 * 3.0,
            2 * math.sqrt(2) + 3.0,
        ),
        (
            TermSection(aggregation="seq-mean-token-power", length_power=0.25),
            2 * 7.0 / 2**0.25 + 3 * 3.0,
            2 * 2**0.75 + 3.0,
        ),
        (TermSection(aggregation="sum"), 23.0, 1.0),
    ],
)
def test_aggregations_by_hand(term: TermSection, numerator: float, denominator: float) -> None:
    """The batch: two tokens of losses 5 and 2 (v=2), one of loss 3 (v=3), and a sequence without loss tokens (v=5)."""
    batch = [sequence([1, 0, 1], 2.0), sequence([0, 1], 3.0), sequence([0, 0, 0], 5.0)]
    losses = [torch.tensor([5.0, 9.0, 2.0]), torch.tensor([9.0, 3.0]), torch.tensor([9.0, 9.0, 9.0])]
    value = aggregate([loss.double() for loss in losses], batch, term)
    assert value.numerator.item() == pytest.approx(numerator, rel=1e-15)
    assert value.denominator == pytest.approx(denominator, rel=1e-15)


def test_documents_of_a_sequence_do_not_see_each_other() -> None:
    parameters = random_parameters(MODEL, seed=1)
    whole = sequence([1.0] * 9)
    cut = Sequence(whole.tokens, whole.labels, whole.weights, document_starts=(0, 2, 6))
    parts = [
        Sequence(whole.tokens[start:end], whole.labels[start:end], whole.weights[start:end])
        for start, end in ((0, 2), (2, 6), (6, 9))
    ]
    loss = LossSection(aggregation="sum")
    together = term_values(parameters, MODEL, loss, [cut])["main"].mean
    torch.testing.assert_close(together, term_values(parameters, MODEL, loss, parts)["main"].mean)
    assert abs(together - term_values(parameters, MODEL, loss, [whole])["main"].mean) > 1e-3


def test_gradients_are_finite_differences_of_the_objective() -> None:
    parameters, batch = random_parameters(MODEL, seed=1, padded_vocab_size=32), random_batch(seed=2)
    (result,) = oracle_steps(parameters, MODEL, LOSS, AdamWSection(lr=0.1), [0.1], [batch])
    generator = torch.Generator().manual_seed(3)
    direction = {
        name: torch.randn(value.shape, dtype=torch.float64, generator=generator) for name, value in parameters.items()
    }
    slope = sum((result.gradients[name] * direction[name]).sum().item() for name in parameters)

    def moved(step: float) -> float:
        elsewhere = {name: value + step * direction[name] for name, value in parameters.items()}
        return objective(term_values(elsewhere, MODEL, LOSS, batch), LOSS).item()

    assert slope == pytest.approx((moved(1e-5) - moved(-1e-5)) / 2e-5, rel=1e-6)
    assert result.gradients["output_layer.weight"][MODEL.vocab_size :].count_nonzero() == 0


def test_a_sample_loses_its_padding() -> None:
    sample = Sample(
        tokens=np.array([5, 6, 7, 8, 0, 0]),
        labels=np.array([6, 7, 8, 2, 0, 0]),
        mask=np.array([0, 1, 0, 0.5, 0, 0]),
        weight=3.0,
        document_starts=np.array([0, 0, 2, 2, 4, 4], dtype=np.int32),
    )
    sequence = Sequence.of_sample(sample)
    assert sequence.tokens.tolist() == [5, 6, 7, 8]
    assert sequence.labels.tolist() == [6, 7, 8, 2]
    assert sequence.weights.tolist() == [0, 1, 0, 0.5]
    assert (sequence.sample_weight, sequence.document_starts) == (3.0, (0, 2))
    masked = Sequence.of_sample(replace(sample, mask=np.zeros(6)))
    assert (masked.weights.tolist(), masked.document_starts) == ([0], (0,))


@pytest.mark.parametrize("clip_grad", [0.0, 0.05, 1e6])
def test_steps_are_those_of_torch_adamw(clip_grad: float) -> None:
    section = AdamWSection(lr=1.0, weight_decay=0.3, beta1=0.8, beta2=0.9, epsilon=1e-6, clip_grad=clip_grad)
    model = MODEL.model_copy(update={"qkv_bias": True, "tied_embeddings": True})
    parameters, rates = random_parameters(model, seed=1), [0.01, 0.02, 0.005]
    batches = [random_batch(seed) for seed in (4, 5, 6)]
    results = oracle_steps(parameters, model, LOSS, section, rates, batches)

    leaves = {name: value.clone().requires_grad_() for name, value in parameters.items()}
    plain = [value for name, value in leaves.items() if value.ndim == 1]
    matrices = [value for name, value in leaves.items() if value.ndim == 2]
    theirs = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.3}, {"params": plain, "weight_decay": 0.0}], betas=(0.8, 0.9), eps=1e-6
    )
    for lr, batch, result in zip(rates, batches, results, strict=True):
        for group in theirs.param_groups:
            group["lr"] = lr
        theirs.zero_grad()
        objective(term_values(leaves, model, LOSS, batch), LOSS).backward()
        gradients = [value.grad for value in leaves.values() if value.grad is not None]
        assert len(gradients) == len(leaves)
        norm = torch.nn.utils.get_total_norm(gradients).item()
        if 0 < clip_grad < norm:  # without the 1e-6 that torch's clipping adds to the norm
            torch._foreach_mul_(gradients, clip_grad / norm)
        theirs.step()
        assert result.grad_norm == pytest.approx(norm, rel=1e-12)
        expected = {name: value.detach() for name, value in leaves.items()}
        torch.testing.assert_close(result.parameters, expected, rtol=1e-9, atol=1e-12)


def test_an_empty_batch_changes_nothing() -> None:
    parameters = random_parameters(MODEL, seed=1)
    empty = [sequence([0.0, 0.0, 0.0]), sequence([0.0] * 5)]
    batches = [random_batch(4), empty, random_batch(5)]
    with_empty = oracle_steps(parameters, MODEL, LOSS, AdamWSection(lr=1.0), [0.1, 0.2, 0.3], batches)
    without = oracle_steps(parameters, MODEL, LOSS, AdamWSection(lr=1.0), [0.1, 0.3], [batches[0], batches[2]])
    assert (with_empty[1].loss, with_empty[1].grad_norm, with_empty[1].denominators["main"]) == (0.0, 0.0, 0.0)
    assert with_empty[1].parameters is with_empty[0].parameters
    torch.testing.assert_close(with_empty[2].parameters, without[1].parameters, rtol=0, atol=0)


def test_parameters_of_another_model_are_refused() -> None:
    parameters = random_parameters(MODEL, seed=1)
    with pytest.raises(AssertionError, match=r"linear_qkv\.bias"):
        logits_of(parameters, MODEL.model_copy(update={"qkv_bias": True}), torch.zeros(1, 3, dtype=torch.int64))
