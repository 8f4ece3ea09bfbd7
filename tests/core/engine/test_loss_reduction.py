"""What a step reports: its losses and counts of tokens, which are of the global batch and the same on every rank."""

import math

import pytest

from mtrain.config.schema.loss import MAIN_TERM
from mtrain.core.engine.loss_reduction import NO_TOKENS, StepTotals, TermTotals, TokenCounts
from tests.core.engine.token_ranks import counted
from tests.parity.batches import SEQ, cut, three_steps
from tests.parity.cases import Case, case
from tests.pool import Pool

COEFFICIENTS = {MAIN_TERM: 1.0, "z": 0.25}


def totals(**terms: tuple[float, float]) -> StepTotals:
    """Builds totals from (numerator, denominator) by term; the squared norm is 36."""
    found = {term: TermTotals(*pair, planned=pair[1]) for term, pair in terms.items()}
    return StepTotals(found, False, NO_TOKENS, 64, 36.0, COEFFICIENTS)


def test_the_objective_adds_means_by_their_coefficients() -> None:
    step = totals(main=(6.0, 4.0), z=(14.0, 7.0))
    assert (step.loss, step.objective) == (1.5, 2.0)
    assert step.grad_norm == 6.0 / 4.0


def test_an_empty_term_reports_0() -> None:
    step = totals(main=(6.0, 4.0), z=(0.0, 0.0))
    assert step.terms["z"].mean == 0.0
    assert step.objective == 1.5


def test_an_empty_batch_has_no_gradient() -> None:
    step = totals(main=(0.0, 0.0), z=(3.0, 1.0))
    assert step.is_empty
    assert step.grad_norm == 0.0
    assert not math.isnan(step.loss)


@pytest.mark.parametrize(
    "case",
    [
        case(4, num_layers=1, cp=2, dp=2),
        # tensor ranks and stages count by day below, packed
        pytest.param(case(4, num_layers=2, tp=2, sp=True, pp=2), marks=pytest.mark.nightly),
        pytest.param(case(4, pp=2, vpp=2, dp=2), marks=pytest.mark.nightly),
    ],
    ids=str,
)
def test_every_rank_knows_the_counts_of_the_global_batch(pool: Pool, case: Case) -> None:
    """The counts also hold in fp16, where a step scales the losses that travel with them."""
    batch = [cut(sample, SEQ - slot) for slot, sample in enumerate(three_steps()[0])]
    text, padding = sum(SEQ - slot for slot in range(len(batch))), sum(range(len(batch)))
    loss = sum(int((sample.mask > 0).sum()) for sample in batch if sample.weight > 0)
    pairs = sum(length * (length + 1) // 2 for length in range(SEQ - len(batch) + 1, SEQ + 1))
    wanted = text, TokenCounts(padding, loss, pairs, window_pairs=pairs, outputs=loss)
    assert 0 < wanted[1].loss < text
    scale = {"train__initial_loss_scale": 2.0**10}
    configs = [case.config(train__precision=precision, **scale) for precision in ("fp32", "fp16")]
    layout = case.resolved(configs[0])
    assert pool.run(counted, layout, configs, batch) == [[wanted] * len(configs)] * layout.world_size


@pytest.mark.parametrize(  # ranks that plan are those of dp in the test above
    "case", [pytest.param(case(2, 1, dp=2), marks=pytest.mark.nightly), case(2, 2, tp=2, sp=True, pp=2)], ids=str
)
def test_packing_leaves_text_and_loss_tokens_and_takes_padding_away(pool: Pool, case: Case) -> None:
    """The run is in fp16, where the numerators are scaled by what the packed batch plans."""
    batch = [cut(sample, 1 + 2 * slot) for slot, sample in enumerate(three_steps()[0])]
    fp16 = {"train__precision": "fp16", "train__initial_loss_scale": 2.0**10, "data__isolate_documents": True}
    configs = [case.config(**fp16), case.config(**fp16, data__packing={})]
    rows = list(zip(*pool.run(counted, case.resolved(configs[0]), configs, batch), strict=True))
    text, loss = sum(len(sample.tokens) for sample in batch), sum(int((sample.mask > 0).sum()) for sample in batch)
    assert {(found, tokens.loss) for each in rows for found, tokens in each} == {(text, loss)}
    # attention costs what it costs unpacked, whatever row a sample shares
    pairs = sum(len(sample.tokens) * (len(sample.tokens) + 1) // 2 for sample in batch)
    assert {tokens.pairs for each in rows for _, tokens in each} == {pairs}
    assert {tokens.padding for _, tokens in rows[0]} == {len(batch) * SEQ - text}
    assert max(tokens.padding for _, tokens in rows[1]) < (len(batch) * SEQ - text) / 2
