"""Label smoothing, entropy and divergences of a split vocabulary against their formulas in float64."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from mtrain.arch.layout import Layout
from mtrain.core.loss.vocab_parallel import cross_entropy
from mtrain.core.loss.vocab_parallel.divergence import KnownProbabilities
from mtrain.core.loss.vocab_parallel.logits import VocabParallelLogits
from mtrain.core.ranks.groups import Groups
from tests.core.loss.vocab_parallel.counting import counted_all_reduces
from tests.core.loss.vocab_parallel.test_vocab_parallel import BATCH, SEQ, VOCAB, factors, random_labels, random_logits
from tests.pool import Pool

KINDS = ["smoothing", "entropy", "forward", "reverse", "forward at 2.5", "reverse at 0.5"]


def exact(kind: str, logits: Tensor, teacher: Tensor, labels: Tensor) -> Tensor:
    """Computes [batch, seq] by torch on the real columns."""
    real, other = logits[..., :VOCAB], teacher[..., :VOCAB]
    temperature = float(kind.split(" at ")[1]) if " at " in kind else 1.0
    log_p, log_q = (real / temperature).log_softmax(-1), (other / temperature).log_softmax(-1)
    match kind.split()[0]:
        case "smoothing":
            return F.cross_entropy(real.permute(1, 2, 0), labels, reduction="none", label_smoothing=0.3)
        case "entropy":
            return -(log_p.exp() * log_p).sum(-1).t()
        case "forward":
            return (log_q.exp() * (log_q - log_p)).sum(-1).t()
        case _:
            return (log_p.exp() * (log_p - log_q)).sum(-1).t()


def found(kind: str, logits: VocabParallelLogits, teacher: VocabParallelLogits, labels: Tensor) -> Tensor:
    temperature = float(kind.split(" at ")[1]) if " at " in kind else 1.0
    match kind.split()[0]:
        case "smoothing":
            return logits.cross_entropy(labels, 0.3)
        case "entropy":
            return logits.entropy()
        case "forward":
            return logits.kl_divergence(teacher, temperature)
        case _:
            return logits.reverse_kl_divergence(teacher, temperature)


def alone(logits: Tensor) -> VocabParallelLogits:
    """Builds logits with all columns on this process."""
    return VocabParallelLogits(logits, None, 0, VOCAB)


def shard(groups: Groups, logits: Tensor) -> VocabParallelLogits:
    """Builds logits with this rank's columns."""
    local = logits.chunk(groups.layout.tp, dim=-1)[groups.tp_rank].clone().requires_grad_()
    return VocabParallelLogits(local, groups.tp, groups.tp_rank * local.shape[-1], VOCAB)


def of_a_shard(groups: Groups, logits: Tensor, teacher: Tensor, labels: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """Returns for each kind the token losses and their gradient; "all" is every kind and the z-loss in one backward."""
    results = {}
    for kind in KINDS:
        student = shard(groups, logits)
        losses = found(kind, student, shard(groups, teacher), labels)
        (gradient,) = torch.autograd.grad((losses * factors(5)).sum(), student.local)
        results[kind] = (losses.detach(), gradient)
    student, other = shard(groups, logits), shard(groups, teacher)
    losses = sum(found(kind, student, other, labels) for kind in KINDS) + student.logsumexp().square()
    (gradient,) = torch.autograd.grad((losses * factors(5)).sum(), student.local)
    (none,) = torch.autograd.grad(losses.sum(), other.local, allow_unused=True, materialize_grads=False)
    assert none is None
    return results | {"all": (losses.detach(), gradient)}


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_losses_and_gradients_are_those_of_the_formulas(pool: Pool, tp: int) -> None:
    logits, teacher, labels = random_logits(3), random_logits(8), random_labels()
    leaf = logits.clone().requires_grad_()
    expected = {kind: exact(kind, leaf, teacher, labels) for kind in KINDS}
    expected["all"] = sum(expected.values()) + leaf[..., :VOCAB].logsumexp(-1).t().square()
    ranks = pool.run(of_a_shard, Layout(tp=tp), logits, teacher, labels)
    for kind, losses in expected.items():
        (gradient,) = torch.autograd.grad((losses * factors(5)).sum(), leaf, retain_graph=True)
        for results in ranks:
            torch.testing.assert_close(results[kind][0], losses.detach(), rtol=1e-12, atol=1e-12)
        gathered = torch.cat([results[kind][1] for results in ranks], dim=-1)
        torch.testing.assert_close(gathered, gradient, rtol=1e-11, atol=1e-12)
        assert gathered[..., VOCAB:].count_nonzero() == 0


def all_reduces_of_each_call(groups: Groups, logits: Tensor, other: Tensor, labels: Tensor) -> dict[str, int]:
    with counted_all_reduces() as count:
        first, second, third = (shard(groups, logits) for _ in range(3))
        teacher = shard(groups, other)
        counts = {
            "smoothed cross entropy": count(lambda: first.cross_entropy(labels, 0.1)),
            "log-sum-exp after it": count(first.logsumexp),
            "entropy after it": count(first.entropy),
            "divergence after it": count(lambda: first.kl_divergence(teacher)),
            "another temperature": count(lambda: first.kl_divergence(teacher, 2.0)),
            "entropy alone": count(second.entropy),
            "entropy again": count(second.entropy),
            "cross entropy after it": count(lambda: second.cross_entropy(labels)),
            "divergence alone": count(lambda: third.reverse_kl_divergence(shard(groups, other))),
        }
        losses = first.entropy() + first.cross_entropy(labels, 0.1) + first.kl_divergence(teacher)
        return counts | {"backward": count(lambda: losses.sum().backward())}


def test_collectives_are_as_many_as_documented(pool: Pool) -> None:
    for counts in pool.run(all_reduces_of_each_call, Layout(tp=2), random_logits(3), random_logits(8), random_labels()):
        assert counts == {
            "smoothed cross entropy": 2,
            "log-sum-exp after it": 0,
            "entropy after it": 1,
            "divergence after it": 2,
            "another temperature": 1,
            "entropy alone": 2,
            "entropy again": 0,
            "cross entropy after it": 1,
            "divergence alone": 2,
            "backward": 0,
        }


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", KINDS)
def test_losses_are_float32_and_gradients_are_rounded_once(kind: str, dtype: torch.dtype) -> None:
    logits, teacher, labels = random_logits(3, dtype), random_logits(8, dtype), random_labels()
    leaf = logits.double().requires_grad_()
    expected = exact(kind, leaf, teacher.double(), labels)
    (gradient,) = torch.autograd.grad((expected * factors(5)).sum(), leaf)
    local = logits.clone().requires_grad_()
    losses = found(kind, alone(local), alone(teacher), labels)
    (found_gradient,) = torch.autograd.grad((losses * factors(5)).sum(), local)
    assert losses.dtype == torch.float32
    assert found_gradient.dtype == dtype
    torch.testing.assert_close(losses.double(), expected.detach(), rtol=1e-5, atol=1e-6)
    # log p - log q reaches 40 here, whose float32 neighbours are 4e-6 apart
    torch.testing.assert_close(found_gradient.double(), gradient, rtol=torch.finfo(dtype).eps / 2 + 1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_gradcheck(kind: str) -> None:
    logits, labels = random_logits()[:2, :2, :VOCAB].requires_grad_(), random_labels()[:2, :2]
    teacher = random_logits(8)[:2, :2, :VOCAB]
    assert torch.autograd.gradcheck(lambda local: found(kind, alone(local), alone(teacher), labels), logits)


@pytest.mark.parametrize("bad", [float("inf"), float("nan"), float("-inf")])
@pytest.mark.parametrize("kind", KINDS)
def test_a_token_that_is_not_asked_about_gets_gradient_zero_whatever_its_logits(kind: str, bad: float) -> None:
    labels, mask = random_labels(), torch.ones(BATCH, SEQ, dtype=torch.bool)
    mask[1, 2] = False
    for spoils_teacher in (False, True):
        logits, teacher = random_logits(3), random_logits(8)
        (teacher if spoils_teacher else logits)[2, 1, :VOCAB] = bad
        logits.requires_grad_()
        losses = found(kind, alone(logits), alone(teacher), labels)
        (gradient,) = torch.autograd.grad(torch.where(mask, losses, 0.0).sum(), logits)
        assert gradient.isfinite().all()
        assert gradient[2, 1].count_nonzero() == 0
        assert gradient[0, 0].count_nonzero() == VOCAB


@pytest.mark.parametrize("kind", KINDS)
def test_padding_gets_gradient_zero_even_where_the_loss_is_not_finite(kind: str) -> None:
    logits = random_logits().requires_grad_()
    losses = found(kind, alone(logits), alone(random_logits(8)), random_labels())
    (gradient,) = torch.autograd.grad(losses, logits, torch.full_like(losses, float("inf")))
    assert gradient[..., VOCAB:].count_nonzero() == 0


def test_impossible_tokens_of_the_vocabulary_do_no_harm() -> None:
    """The cases are a token impossible for both models, one for the teacher only, and one for the model only."""
    logits, teacher = random_logits(3), random_logits(8)
    logits[..., [1, 4]] = teacher[..., [1, 6]] = float("-inf")
    student, other = alone(logits.requires_grad_()), alone(teacher)
    assert student.entropy().isfinite().all()
    real = [token for token in range(VOCAB) if token not in (1, 4)]
    alone_of_possible = torch.distributions.Categorical(logits=logits[..., real]).entropy().t()
    torch.testing.assert_close(student.entropy(), alone_of_possible)
    assert student.kl_divergence(other).isposinf().all(), "the teacher says what the model cannot"
    assert student.reverse_kl_divergence(other).isposinf().all()
    teacher[..., 4] = float("-inf")
    divergence = student.kl_divergence(alone(teacher))
    assert divergence.isfinite().all()
    (gradient,) = torch.autograd.grad((student.entropy() + divergence).sum(), logits)
    assert gradient[..., :VOCAB].isfinite().all()
    assert gradient[..., 1].count_nonzero() == 0


def test_smoothing_0_is_the_plain_cross_entropy_bit_for_bit() -> None:
    logits, labels = random_logits(dtype=torch.float32).requires_grad_(), random_labels()
    plain, smoothed = alone(logits).cross_entropy(labels), alone(logits).cross_entropy(labels, 0.0)
    assert torch.equal(plain, smoothed)
    assert torch.equal(torch.autograd.grad(plain.sum(), logits)[0], torch.autograd.grad(smoothed.sum(), logits)[0])


def test_equal_distributions_do_not_diverge() -> None:
    logits = random_logits(dtype=torch.float32)
    student = alone(logits.clone().requires_grad_())
    for divergence in (student.kl_divergence(alone(logits + 100)), student.reverse_kl_divergence(alone(logits + 100))):
        assert divergence.abs().max() < 1e-5
    (gradient,) = torch.autograd.grad(student.kl_divergence(alone(logits)).sum(), student.local)
    assert gradient.count_nonzero() == 0


@pytest.mark.parametrize("number_first", [True, False])
def test_a_temperature_of_all_tokens_and_one_of_each_are_kept_apart(number_first: bool) -> None:
    """A loss with an option and one without look at the same logits."""
    logits, of_each = random_logits().requires_grad_(), torch.full((BATCH, SEQ), 0.5, dtype=torch.float64)
    shared, of_each[0, 0] = alone(logits), 3.0
    asked: list[float | Tensor] = [2.0, of_each] if number_first else [of_each, 2.0]
    for temperature in [*asked, *asked]:
        divisor = temperature.t().unsqueeze(-1) if isinstance(temperature, Tensor) else temperature
        expected = exact("entropy", logits / divisor, logits, random_labels())
        torch.testing.assert_close(shared.divided_by(temperature).entropy(), expected)
    assert shared.divided_by(2.0) is shared.divided_by(2.0)


def test_confident_models_neither_overflow_nor_cancel() -> None:
    """Offsets are 1000 and gaps 200: what underflows in one distribution still counts in the other."""
    logits, teacher = torch.full((1, 1, VOCAB), 1000.0), torch.full((1, 1, VOCAB), -1000.0)
    logits[0, 0, 7], teacher[0, 0, 2] = 1200.0, -800.0
    for kind in ("entropy", "forward", "reverse", "forward at 2.5"):
        expected = exact(kind, logits.double(), teacher.double(), torch.zeros(1, 1, dtype=torch.int64))
        value = found(kind, alone(logits), alone(teacher), torch.zeros(1, 1, dtype=torch.int64))
        assert value.item() == pytest.approx(expected.item(), rel=1e-6, abs=1e-7)


def test_a_few_tokens_at_a_time_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    def results() -> list[Tensor]:
        logits = random_logits(3, torch.float32).requires_grad_()
        student, teacher = alone(logits), alone(random_logits(8, torch.float32))
        losses = student.kl_divergence(teacher) + student.reverse_kl_divergence(teacher, 2.0)
        losses = losses + student.cross_entropy(random_labels(), 0.2)
        return [losses.detach(), *torch.autograd.grad(losses.sum(), logits)]

    whole = results()
    monkeypatch.setattr(cross_entropy, "ELEMENTS_AT_A_TIME", 1)
    assert all(torch.equal(one, other) for one, other in zip(whole, results(), strict=True))


def test_divergences_keep_no_full_precision_copy() -> None:
    logits, teacher = random_logits(3, torch.bfloat16).requires_grad_(), random_logits(8, torch.bfloat16)
    kept = set()

    def note(tensor: Tensor) -> Tensor:
        if tensor.numel() == logits.numel():
            kept.add((tensor.data_ptr(), tensor.dtype))
        return tensor

    student, other = alone(logits), alone(teacher)
    with saved_tensors_hooks(note, lambda tensor: tensor):
        losses = student.kl_divergence(other) + student.reverse_kl_divergence(other)
    assert losses.requires_grad
    assert kept == {(logits.data_ptr(), torch.bfloat16), (teacher.data_ptr(), torch.bfloat16)}


def test_a_deterministic_run_leaves_known_tokens_out_with_the_same_numbers() -> None:
    column, is_local = torch.tensor([[[0, 3, 0, 3]]]), torch.tensor([[[False, True, False, False]]])
    target = KnownProbabilities(column, is_local, torch.rand(1, 1, 4), torch.rand(1, 1))
    values = torch.randn(1, 1, 6)
    torch.use_deterministic_algorithms(True)
    try:
        found = target.others_of(values)
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(found, target.others_of(values))
    assert torch.equal(found, values * torch.tensor([1.0, 1.0, 1.0, 0.0, 1.0, 1.0]))
