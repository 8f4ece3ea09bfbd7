"""Losses of a split vocabulary equal those of torch on the whole one, and cost what the docstrings say."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from mtrain.arch.layout import Layout
from mtrain.core.loss.vocab_parallel.logits import VocabParallelLogits
from mtrain.core.ranks.groups import Groups
from tests.core.loss.vocab_parallel.counting import counted_all_reduces
from tests.pool import Pool

SEQ, BATCH, VOCAB, PADDED = 6, 3, 10, 16
"""Sizes with which, at tp=4, a shard has 4 columns: the third holds two real ones, the fourth none."""


def random_logits(seed: int = 3, dtype: torch.dtype = torch.float64) -> Tensor:
    """Draws [seq, batch, padded]; the padding holds values that must never be used."""
    generator = torch.Generator().manual_seed(seed)
    logits = 5 * torch.randn(SEQ, BATCH, PADDED, dtype=torch.float64, generator=generator)
    logits[..., VOCAB:] = torch.tensor([float("inf"), float("nan"), 1e30, -1e30, 0.0, 50.0])
    return logits.to(dtype)


def random_labels(seed: int = 4) -> Tensor:
    """Draws labels, [batch, seq]."""
    return torch.randint(VOCAB, (BATCH, SEQ), generator=torch.Generator().manual_seed(seed))


def factors(seed: int) -> Tensor:
    """Draws [batch, seq] float64 factors of the losses before backward."""
    return torch.randn(BATCH, SEQ, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def mixed(cross_entropy: Tensor, logsumexp: Tensor) -> Tensor:
    """Returns a scalar through which both losses are back-propagated at once."""
    return (cross_entropy * factors(5)).sum() + (logsumexp.square() * factors(6)).sum()


def expected(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Computes cross entropy, log-sum-exp and the gradient of `mixed`, by torch on the real columns in float64."""
    leaf = logits.double().requires_grad_()
    real = leaf[..., :VOCAB].permute(1, 2, 0)
    entropy, logsumexp = F.cross_entropy(real, labels, reduction="none"), real.logsumexp(1)
    (gradient,) = torch.autograd.grad(mixed(entropy, logsumexp), leaf)
    return entropy.detach(), logsumexp.detach(), gradient


def alone(logits: Tensor) -> VocabParallelLogits:
    """Builds logits with all columns on this process."""
    return VocabParallelLogits(logits, None, 0, VOCAB)


def shard(groups: Groups, logits: Tensor) -> VocabParallelLogits:
    """Builds logits with this rank's columns."""
    local = logits.chunk(groups.layout.tp, dim=-1)[groups.tp_rank].clone().requires_grad_()
    return VocabParallelLogits(local, groups.tp, groups.tp_rank * local.shape[-1], VOCAB)


def losses_of_a_shard(groups: Groups, logits: Tensor, labels: Tensor, labels_first: bool) -> tuple[Tensor, ...]:
    sharded = shard(groups, logits)
    if labels_first:
        entropy, logsumexp = sharded.cross_entropy(labels), sharded.logsumexp()
    else:
        logsumexp, entropy = sharded.logsumexp(), sharded.cross_entropy(labels)
    (gradient,) = torch.autograd.grad(mixed(entropy, logsumexp), sharded.local)
    return entropy.detach(), logsumexp.detach(), gradient


@pytest.mark.parametrize("labels_first", [True, False])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_losses_and_gradients_are_those_of_the_whole_vocabulary(pool: Pool, tp: int, labels_first: bool) -> None:
    logits, labels = random_logits(), random_labels()
    entropy, logsumexp, gradient = expected(logits, labels)
    results = pool.run(losses_of_a_shard, Layout(tp=tp), logits, labels, labels_first)
    for rank_entropy, rank_logsumexp, _ in results:
        torch.testing.assert_close(rank_entropy, entropy, rtol=1e-13, atol=1e-13)
        torch.testing.assert_close(rank_logsumexp, logsumexp, rtol=1e-13, atol=1e-13)
    gathered = torch.cat([result[2] for result in results], dim=-1)
    torch.testing.assert_close(gathered, gradient, rtol=1e-12, atol=1e-13)
    assert gathered[..., VOCAB:].count_nonzero() == 0


def losses_of_two_labelings(groups: Groups, logits: Tensor, labels: Tensor, others: Tensor) -> tuple[Tensor, Tensor]:
    sharded = shard(groups, logits)
    sharded.cross_entropy(labels)
    entropy = sharded.cross_entropy(others)
    (gradient,) = torch.autograd.grad(mixed(entropy, sharded.logsumexp()), sharded.local)
    return entropy.detach(), gradient


def test_other_labels_of_the_same_logits_get_their_own_losses(pool: Pool) -> None:
    logits, others = random_logits(), random_labels(seed=9)
    entropy, _, gradient = expected(logits, others)
    results = pool.run(losses_of_two_labelings, Layout(tp=2), logits, random_labels(), others)
    torch.testing.assert_close(results[0][0], entropy, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(torch.cat([result[1] for result in results], dim=-1), gradient, rtol=1e-12, atol=1e-13)


def all_reduces_of_each_call(groups: Groups, logits: Tensor, labels: Tensor) -> dict[str, int]:
    with counted_all_reduces() as count:
        first, second = shard(groups, logits), shard(groups, logits)
        return {
            "cross entropy": count(lambda: first.cross_entropy(labels)),
            "again": count(lambda: first.cross_entropy(labels)),
            "log-sum-exp after it": count(first.logsumexp),
            "other labels": count(lambda: first.cross_entropy(labels.clone())),
            "log-sum-exp alone": count(second.logsumexp),
            "cross entropy after it": count(lambda: second.cross_entropy(labels)),
            "backward": count(lambda: mixed(second.cross_entropy(labels), second.logsumexp()).backward()),
        }


def test_collectives_are_as_many_as_documented(pool: Pool) -> None:
    for counts in pool.run(all_reduces_of_each_call, Layout(tp=2), random_logits(), random_labels()):
        assert counts == {
            "cross entropy": 2,
            "again": 0,
            "log-sum-exp after it": 0,
            "other labels": 1,
            "log-sum-exp alone": 2,
            "cross entropy after it": 1,
            "backward": 0,
        }


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_losses_are_float32_and_gradients_have_the_dtype_of_the_logits(dtype: torch.dtype) -> None:
    logits, labels = random_logits(dtype=dtype), random_labels()
    entropy, logsumexp, gradient = expected(logits, labels)
    local = logits.clone().requires_grad_()
    split = alone(local)
    assert split.cross_entropy(labels).dtype == split.logsumexp().dtype == torch.float32
    torch.testing.assert_close(split.cross_entropy(labels).double(), entropy, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(split.logsumexp().double(), logsumexp, rtol=1e-6, atol=1e-6)
    (found,) = torch.autograd.grad(mixed(split.cross_entropy(labels), split.logsumexp()), local)
    assert found.dtype == dtype
    # rounded once, from float32: half a unit in the last place of the logits' dtype
    torch.testing.assert_close(found.double(), gradient, rtol=torch.finfo(dtype).eps / 2 + 1e-5, atol=1e-6)


def test_gradcheck() -> None:
    logits, labels = random_logits()[:2, :2, :VOCAB].requires_grad_(), random_labels()[:2, :2]

    def both(local: Tensor) -> tuple[Tensor, Tensor]:
        split = alone(local)
        return split.cross_entropy(labels), split.logsumexp()

    assert torch.autograd.gradcheck(both, logits)
    assert torch.autograd.gradcheck(lambda local: alone(local).logsumexp(), logits)


def test_large_logits_neither_overflow_nor_cancel() -> None:
    """A confident token lies at an offset of 1000: the loss is 1e-4, no more than a rounding error of the offset."""
    logits = torch.full((1, 1, VOCAB), 1000.0)
    logits[0, 0, 7] = 1011.5
    (loss,) = alone(logits).cross_entropy(torch.tensor([[7]])).flatten().tolist()
    exact = F.cross_entropy(logits[0].double(), torch.tensor([7])).item()
    assert loss == pytest.approx(exact, abs=torch.finfo(torch.float32).eps)
    assert alone(-logits * 1e30).logsumexp().item() == pytest.approx(-1e33, rel=1e-6)


@pytest.mark.parametrize("bad", [float("inf"), float("nan"), float("-inf")])
def test_a_token_that_is_not_asked_about_gets_gradient_zero_whatever_its_logits(bad: float) -> None:
    labels, spoiled = random_labels(), random_logits()
    spoiled[2, 1, :VOCAB] = bad
    spoiled.requires_grad_()
    for losses in (alone(spoiled).cross_entropy(labels), alone(spoiled).logsumexp()):
        mask = torch.ones(BATCH, SEQ, dtype=torch.bool)
        mask[1, 2] = False
        (found,) = torch.autograd.grad(torch.where(mask, losses, 0.0).sum(), spoiled)
        assert found.isfinite().all()
        assert found[2, 1].count_nonzero() == 0
        assert found[0, 0].count_nonzero() == VOCAB


def test_padding_gets_gradient_zero_even_where_the_loss_is_not_finite() -> None:
    logits = random_logits().requires_grad_()
    losses = alone(logits).logsumexp()
    (gradient,) = torch.autograd.grad(losses, logits, torch.full_like(losses, float("inf")))
    assert gradient[..., VOCAB:].count_nonzero() == 0
    assert not gradient[..., :VOCAB].isfinite().any()


def test_the_logsumexp_of_impossible_tokens_is_minus_infinity() -> None:
    logits = random_logits()
    logits[1, 2, :VOCAB] = float("-inf")
    assert alone(logits).logsumexp()[2, 1] == float("-inf")


@pytest.mark.parametrize("label", [-100, -1, VOCAB, PADDED - 1, 2**40])
def test_labels_outside_the_vocabulary_are_read_as_label_0(label: int) -> None:
    logits = random_logits().requires_grad_()
    losses = alone(logits).cross_entropy(torch.full((BATCH, SEQ), label))
    assert torch.equal(losses, alone(logits).cross_entropy(torch.zeros(BATCH, SEQ, dtype=torch.int64)))
    (gradient,) = torch.autograd.grad((losses * 0.0).sum(), logits)
    assert gradient.count_nonzero() == 0


@contextmanager
def kept_like(logits: Tensor) -> Iterator[set[tuple[int, torch.dtype]]]:
    """Collects address and dtype of the tensors of this size that autograd keeps."""
    kept = set()

    def note(tensor: Tensor) -> Tensor:
        if tensor.numel() == logits.numel():
            kept.add((tensor.data_ptr(), tensor.dtype))
        return tensor

    with saved_tensors_hooks(note, lambda tensor: tensor):
        yield kept


@pytest.mark.parametrize("labels_first", [True, False])
def test_backward_keeps_one_full_precision_copy(labels_first: bool) -> None:
    logits = random_logits(dtype=torch.bfloat16).requires_grad_()
    split = alone(logits)
    with kept_like(logits) as kept:
        calls = [lambda: split.cross_entropy(random_labels()), split.logsumexp]
        losses = [call() for call in (calls if labels_first else reversed(calls))]
    assert len(losses) == 2
    assert [dtype for _, dtype in kept] == [torch.float32]
