"""Faults of other training systems, as regression tests: each naive formula is shown to fail, the pairs to hold.

Ranks and microbatches are simulated in one process. The model is one linear layer, so the loss and its gradient are
exact; "fails" means that the gradient is more than 1 % away from that of one process that sees the whole batch.
"""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from mtrain.config.schema.loss import Aggregation, LossSection
from mtrain.core.batch.zigzag import zigzag_index
from mtrain.core.loss.aggregation import aggregate
from mtrain.verify.reference.aggregation import divisor, token_weights

NUM_SEQUENCES, LENGTH, HIDDEN, VOCAB = 16, 32, 6, 19
LOSS_TOKENS = [1, 30, 4, 3, 25, 2, 9, 6, 31, 5, 12, 1, 2, 28, 17, 3]
"""Number of loss tokens of each sequence, at its end, where an answer lies."""


@dataclass(frozen=True)
class Batch:
    """A global batch and the linear model on it."""

    hidden: Tensor
    """[sequence, token, hidden]."""
    labels: Tensor
    """[sequence, token]."""
    mask: Tensor
    """[sequence, token] float64."""
    weight: Tensor
    """[hidden, vocab] float64, what is differentiated."""

    def token_losses(self) -> Tensor:
        """Returns [sequence, token] losses in nats, 0 where masked."""
        log_probabilities = (self.hidden @ self.weight).log_softmax(-1)
        return -log_probabilities.gather(-1, self.labels.unsqueeze(-1)).squeeze(-1) * self.mask

    def gradient(self, loss: Tensor) -> Tensor:
        (gradient,) = torch.autograd.grad(loss, self.weight, retain_graph=True)
        return gradient

    def deviation(self, loss: Tensor, exact: Tensor) -> float:
        """Returns the distance of the gradients, relative to the exact one."""
        right = self.gradient(exact)
        return float((self.gradient(loss) - right).norm() / right.norm())


def batch_of(loss_tokens: list[int]) -> Batch:
    """Draws a batch in which sequence i ends in `loss_tokens[i]` loss tokens."""
    generator = torch.Generator().manual_seed(11)
    mask = torch.zeros(NUM_SEQUENCES, LENGTH, dtype=torch.float64)
    for row, count in zip(mask, loss_tokens, strict=True):
        row[LENGTH - count :] = 1
    return Batch(
        hidden=torch.randn(NUM_SEQUENCES, LENGTH, HIDDEN, dtype=torch.float64, generator=generator),
        labels=torch.randint(VOCAB, (NUM_SEQUENCES, LENGTH), generator=generator),
        mask=mask,
        weight=torch.randn(HIDDEN, VOCAB, dtype=torch.float64, generator=generator).requires_grad_(),
    )


@pytest.fixture
def ragged() -> Batch:
    return batch_of(LOSS_TOKENS)


@pytest.fixture
def even() -> Batch:
    """Makes a loss on all tokens: pretraining on full rows, where means of means happen to be right."""
    return batch_of([LENGTH] * NUM_SEQUENCES)


@dataclass(frozen=True)
class Cut:
    """The part of the batch that one rank sees in one microbatch."""

    rows: slice
    tokens: Tensor
    """Positions of each row."""

    def of(self, values: Tensor) -> Tensor:
        """Returns the cut's part of [sequence, token] values."""
        return values[self.rows][:, self.tokens]


def cuts(num_groups: int, sp: int) -> list[list[Cut]]:
    """Cuts the batch into groups of neighbouring rows (of a data-parallel rank or a microbatch), each over sp ranks."""
    size = NUM_SEQUENCES // num_groups
    starts = range(0, NUM_SEQUENCES, size)
    return [[Cut(slice(start, start + size), zigzag_index(LENGTH, sp, rank)) for rank in range(sp)] for start in starts]


def one_process(batch: Batch, aggregation: Aggregation) -> Tensor:
    """Computes the mean as the aggregation's name defines it."""
    section, ones = LossSection(aggregation=aggregation), torch.ones(NUM_SEQUENCES, dtype=torch.float64)
    total = (token_weights(batch.mask, ones, section) * batch.token_losses()).sum()
    return total / divisor(batch.mask, ones, section).value


def by_pairs(batch: Batch, aggregation: Aggregation, num_groups: int, sp: int) -> Tensor:
    """Computes sum of numerators / sum of denominators over all ranks and microbatches."""
    section = LossSection(aggregation=aggregation)
    terms = [aggregate(row.numpy(), 1.0, section, is_first_in_step=i == 0) for i, row in enumerate(batch.mask)]
    weights = torch.stack([torch.from_numpy(term.weights) for term in terms])
    shares = torch.stack([torch.from_numpy(term.denominator_weights) for term in terms])
    losses = batch.token_losses()
    parts = [cut for group in cuts(num_groups, sp) for cut in group]
    numerator = torch.stack([(cut.of(weights) * cut.of(losses)).sum() for cut in parts]).sum()
    return numerator / torch.stack([cut.of(shares).sum() for cut in parts]).sum()


def token_mean(losses: Tensor, mask: Tensor) -> Tensor:
    """Averages over the visible loss tokens; 0 where there are none."""
    return losses.sum() / mask.sum() if mask.any() else losses.sum()


def mean_of_micro_steps(batch: Batch, sp: int) -> Tensor:
    """Imitates verl's SFT trainer on 8 devices: sequence parallelism leaves fewer data-parallel ranks, so more steps of
    one sample per rank; each step is a token mean over the ranks, and the steps are averaged."""
    losses, num_steps = batch.token_losses(), NUM_SEQUENCES // (8 // sp)
    steps = [token_mean(losses[m::num_steps], batch.mask[m::num_steps]) for m in range(num_steps)]
    return torch.stack(steps).mean()


def weighted_by_samples(batch: Batch, sp: int) -> Tensor:
    """Imitates verl's actor: the token mean of each microbatch by its share of the samples; a microbatch holds sp
    samples, as its budget of tokens grows with the devices that share it."""
    losses = batch.token_losses()
    groups = [group[0].rows for group in cuts(NUM_SEQUENCES // sp, sp)]
    return torch.stack([token_mean(losses[rows], batch.mask[rows]) * sp / NUM_SEQUENCES for rows in groups]).sum()


@pytest.mark.parametrize("naive", [mean_of_micro_steps, weighted_by_samples])
def test_verl_sequence_parallelism_with_gradient_accumulation(
    ragged: Batch, even: Batch, naive: Callable[[Batch, int], Tensor]
) -> None:
    """verl issue 2857, pull requests 906 and 5641: one run, three losses at SP 1, 2 and 8."""
    exact = one_process(ragged, "token-mean")
    for sp in (1, 2, 8):
        assert ragged.deviation(naive(ragged, sp), exact) > 0.01
        assert even.deviation(naive(even, sp), one_process(even, "token-mean")) < 1e-12
        assert_equals_one_process(ragged, "token-mean", num_groups=8 // sp, sp=sp)
        assert_equals_one_process(ragged, "token-mean", num_groups=16, sp=sp)
    one, two, eight = (naive(ragged, sp) for sp in (1, 2, 8))
    assert min(ragged.deviation(one, two), ragged.deviation(two, eight), ragged.deviation(one, eight)) > 0.01


@pytest.mark.parametrize("aggregation", ["seq-mean-token-sum", "seq-mean-token-mean"])
@pytest.mark.parametrize(("dp", "sp"), [(2, 1), (4, 1), (2, 2), (4, 4)])
def test_verl_denominator_of_sequence_means(ragged: Batch, aggregation: Aggregation, dp: int, sp: int) -> None:
    """verl pull request 5798 multiplied the number of sequences by dp_size instead of the loss, whose gradient is
    averaged over the ranks: the result is too small by dp_size squared."""
    sequences = ragged.token_losses().sum(dim=1)
    if aggregation == "seq-mean-token-mean":
        sequences = sequences / ragged.mask.sum(dim=1)
    ranks = [sequences[group[0].rows].sum() / (NUM_SEQUENCES * dp) for group in cuts(dp, sp)]
    averaged, exact = torch.stack(ranks).mean(), one_process(ragged, aggregation)
    assert averaged.item() / exact.item() == pytest.approx(dp**-2)
    assert ragged.deviation(averaged, exact) > 0.01
    assert_equals_one_process(ragged, aggregation, num_groups=dp, sp=sp)


@pytest.mark.parametrize(("dp", "sp"), [(2, 2), (1, 8), (4, 4)])
def test_the_number_of_data_parallel_ranks_leaves_out_sequence_parallel_ones(ragged: Batch, dp: int, sp: int) -> None:
    """VeOmni pull request 338 compensated by dp, although the gradient is averaged over dp x sp ranks."""
    losses = ragged.token_losses()
    ranks = [cut.of(losses).sum() / NUM_SEQUENCES * dp for group in cuts(dp, sp) for cut in group]
    averaged, exact = torch.stack(ranks).mean(), one_process(ragged, "seq-mean-token-sum")
    assert averaged.item() / exact.item() == pytest.approx(1 / sp)
    assert ragged.deviation(averaged, exact) > 0.01
    assert_equals_one_process(ragged, "seq-mean-token-sum", num_groups=dp, sp=sp)


@pytest.mark.parametrize("sp", [2, 4, 8])
def test_a_sequence_counted_on_every_rank_that_holds_a_piece_of_it(ragged: Batch, sp: int) -> None:
    """The number of non-empty sequences is taken from sliced masks."""
    parts = [cut for group in cuts(4, sp) for cut in group]
    counted = torch.stack([cut.of(ragged.mask).any(dim=1).sum() for cut in parts]).sum()
    exact = one_process(ragged, "seq-mean-token-sum")
    assert ragged.deviation(ragged.token_losses().sum() / counted, exact) > 0.01
    assert_equals_one_process(ragged, "seq-mean-token-sum", num_groups=4, sp=sp)


@pytest.mark.parametrize(("dp", "sp"), [(1, 2), (2, 4), (1, 8)])
def test_deepspeed_ulysses_gradients_scaled_by_the_sequence_parallel_size(
    ragged: Batch, even: Batch, dp: int, sp: int
) -> None:
    """DeepSpeed issue 5248: each rank's loss is the mean over its slice, and the sum of the gradients over dp x sp
    ranks is divided by dp."""

    def reduced(batch: Batch) -> Tensor:
        losses = batch.token_losses()
        ranks = [token_mean(cut.of(losses), cut.of(batch.mask)) for group in cuts(dp, sp) for cut in group]
        return torch.stack(ranks).sum() / dp

    for batch in (ragged, even):
        assert batch.deviation(reduced(batch), one_process(batch, "token-mean")) > 0.01
        assert_equals_one_process(batch, "token-mean", num_groups=dp, sp=sp)
    # an additional division by sp is right for full rows only
    assert even.deviation(reduced(even) / sp, one_process(even, "token-mean")) < 1e-12
    assert ragged.deviation(reduced(ragged) / sp, one_process(ragged, "token-mean")) > 0.01


@pytest.mark.parametrize("dp", [2, 4, 8])
def test_torchtnt_ranks_that_hold_different_numbers_of_tokens(ragged: Batch, even: Batch, dp: int) -> None:
    """Data-parallel wrappers average the ranks' gradients, each of a mean over that rank's own tokens."""

    def averaged(batch: Batch) -> Tensor:
        losses = batch.token_losses()
        return torch.stack([token_mean(losses[g[0].rows], batch.mask[g[0].rows]) for g in cuts(dp, 1)]).mean()

    assert ragged.deviation(averaged(ragged), one_process(ragged, "token-mean")) > 0.01
    assert even.deviation(averaged(even), one_process(even, "token-mean")) < 1e-12
    assert_equals_one_process(ragged, "token-mean", num_groups=dp, sp=1)


def assert_equals_one_process(batch: Batch, aggregation: Aggregation, num_groups: int, sp: int) -> None:
    """Compares loss and gradient of pairs with those of one process (to the rounding of float32 weights)."""
    exact, found = one_process(batch, aggregation), by_pairs(batch, aggregation, num_groups, sp)
    assert found.item() == pytest.approx(exact.item(), rel=1e-6)
    assert batch.deviation(found, exact) < 1e-6
