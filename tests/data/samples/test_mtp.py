"""Inputs and labels of multi-token prediction, cut from whole rows."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from mtrain.config.schema.loss import LossSection, depth_term
from mtrain.core.batch.collate import Place, RowForm, collate, loss_terms, mtp_sample, values_ahead
from mtrain.core.batch.sample import Sample, shifted


@given(st.lists(st.integers(1, 6), min_size=1, max_size=6), st.integers(1, 7))
def test_values_move_inside_their_document_alone(lengths: list[int], depth: int) -> None:
    starts = np.repeat(np.cumsum([0, *lengths[:-1]]), lengths).astype(np.int32)
    values = np.arange(1, len(starts) + 1)
    expected: list[int] = []
    for length in lengths:
        document = list(range(len(expected) + 1, len(expected) + length + 1))
        expected += [*document[depth:], *[0] * min(depth, length)]
    assert values_ahead(values, starts, depth).tolist() == expected


def test_each_depth_predicts_the_token_after_the_one_it_sees() -> None:
    text = np.array([5, 6, 7, 8, 9])
    sample = shifted(text, np.array([0.0, 1.0, 0.5, 1.0]), weight=2.0)
    one, two = (mtp_sample(sample, np.zeros(4, np.int32), depth) for depth in (1, 2))
    assert (one.tokens.tolist(), one.labels.tolist()) == ([6, 7, 8, 0], [7, 8, 9, 0])
    assert one.mask.tolist() == [1.0, 0.5, 1.0, 0.0]
    assert (two.labels.tolist(), two.mask.tolist()) == ([8, 9, 0, 0], [0.5, 1.0, 0.0, 0.0])
    assert two.weight == 2.0


def test_depths_are_aggregated_as_the_main_term_over_their_own_tokens() -> None:
    starts = np.array([0, 0, 0, 3, 3, 3], np.int32)
    row = Sample(np.arange(6), np.arange(1, 7), np.array([1.0, 0, 0, 1, 1, 0]), 3.0, document_starts=starts)
    terms = loss_terms(LossSection(aggregation="seq-mean-token-mean"))
    form = RowForm(6, terms, isolates_documents=True, with_padding=True, num_predictions=3)
    batch = collate([[row], []], form, Place(0, 0))
    weights, shares = batch.weights, batch.denominator_weights
    assert weights["main"].tolist() == [[1, 0, 0, 1, 1, 0], [0] * 6]
    assert weights[depth_term(1)].tolist() == [[0, 0, 0, 3, 0, 0], [0] * 6], "one token is left of three"
    assert [float(shares[term].sum()) for term in ("main", "mtp_1", "mtp_2")] == [3, 3, 0], "then none is left"
    first, second = batch.mtp
    assert first.tokens.tolist() == [[1, 2, 0, 4, 5, 0], [0] * 6]
    assert second.labels.tolist() == [[3, 0, 0, 6, 0, 0], [0] * 6]
    assert second.is_padding is not None
    assert second.is_padding.tolist() == [[False, True, True, False, True, True], [True] * 6]
