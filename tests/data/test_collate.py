"""Rows of several samples: expected values of each position, by hand."""

from dataclasses import replace

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from mtrain.config.schema.loss import LossSection
from mtrain.core.batch.batch import Microbatch
from mtrain.core.batch.collate import Place, RowForm, collate, loss_terms
from mtrain.core.batch.sample import Sample, shifted

TERMS = loss_terms(LossSection(aggregation="seq-mean-token-mean", side_terms={"all": {"aggregation": "sum"}}))
FORM = RowForm(8, TERMS, is_packed=True, isolates_documents=True, with_padding=True)


def sample(first: int, length: int, mask: list[float] | None = None, weight: float = 1.0) -> Sample:
    """Builds a sample of the tokens first, first + 1, ..."""
    counts = np.ones(length) if mask is None else np.array(mask, np.float64)
    return shifted(np.arange(first, first + length + 1), counts, weight)


def listed(tensor: Tensor | None) -> list[list[float]]:
    assert tensor is not None
    found: list[list[float]] = tensor.tolist()
    return found


def test_each_sample_of_a_row_starts_again_and_predicts_its_own_last_label() -> None:
    batch = collate([[sample(10, 3), sample(20, 2)], [sample(30, 8)]], FORM, None)
    assert listed(batch.tokens)[0] == [10, 11, 12, 20, 21, 0, 0, 0]
    assert listed(batch.labels)[0] == [11, 12, 13, 21, 22, 0, 0, 0], "never the first token of the next sample"
    assert listed(batch.positions) == [[0, 1, 2, 0, 1, 0, 1, 2], list(range(8))]
    assert listed(batch.document_starts)[0] == [0, 0, 0, 3, 3, 5, 5, 5], "padding is a document of its own"
    assert listed(batch.sequence_ids) == [[0, 0, 0, 1, 1, 1, 1, 1], [2] * 8]
    assert listed(batch.is_padding) == [[False] * 5 + [True] * 3, [False] * 8]
    assert (batch.num_sequences, batch.num_padding_tokens, batch.num_loss_tokens) == (3, 3, 13)


def test_each_sample_has_weights_and_a_share_of_its_own() -> None:
    rows = [[sample(10, 3, [0, 1, 1]), sample(20, 2, [0, 0]), sample(30, 2, [0.5, 0.5], weight=4.0)], []]
    batch = collate(rows, FORM, Place(0, 2))
    assert listed(batch.weights["main"])[0] == [0, 0.5, 0.5, 0, 0, 2, 2, 0]
    assert listed(batch.denominator_weights["main"])[0] == [1, 0, 0, 0, 0, 4, 0, 0], "one is empty"
    assert listed(batch.denominator_weights["all"]) == [[0, 0, 0, 0, 0, 1, 0, 0], [0] * 8], "slot 0 is the third one"
    assert listed(batch.sequence_ids)[1] == [3] * 8
    assert batch.num_sequences == 4, "a filler row differs from all others"


def test_a_sample_without_text_has_one_position_of_padding_that_carries_its_share() -> None:
    counted = {name: term.model_copy(update={"empty_sequences": "include"}) for name, term in TERMS.items()}
    row = [sample(10, 2), sample(20, 0, weight=3.0), sample(30, 1)]
    batch = collate([row], replace(FORM, terms=counted), None)
    assert [each.width for each in row] == [2, 1, 1]
    assert listed(batch.tokens)[0] == [10, 11, 0, 30, 0, 0, 0, 0]
    assert listed(batch.is_padding)[0] == [False, False, True, False] + [True] * 4
    assert listed(batch.denominator_weights["main"])[0] == [1, 0, 3, 1, 0, 0, 0, 0]


def test_tokens_ahead_stay_in_their_sample() -> None:
    (targets,) = collate([[sample(10, 3), sample(20, 2)]], replace(FORM, num_predictions=2), None).mtp
    assert listed(targets.tokens)[0] == [11, 12, 0, 21, 0, 0, 0, 0]
    assert listed(targets.labels)[0] == [12, 13, 0, 22, 0, 0, 0, 0]
    assert listed(targets.is_padding)[0] == [False, False, True, False] + [True] * 4


def test_documents_of_a_sample_are_kept_apart_where_they_are_isolated() -> None:
    cut = replace(sample(20, 4), document_starts=np.array([0, 0, 2, 2], np.int32))
    batch = collate([[sample(10, 3), cut]], FORM, None)
    assert listed(batch.document_starts)[0] == [0, 0, 0, 3, 3, 5, 5, 7]
    assert listed(batch.positions)[0] == [0, 1, 2, 0, 1, 0, 1, 0]
    assert listed(batch.sequence_ids)[0] == [0, 0, 0, 1, 1, 1, 1, 1], "one sequence all the same"


@given(st.lists(st.lists(st.integers(0, 4), max_size=2), min_size=1, max_size=4))
def test_a_row_alone_and_among_others_is_the_same(lengths: list[list[int]]) -> None:
    rows = [[sample(10 * row, length) for length in each] for row, each in enumerate(lengths)]
    whole = collate(rows, FORM, None)
    for number, row in enumerate(rows):
        _assert_row(whole, number, collate([row], FORM, None))
    alone = collate([[each] for row in rows for each in row if each.width], FORM, None) if any(rows) else whole
    for term in TERMS:
        for name in ("weights", "denominator_weights"):
            own, other = (getattr(batch, name)[term].double().sum() for batch in (whole, alone))
            assert own == other, "packing changes no weight and no share"


def _assert_row(whole: Microbatch, number: int, alone: Microbatch) -> None:
    for path, tensor in alone.tensors().items():
        own = whole.tensors()[path][number]
        expected = tensor[0] + (own[0] if path == ("sequence_ids",) else 0)
        assert torch.equal(own, expected), path
