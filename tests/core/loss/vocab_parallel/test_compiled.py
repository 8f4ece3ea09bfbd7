"""Passes over the logits that torch compiles: the formulas in float64, as near in half precision, and fewer of them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch._dynamo.config as dynamo
import torch.nn.functional as F
from torch import Tensor
from torch._inductor.utils import run_and_get_code

from mtrain.arch.layout import Layout
from mtrain.core import kernels
from mtrain.core.layers.output_layer import softcapped
from mtrain.core.loss.vocab_parallel.logits import VocabParallelLogits
from mtrain.core.ranks.groups import Groups
from mtrain.core.step import loss as step_loss
from tests.config.samples import config
from tests.core.loss.vocab_parallel import test_vocab_parallel as plain
from tests.core.loss.vocab_parallel.counting import Kernels, counted_all_reduces
from tests.core.loss.vocab_parallel.test_vocab_parallel import (
    BATCH,
    SEQ,
    VOCAB,
    factors,
    kept_like,
    random_labels,
    random_logits,
)
from tests.pool import Pool

TEMPERATURES = torch.linspace(0.5, 2.0, BATCH * SEQ, dtype=torch.float64).view(BATCH, SEQ)
IDS = torch.stack([(random_labels() + step) % VOCAB for step in (0, 1, 4)], dim=-1)
"""Three different tokens at each position, [batch, seq, k]."""
KNOWN = torch.tensor([0.5, 0.2, 0.1], dtype=torch.float64).expand(BATCH, SEQ, 3)
REST = torch.full((BATCH, SEQ), 0.2, dtype=torch.float64)

KINDS: dict[str, Callable[[VocabParallelLogits, Tensor], Tensor]] = {
    "cross entropy": lambda logits, labels: logits.cross_entropy(labels),
    "smoothing": lambda logits, labels: logits.cross_entropy(labels, 0.3),
    "log-sum-exp": lambda logits, labels: logits.logsumexp(),
    "both": lambda logits, labels: logits.cross_entropy(labels) + logits.logsumexp().square(),
    "entropy": lambda logits, labels: logits.entropy(),
    "top-k": lambda logits, labels: logits.top_k_divergence(IDS, KNOWN, REST),
    "tempered": lambda logits, labels: logits.divided_by(TEMPERATURES).cross_entropy(labels),
    "with the forward divergence": lambda logits, labels: logits.cross_entropy(labels) + logits.kl_divergence(logits),
    "consumed": lambda logits, labels: logits.cross_entropy(labels),
    "consumed, smoothing": lambda logits, labels: logits.cross_entropy(labels, 0.3),
}


def exact(kind: str, real: Tensor, labels: Tensor) -> Tensor:
    """Computes [batch, seq] by torch from float64 logits [seq, batch, VOCAB]."""
    logits = real.transpose(0, 1)
    entropy = F.cross_entropy(logits.movedim(-1, 1), labels, reduction="none")
    log_p = logits.log_softmax(-1)
    match kind:
        case "cross entropy" | "with the forward divergence" | "consumed":
            return entropy
        case "smoothing" | "consumed, smoothing":
            return F.cross_entropy(logits.movedim(-1, 1), labels, reduction="none", label_smoothing=0.3)
        case "log-sum-exp":
            return logits.logsumexp(-1)
        case "both":
            return entropy + logits.logsumexp(-1).square()
        case "entropy":
            return -(log_p.exp() * log_p).sum(-1)
        case "top-k":
            others = 1 - log_p.gather(-1, IDS).exp().sum(-1)
            own = (KNOWN * KNOWN.log()).sum(-1) + REST * REST.log()
            return own - (KNOWN * log_p.gather(-1, IDS)).sum(-1) - REST * others.log()
        case "tempered":
            scores = (logits / TEMPERATURES.unsqueeze(-1)).movedim(-1, 1)
            return F.cross_entropy(scores, labels, reduction="none")
    raise AssertionError(kind)


@contextmanager
def compiler(backend: str) -> Iterator[None]:
    """Compiles regions by a backend inside the block."""
    before, kernels.BACKEND = kernels.BACKEND, backend
    try:
        with dynamo.patch(specialize_float=True, recompile_limit=64, suppress_errors=False):
            yield
    finally:
        kernels.BACKEND = before


def of_a_shard(groups: Groups, logits: Tensor, labels: Tensor, cap: float | None) -> dict[str, tuple[Tensor, Tensor]]:
    """Returns for each kind the losses of all tokens, and the gradient of this rank's logits for weights of tokens."""
    size, rank = groups.layout.tp, groups.tp_rank
    results = {}
    with compiler("aot_eager"):
        for kind, losses_of in KINDS.items():
            leaf = logits.chunk(size, dim=-1)[rank].clone().requires_grad_()
            local = leaf if cap is None else softcapped.compiled_if(True)(leaf, cap)
            group = groups.tp if size > 1 else None
            sharded = VocabParallelLogits(local, group, rank * leaf.shape[-1], VOCAB, True)
            losses = losses_of(sharded.consumed() if "consumed" in kind else sharded, labels)
            (gradient,) = torch.autograd.grad((losses * factors(5)).sum(), leaf)
            results[kind] = (losses.detach(), gradient)
    return results


@pytest.mark.parametrize(("tp", "cap"), [(1, None), (1, 3.0), (2, None), (4, 3.0)])
def test_losses_and_gradients_are_those_of_the_formulas(pool: Pool, tp: int, cap: float | None) -> None:
    """Two of the four columns of the third shard are real at tp=4, of the fourth none."""
    logits, labels = random_logits(), random_labels()
    leaf = logits.clone().requires_grad_()
    real = leaf[..., :VOCAB] if cap is None else cap * (leaf[..., :VOCAB] / cap).tanh()
    ranks = pool.run(of_a_shard, Layout(tp=tp), logits, labels, cap)
    for kind in KINDS:
        losses = exact(kind, real, labels)
        (gradient,) = torch.autograd.grad((losses * factors(5)).sum(), leaf, retain_graph=True)
        for results in ranks:
            torch.testing.assert_close(results[kind][0], losses.detach(), rtol=1e-12, atol=1e-12)
        gathered = torch.cat([results[kind][1] for results in ranks], dim=-1)
        torch.testing.assert_close(gathered[..., :VOCAB], gradient[..., :VOCAB], rtol=1e-11, atol=1e-12)
        assert cap is not None or gathered[..., VOCAB:].count_nonzero() == 0


def all_reduces_of_each_call(groups: Groups, logits: Tensor, labels: Tensor) -> dict[str, int]:
    def shard() -> VocabParallelLogits:
        local = logits.chunk(groups.layout.tp, dim=-1)[groups.tp_rank].clone().requires_grad_()
        return VocabParallelLogits(local, groups.tp, groups.tp_rank * local.shape[-1], VOCAB, True)

    with compiler("aot_eager"), counted_all_reduces() as count:
        first, second = shard(), shard()
        return {
            "cross entropy": count(lambda: first.cross_entropy(labels)),
            "log-sum-exp after it": count(first.logsumexp),
            "other labels": count(lambda: first.cross_entropy(labels.clone())),
            "log-sum-exp alone": count(second.logsumexp),
            "entropy after it": count(second.entropy),
            "backward": count(lambda: second.cross_entropy(labels).sum().backward()),
        }


def test_collectives_are_those_of_torchs_own_kernels(pool: Pool) -> None:
    expected = {"cross entropy": 2, "log-sum-exp after it": 0, "other labels": 1}
    expected |= {"log-sum-exp alone": 2, "entropy after it": 1, "backward": 1}
    for counts in pool.run(all_reduces_of_each_call, Layout(tp=2), random_logits(), random_labels()):
        assert counts == expected


@pytest.mark.parametrize("bad", [float("inf"), float("nan"), float("-inf")])
@pytest.mark.parametrize("kind", ["cross entropy", "smoothing", "log-sum-exp", "entropy", "tempered"])
def test_a_token_without_weight_gets_gradient_zero_whatever_its_logits(kind: str, bad: float) -> None:
    mask = torch.ones(BATCH, SEQ, dtype=torch.bool)
    mask[1, 2] = False
    logits = random_logits()
    logits[2, 1, :VOCAB] = bad
    logits.requires_grad_()
    with compiler("aot_eager"):
        losses = KINDS[kind](VocabParallelLogits(logits, None, 0, VOCAB, True), random_labels())
        (gradient,) = torch.autograd.grad(torch.where(mask, losses, 0.0).sum(), logits)
    assert gradient.isfinite().all()
    assert gradient[2, 1].count_nonzero() == 0
    assert gradient[0, 0].count_nonzero() == VOCAB


def test_impossible_tokens_have_the_statistics_of_torchs_own_kernels() -> None:
    logits = random_logits()
    logits[1, 2, :VOCAB] = float("-inf")
    logits[0, 0, 1:VOCAB] = float("-inf")
    with compiler("aot_eager"):
        found = VocabParallelLogits(logits, None, 0, VOCAB, True).logsumexp()
    torch.testing.assert_close(found, plain.alone(logits).logsumexp(), rtol=1e-13, atol=0)
    assert found[2, 1] == float("-inf")


def half_precision(dtype: torch.dtype, is_compiled: bool) -> tuple[Tensor, Tensor]:
    logits = random_logits(dtype=dtype).requires_grad_()
    losses = KINDS["both"](VocabParallelLogits(logits, None, 0, VOCAB, is_compiled), random_labels())
    (gradient,) = torch.autograd.grad((losses * factors(5)).sum(), logits)
    return losses.detach().double(), gradient.double()


@pytest.mark.parametrize(
    ("dtype", "backend"),
    [
        (torch.bfloat16, "aot_eager"),
        pytest.param(torch.bfloat16, "inductor", marks=pytest.mark.nightly),
        pytest.param(torch.float16, "inductor", marks=pytest.mark.nightly),
    ],
)
def test_half_precision_is_as_near_to_float64_as_torchs_own_kernels(dtype: torch.dtype, backend: str) -> None:
    leaf = random_logits(dtype=dtype).double().requires_grad_()
    losses = exact("both", leaf[..., :VOCAB], random_labels())
    (gradient,) = torch.autograd.grad((losses * factors(5)).sum(), leaf)
    with compiler(backend):
        found = half_precision(dtype, True)
    for one, other, right in zip(found, half_precision(dtype, False), (losses.detach(), gradient), strict=True):
        unit = torch.finfo(torch.float32 if right is losses else dtype).eps
        assert (one - right).abs().max() <= (other - right).abs().max() + unit * right.abs().max()


@pytest.mark.parametrize(
    ("dtype", "is_consumed", "expected"),
    [(torch.float32, True, False), (torch.float32, False, True), (torch.bfloat16, True, True)],
)
def test_a_cpu_compiles_no_loss_that_overwrites_its_logits(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, is_consumed: bool, expected: bool
) -> None:
    """bf16 logits hold no exponentials of float32, so there are no passes to save by overwriting."""
    made: list[bool] = []

    def noted(*arguments: Any) -> VocabParallelLogits:
        made.append(arguments[-1])
        return VocabParallelLogits(*arguments)

    monkeypatch.setattr(step_loss, "VocabParallelLogits", noted)
    deferred: Any = SimpleNamespace(layer=SimpleNamespace(compiles_regions=True))
    groups: Any = SimpleNamespace(layout=Layout(), tp_rank=0)
    step_loss.vocab_parallel(random_logits(dtype=dtype), deferred, config().model, groups, is_consumed)
    assert made == [expected]


def test_backward_keeps_the_logits_alone() -> None:
    logits = random_logits(dtype=torch.bfloat16).requires_grad_()
    with compiler("aot_eager"), kept_like(logits) as kept:
        assert KINDS["both"](VocabParallelLogits(logits, None, 0, VOCAB, True), random_labels()).requires_grad
    assert kept == {(logits.data_ptr(), torch.bfloat16)}


def step(is_compiled: bool) -> None:
    """Runs forward and backward of a cross entropy with a z-loss."""
    logits = torch.empty(8, 1, 4096, dtype=torch.bfloat16).fill_(1.0).requires_grad_()
    labels = torch.zeros(1, 8, dtype=torch.int64)
    KINDS["both"](VocabParallelLogits(logits, None, 0, 4000, is_compiled), labels).sum().backward()


NOT_PASSES = {"fill_", "gather", "scatter_", "index_put_"}
"""The test's own, and operations on the columns of labels and the rows of masked tokens."""


def test_torchs_own_kernels_pass_over_the_logits_five_times() -> None:
    """GPUs pass once more, to fill masked tokens."""
    with Kernels(8 * 4000) as passes:
        step(is_compiled=False)
    assert [name for name in passes.names if name not in NOT_PASSES] == ["amax", "sub", "exp_", "sum", "mul"]


@pytest.mark.nightly
def test_torch_compiles_a_kernel_forward_and_a_kernel_backward() -> None:
    with compiler("inductor"):
        _, codes = run_and_get_code(step, True)
    assert [code.count('extern "C"') for code in codes] == [1, 1]
