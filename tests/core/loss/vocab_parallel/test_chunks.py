"""Output layer and loss in chunks of tokens equal those of whole logits, in the memory of a chunk."""

from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from mtrain.arch.layout import Layout
from mtrain.config import Config
from mtrain.core.loss.vocab_parallel.chunks import (
    LossOfChunk,
    Table,
    _WeightGradient,
    chunks,
    logits_of_rows,
    sum_over_chunks,
)
from mtrain.core.loss.vocab_parallel.logits import VocabParallelLogits
from mtrain.core.ranks.groups import Groups
from mtrain.core.step import loss as step_loss
from mtrain.data.loader import StepLoader
from tests.core.loss.vocab_parallel.counting import Kernels
from tests.core.state.checkpoint_ranks import build
from tests.core.state.test_save_and_load import configured
from tests.plan.allocations import Allocations
from tests.pool import Pool

ROWS, HIDDEN, VOCAB, PADDED = (17, 4), 6, 10, 16
"""Sizes of two distributions; at tp=4 a shard has 4 columns: the third holds two real ones, the fourth none."""


class Given(NamedTuple):
    """Two sets of hidden states under one table, a teacher's for the first, labels and weights."""

    hidden: list[Tensor]
    weight: Tensor
    teacher: Tensor
    teacher_weight: Tensor
    labels: list[Tensor]
    factors: list[Tensor]


def drawn(rows: tuple[int, ...] = ROWS, dtype: torch.dtype = torch.float64) -> Given:
    """Draws inputs whose padded vocabulary rows would be likely if they were seen; some weights are 0."""
    generator = torch.Generator().manual_seed(len(rows) + sum(rows))

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator).to(dtype)

    weight, teacher_weight = normal(PADDED, HIDDEN), normal(PADDED, HIDDEN)
    weight[VOCAB:], teacher_weight[VOCAB:] = 100.0, -50.0
    factors = [normal(1, count).double() * (torch.arange(count) % 4 != 1) for count in rows]
    labels = [torch.randint(VOCAB, (1, count), generator=generator) for count in rows]
    hidden = [normal(count, HIDDEN) for count in rows]
    return Given(hidden, weight, normal(rows[0], HIDDEN), teacher_weight, labels, factors)


TokenLosses = Callable[[VocabParallelLogits, VocabParallelLogits, Tensor], Tensor]
KINDS: dict[str, TokenLosses] = {
    "cross entropy": lambda logits, teacher, labels: logits.cross_entropy(labels),
    "smoothing": lambda logits, teacher, labels: logits.cross_entropy(labels, 0.3),
    "z-loss": lambda logits, teacher, labels: logits.logsumexp().square(),
    "entropy": lambda logits, teacher, labels: logits.entropy(),
    "forward": lambda logits, teacher, labels: logits.kl_divergence(teacher),
    "reverse": lambda logits, teacher, labels: logits.reverse_kl_divergence(teacher, 2.0),
    "focal": lambda logits, teacher, labels: (
        (1 - (-logits.cross_entropy(labels)).exp()) ** 2 * logits.cross_entropy(labels)
    ),
}


def exact(kind: str, real: Tensor, other: Tensor, labels: Tensor) -> Tensor:
    """Computes [rows] by torch from float64 logits [rows, VOCAB]."""
    temperature = 2.0 if kind == "reverse" else 1.0
    log_p, log_q = (real / temperature).log_softmax(-1), (other / temperature).log_softmax(-1)
    entropy = F.cross_entropy(real, labels[0], reduction="none")
    match kind:
        case "cross entropy":
            return entropy
        case "smoothing":
            return F.cross_entropy(real, labels[0], reduction="none", label_smoothing=0.3)
        case "z-loss":
            return real.logsumexp(-1) ** 2
        case "entropy":
            return -(log_p.exp() * log_p).sum(-1)
        case "forward":
            return (log_q.exp() * (log_q - log_p)).sum(-1)
        case "reverse":
            return (log_p.exp() * (log_p - log_q)).sum(-1)
        case "focal":
            return (1 - (-entropy).exp()) ** 2 * entropy
    raise AssertionError(kind)


def expected(kinds: list[str], data: Given) -> list[Tensor]:
    """Returns the weighted sum, its gradient for the table's real rows, and for each set of hidden states."""
    weight = data.weight.double().requires_grad_()
    hidden = [each.double().requires_grad_() for each in data.hidden]
    frozen = (data.teacher.double() @ data.teacher_weight.double().t())[:, :VOCAB]
    total = torch.zeros((), dtype=torch.float64)
    for rows, labels, factors in zip(hidden, data.labels, data.factors, strict=True):
        real = (rows @ weight.t())[:, :VOCAB]
        total = total + sum((exact(kind, real, frozen[: len(real)], labels) * factors[0]).sum() for kind in kinds)
    gradients = torch.autograd.grad(total, [weight, *hidden])
    return [total.detach(), *gradients]


def found(
    kinds: list[str],
    data: Given,
    chunk_rows: int,
    groups: Groups | None = None,
    upstream: float = 1.0,
    is_consumed: bool = False,
) -> list[Tensor]:
    """Computes the same in chunks, on this rank's rows of the table; its hidden states' gradients are partial sums."""
    group = None if groups is None else groups.tp
    size, rank = (1, 0) if groups is None else (groups.layout.tp, groups.tp_rank)
    weight, teacher_weight = (each.chunk(size)[rank].clone() for each in (data.weight, data.teacher_weight))
    first = rank * len(weight)
    weight.requires_grad_()
    hidden = [each.clone().requires_grad_() for each in data.hidden]

    def loss_of_chunk(number: int, rows: slice, local: Tensor) -> Tensor:
        student = VocabParallelLogits(local, group, first, VOCAB)
        student = student.consumed() if is_consumed else student
        frozen = logits_of_rows(data.teacher[rows], teacher_weight)
        teacher = VocabParallelLogits(frozen, group, first, VOCAB)
        losses = sum(KINDS[kind](student, teacher, data.labels[number][:, rows]) for kind in kinds)
        factors = data.factors[number][:, rows]
        return torch.where(factors != 0, losses * factors, 0.0).sum().float()

    total = sum_over_chunks(Table(weight), hidden, loss_of_chunk, chunk_rows, torch.tensor(1.0))
    gradients = torch.autograd.grad(total * upstream, [weight, *hidden])
    return [total.detach(), *gradients]


def assert_equal(results: list[list[Tensor]], right: list[Tensor], rtol: float, factor: float = 1.0) -> None:
    """Compares the results, one list per rank."""
    scales = [max(float(each.abs().max()), 1.0) if each.numel() else 1.0 for each in right]
    for rank in results:
        assert abs(float(rank[0]) - float(right[0])) <= 1e-6 * scales[0]
    weight = torch.cat([rank[1] for rank in results]).double()
    hidden = [torch.stack(parts).double().sum(0) for parts in zip(*(rank[2:] for rank in results), strict=True)]
    for each, expected_, scale in zip([weight, *hidden], right[1:], scales[1:], strict=True):
        torch.testing.assert_close(each, factor * expected_, rtol=rtol, atol=rtol * scale)
    assert weight[VOCAB:].count_nonzero() == 0


def every_kind(groups: Groups, data: Given, chunk_rows: int) -> list[list[Tensor]]:
    return [found(kinds, data, chunk_rows, groups) for kinds in [[kind] for kind in KINDS] + [list(KINDS)]]


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_every_loss_is_that_of_the_whole_vocabulary(pool: Pool, tp: int) -> None:
    """The kinds run one after another, then all in one pass; two sets of hidden states share one table."""
    data = drawn()
    results = pool.run(every_kind, Layout(tp=tp), data, 5) if tp > 1 else [every_kind_alone(data)]
    for number, kinds in enumerate([[kind] for kind in KINDS] + [list(KINDS)]):
        # the sum is rounded to float32, as numerators are, so gradients carry factors of float32
        assert_equal([rank[number] for rank in results], expected(kinds, data), 1e-6)


def every_kind_alone(data: Given) -> list[list[Tensor]]:
    return [found(kinds, data, 5) for kinds in [[kind] for kind in KINDS] + [list(KINDS)]]


def kept_and_consumed(groups: Groups, data: Given, chunk_rows: int) -> list[list[Tensor]]:
    kinds = ["cross entropy", "smoothing"]
    return [found([kind], data, chunk_rows, groups, 1.0, consumes) for kind in kinds for consumes in (False, True)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_consumed_logits_give_the_same_bits(pool: Pool, dtype: torch.dtype) -> None:
    """Exponentials and gradient overwrite the logits where these are as wide as float32; some tokens are masked, and
    one rank of four holds padding alone."""
    for kept, consumed in (
        rank[i : i + 2] for rank in pool.run(kept_and_consumed, Layout(tp=4), drawn(dtype=dtype), 5) for i in (0, 2)
    ):
        for each, same in zip(consumed, kept, strict=True):
            assert torch.equal(each, same)


@settings(max_examples=40, deadline=None)
@example(first=0, second=2, chunk_rows=1)  # no row has a teacher
@given(st.integers(0, 9), st.integers(0, 4), st.integers(1, 12))
def test_any_size_of_chunks_gives_the_same(first: int, second: int, chunk_rows: int) -> None:
    """Cases: no row at all, one row, and chunks larger than the number of rows."""
    data = drawn((first, second))
    kinds = ["cross entropy", "z-loss"]
    assert_equal([found(kinds, data, chunk_rows)], expected(kinds, data), 1e-6)


@given(st.integers(0, 10_000), st.integers(1, 300))
def test_chunks_cover_every_row_once_in_nearly_equal_parts(num_rows: int, chunk_rows: int) -> None:
    parts = list(chunks(num_rows, chunk_rows))
    assert [row for part in parts for row in range(part.start, part.stop)] == list(range(num_rows))
    sizes = [part.stop - part.start for part in parts]
    assert len(parts) == -(-num_rows // chunk_rows)
    assert not sizes or max(sizes) <= min(chunk_rows, min(sizes) + 1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_gradients_have_the_dtype_of_hidden_states_and_table(dtype: torch.dtype) -> None:
    data = drawn(dtype=dtype)
    kinds = ["cross entropy", "entropy"]
    results = found(kinds, data, 3)
    assert [each.dtype for each in results] == [torch.float32, dtype, dtype, dtype]
    # logits are rounded to the dtype before the loss; the largest dominates the error of a sum
    results = [each.double() for each in results]
    right = expected(kinds, data)
    unit = torch.finfo(dtype).eps
    for each, exact_ in zip(results[1:], right[1:], strict=True):
        assert (each - exact_).norm() <= max(20 * unit, 1e-6) * exact_.norm()


class GpuKernels(Kernels):
    """Runs nothing where torch knows no shapes of a GPU's tensors without a GPU: products that write into one."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.ops.aten.addmm.dtype_out:
            return super().__torch_dispatch__(func, types, args, kwargs)
        assert args[0] is kwargs["out"]
        assert args[0].dtype == args[3] == torch.float32
        self.names.append("addmm")
        return args[0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_gpu_adds_the_part_of_each_chunk_in_its_product(dtype: torch.dtype) -> None:
    """The shapes alone, as there is no GPU: no second product of the table's size is made and added."""
    with FakeTensorMode(), torch.device("cuda"):
        weight, hidden, gradient = (torch.empty(*shape, dtype=dtype) for shape in ((64, 8), (5, 8), (5, 64)))
        with GpuKernels(weight.numel()) as kernels:
            sums = _WeightGradient(weight)
            for _ in range(3):
                sums.add(gradient, hidden)
            assert sums.rounded().dtype == dtype
    rounding = [] if dtype == torch.float32 else ["_to_copy"]
    assert [name.removesuffix("_") for name in kernels.names] == ["mm", "addmm", "addmm", *rounding]


def test_many_chunks_lose_no_more_digits_of_the_table_than_one() -> None:
    """The gradient is summed in float32 and rounded once: 17 chunks rounded one by one would be several units off."""
    data = drawn(dtype=torch.bfloat16)
    one, many = (found(["cross entropy"], data, rows)[1].double() for rows in (17, 1))
    assert ((one - many).abs() <= 2.0**-8 * one.abs() + 1e-6).all()


@pytest.mark.parametrize("upstream", [2.0**-20, 3.0, -1.0, 0.0])
def test_a_gradient_that_was_not_expected_is_multiplied_in(upstream: float) -> None:
    data = drawn()
    assert_equal([found(["focal"], data, 4, upstream=upstream)], expected(["focal"], data), 1e-6, factor=upstream)


def test_gradients_of_fp16_are_formed_with_the_loss_scale() -> None:
    """Weights of 1e-6 on a hundred tokens: without the scale their gradients are 0 in fp16."""
    weight = torch.zeros(8, 4, dtype=torch.float16).requires_grad_()
    hidden = torch.ones(100, 4, dtype=torch.float16)

    def loss_of_chunk(number: int, rows: slice, local: Tensor) -> Tensor:
        labels = torch.zeros(1, len(local), dtype=torch.int64)
        return 1e-8 * VocabParallelLogits(local, None, 0, 8).cross_entropy(labels).sum()

    scale = torch.tensor(2.0**16)
    total = sum_over_chunks(Table(weight), [hidden], loss_of_chunk, 30, scale)
    (gradient,) = torch.autograd.grad(total * scale, weight)
    torch.testing.assert_close(
        gradient[0].double(), torch.full((4,), -7 / 8 * 100 * 1e-8 * 2**16).double(), rtol=1e-2, atol=0
    )


def test_frozen_parts_get_no_gradient() -> None:
    data = drawn()
    one_row = [torch.ones(1, count, dtype=torch.int64) for count in ROWS]

    def loss_of_chunk(number: int, rows: slice, local: Tensor) -> Tensor:
        return VocabParallelLogits(local, None, 0, VOCAB).cross_entropy(one_row[number][:, rows]).sum().float()

    hidden = [each.clone().requires_grad_() for each in data.hidden]
    total = sum_over_chunks(Table(data.weight), hidden, loss_of_chunk, 5, torch.tensor(1.0))
    total.backward()
    assert data.weight.grad is None
    assert all(each.grad is not None and each.grad.count_nonzero() > 0 for each in hidden)
    with torch.no_grad():
        without = sum_over_chunks(Table(data.weight), hidden, loss_of_chunk, 5, torch.tensor(1.0))
    assert not without.requires_grad
    assert torch.equal(without, total.detach())


def test_no_row_still_has_a_graph_and_a_gradient_of_zeros() -> None:
    """Backward hooks would otherwise wait for the table's gradient for ever."""
    total, *gradients = found(["cross entropy"], drawn((0,)), 4)
    assert total == 0.0
    assert [each.shape for each in gradients] == [(PADDED, HIDDEN), (0, HIDDEN)]
    assert gradients[0].count_nonzero() == 0


def test_a_second_backward_pass_is_an_error() -> None:
    data = drawn()
    weight = data.weight.clone().requires_grad_()

    def loss_of_chunk(number: int, rows: slice, local: Tensor) -> Tensor:
        return VocabParallelLogits(local, None, 0, VOCAB).logsumexp().sum().float()

    total = sum_over_chunks(Table(weight), data.hidden, loss_of_chunk, 5, torch.tensor(1.0))
    torch.autograd.grad(total, weight, retain_graph=True)
    with pytest.raises(RuntimeError, match="differentiated once"):
        torch.autograd.grad(total, weight)


def test_consumed_chunks_take_turns_in_the_same_memory() -> None:
    data = drawn()
    labels = [torch.ones(1, count, dtype=torch.int64) for count in ROWS]

    def found(reuses_memory: bool) -> tuple[set[int], list[Tensor]]:
        addresses = set()

        def loss_of_chunk(number: int, rows: slice, local: Tensor) -> Tensor:
            addresses.add(local.data_ptr())
            others.append(torch.empty_like(local))  # new memory would not be at the same address by chance
            return VocabParallelLogits(local, None, 0, VOCAB).consumed().cross_entropy(labels[number][:, rows]).sum()

        others: list[Tensor] = []
        leaves = [each.clone().requires_grad_() for each in (data.weight, *data.hidden)]
        weight, *hidden = leaves
        total = sum_over_chunks(Table(weight), hidden, loss_of_chunk, 5, torch.tensor(1.0), reuses_memory)
        return addresses, [total.detach(), *torch.autograd.grad(total, leaves)]

    (one, results), (several, expected) = found(True), found(False)
    assert len(one) == 1 < len(several)
    assert all(torch.equal(result, other) for result, other in zip(results, expected, strict=True))


def reuses_of_a_step(groups: Groups, config: Config) -> set[bool]:
    """Returns whether the chunks of each microbatch of a step share memory."""
    reuses = set()

    def noted(table: Table, hidden: list[Tensor], loss_of: LossOfChunk, **options: Any) -> Tensor:
        reuses.add(options["reuses_memory"])
        return sum_over_chunks(table, hidden, loss_of, **options)

    with mock.patch.object(step_loss, "sum_over_chunks", noted):
        loader = StepLoader(config, groups.dp_rank, groups.layout.dp)
        build(groups, config).training.forward_backward(loader.batches(0))
    return reuses


@pytest.mark.parametrize(
    ("changes", "expected"),
    [({}, True), ({"loss.side_terms": {"z": {"function": "z_loss", "coefficient": 0.01}}}, False)],
    ids=["cross entropy alone", "two terms"],
)
def test_memory_is_shared_where_no_term_can_keep_logits(pool: Pool, changes: dict[str, Any], expected: bool) -> None:
    config = configured(**{"loss.chunk_tokens": 3}, **changes)
    assert pool.run(reuses_of_a_step, Layout(), config) == [{expected}]


@pytest.mark.parametrize("is_consumed", [False, True])
def test_memory_is_that_of_a_chunk(is_consumed: bool) -> None:
    """The case has 512 tokens of 32k words in float32 on one process: 16 MiB of gradient of the table, and three
    chunks of logits, exponentials and gradients, or one for all three. Whole logits take 192 MiB."""
    rows, width, vocab, chunk = 512, 128, 32_768, 64
    weight = torch.zeros(vocab, width).requires_grad_()
    hidden = torch.ones(rows, width).requires_grad_()
    labels = torch.zeros(1, rows, dtype=torch.int64)

    def loss_of_chunk(number: int, part: slice, local: Tensor) -> Tensor:
        logits = VocabParallelLogits(local, None, 0, vocab)
        logits = logits.consumed() if is_consumed else logits
        return logits.cross_entropy(labels[:, part]).sum()

    def step() -> None:
        sum_over_chunks(Table(weight), [hidden], loss_of_chunk, chunk, torch.tensor(1.0)).backward()

    table = weight.numel() * 4
    with Allocations() as watched:
        step()
    num_tensors = 1 if is_consumed else 3
    assert watched.peak <= 1.02 * (table + num_tensors * chunk * vocab * 4) + hidden.numel() * 4


def test_consumed_logits_cannot_be_differentiated_twice() -> None:
    """Autograd finds the changed tensor, so no gradient is wrong in silence."""
    logits = torch.randn(3, 2, 8, requires_grad=True)
    loss = VocabParallelLogits(logits, None, 0, 8).consumed().cross_entropy(torch.zeros(2, 3).long()).sum()
    torch.autograd.grad(loss, logits, retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(loss, logits)
