"""Raw samples, their rows, their order and their denominators, each by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mtrain.config.schema.loss import TermSection
from mtrain.data.formats.megatron_indexed import writing_corpus
from mtrain.verify.reference.aggregation import Divisor, divisor, token_weights
from mtrain.verify.reference.order import Draw, Shares, broken_order, is_permutation
from mtrain.verify.reference.text import RawCorpus, Text, num_lines, objects, rows_of, text_of


def test_a_window_is_cut_from_documents_in_the_order_that_is_given(tmp_path: Path) -> None:
    prefix = str(tmp_path / "corpus")
    with writing_corpus(prefix, vocab_size=100) as writer:
        for document in ([1, 2, 3], [10], [20, 21, 22, 23]):
            writer.add(np.array(document))
    corpus = RawCorpus.open(prefix)
    assert corpus.num_documents == 3
    order = np.array([2, 0, 1])  # 20 21 22 23 | 1 2 3 | 10
    first, second = (corpus.window(order, index, 3, isolate=True) for index in (0, 1))
    assert (first.ids.tolist(), first.edges) == ([20, 21, 22, 23], ())
    assert (second.ids.tolist(), second.edges) == ([23, 1, 2, 3], (1,))
    assert corpus.window(order, 1, 3, isolate=False).edges == ()
    assert corpus.window(order, 0, 7, isolate=True).edges == (4, 7)


class Letters:
    """A tokenizer of letters."""

    begin_ids, eos_id, pad_id = (1,), 2, 3

    def encode(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]


@pytest.mark.parametrize(
    ("found", "ids", "counts"),
    [
        ({"prompt": "a", "response": "bc"}, [1, 97, 98, 99, 2], [0, 0, 1, 1, 1]),
        (
            {"messages": [{"role": "assistant", "content": "a"}]},
            [1, *b"### assistant\n", 97, 2],
            [0] * 15 + [1, 1],
        ),
        (
            {"messages": [{"role": "user", "content": "a"}, {"role": "tool", "content": "b"}]},
            [1, *b"### user\n", 97, *b"\n\n### tool\n", 98],
            [0] * 23,
        ),
    ],
    ids=["prompt", "answer", "no answer"],
)
def test_answers_alone_count(found: dict[str, Any], ids: list[int], counts: list[float]) -> None:
    text = text_of(found | {"weight": 0.5}, Letters(), 100)  # type: ignore[arg-type]
    assert (text.ids.tolist(), text.counts.tolist(), text.weight) == (ids, counts, 0.5)
    assert text_of(found, Letters(), 3).ids.tolist() == ids[:4]  # type: ignore[arg-type]


def test_lines_are_found_by_number(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_text('{"n": 0}\n{"n": 1}\n{"n": 2}')
    assert num_lines(path) == 3
    assert objects(path, {0, 2}) == {0: {"n": 0}, 2: {"n": 2}}


def test_a_row_restarts_at_edges_and_predicts_nothing_over_them() -> None:
    text = Text(np.array([5, 6, 7, 8, 9]), np.array([0.0, 1.0, 0.5, 1.0, 0.0]), edges=(2,))
    rows = rows_of([text], seq_length=6, vocab_size=8, device=torch.device("cpu"))
    assert rows.tokens.tolist() == [[5, 6, 7, 0, 0, 0]]
    assert rows.labels.tolist() == [[6, 0, 0, 0, 0, 0]]
    assert rows.weights.tolist() == [[1.0, 0.0, 1.0, 0.0, 0.0, 0.0]]
    assert rows.documents.tolist() == [[0, 0, 1, 1, -1, -1]]
    assert rows.positions.tolist()[0][:4] == [0, 1, 0, 1]
    ahead = rows.ahead(1)
    assert ahead.tokens.tolist() == [[6, 0, 0, 0, 0, 0]]
    assert ahead.is_text.tolist() == [[True, False, True, False, False, False]]
    assert ahead.weights.tolist() == [[0.0] * 6]


WEIGHTS = torch.tensor([[1.0, 3.0, 0.0], [0.0, 0.0, 0.0], [0.0, 0.25, 0.75]], dtype=torch.float64)
SAMPLES = torch.tensor([2.0, 5.0, 3.0], dtype=torch.float64)


@pytest.mark.parametrize(
    ("term", "first", "last", "denominator"),
    [
        (TermSection(aggregation="token-mean"), 6.0, 2.25, 11.0),
        (TermSection(aggregation="seq-mean-token-sum"), 6.0, 2.25, 5.0),
        (TermSection(aggregation="seq-mean-token-sum", empty_sequences="include"), 6.0, 2.25, 10.0),
        (TermSection(aggregation="seq-mean-token-mean"), 1.5, 2.25, 5.0),
        (TermSection(aggregation="seq-mean-token-mean", empty_sequences="include"), 1.5, 2.25, 10.0),
        (TermSection(aggregation="seq-mean-token-sum-norm", norm_length=4), 1.5, 0.5625, 5.0),
        (TermSection(aggregation="token-sum-norm", norm_length=4), 1.5, 0.5625, 1.0),
        (TermSection(aggregation="seq-mean-token-sqrt"), 3.0, 2.25, 7.0),
        (TermSection(aggregation="seq-mean-token-power", length_power=0.25), 6 / 2**0.5, 2.25, 2 * 2**1.5 + 3),
        (TermSection(aggregation="sum"), 6.0, 2.25, 1.0),
    ],
    ids=lambda value: value.aggregation if isinstance(value, TermSection) else None,
)
def test_aggregations_by_hand(term: TermSection, first: float, last: float, denominator: float) -> None:
    found = token_weights(WEIGHTS, SAMPLES, term)
    assert (float(found[0, 1]), float(found[2, 2])) == pytest.approx((first, last), rel=1e-15)
    assert divisor(WEIGHTS, SAMPLES, term).value == pytest.approx(denominator, rel=1e-15)


@pytest.mark.parametrize(
    ("shares", "is_exact"),
    [
        ((1.0, 2.0, 0.0), True),
        ((0.5, 0.125, 2.5), True),
        ((0.7, 0.7, 0.25, 2.5, 0.85), False),
        ((0.1,) * 10, False),
        ((2.0**52, 2.0**52), False),
        ((2.0**52, 1.0), True),
        ((5e-324, 1.0), False),
        ((), True),
    ],
    ids=str,
)
def test_sums_are_exact_where_no_part_of_them_is_rounded(shares: tuple[float, ...], is_exact: bool) -> None:
    assert Divisor(shares).is_exact == is_exact


def turns(*indices: int, size: int) -> list[Draw]:
    return [Draw(0, number // size, index) for number, index in enumerate(indices)]


@pytest.mark.parametrize(
    ("found", "part_of_message"),
    [
        (turns(2, 0, 1, 1, 2, size=3), None),
        (turns(2, 0, 2, size=3), "appears twice in an epoch"),
        (turns(2, 0, 3, size=3), "the order asks for others"),
        ([Draw(0, 0, 0), Draw(0, 1, 0)], "an epoch ends before"),
        ([Draw(1, 0, 0), Draw(1, 0, 1), Draw(1, 0, 2)], "but its share is 0.5"),
    ],
    ids=["sound", "twice", "outside", "short epoch", "share"],
)
def test_an_order_of_samples_visits_each_once(found: list[Draw], part_of_message: str | None) -> None:
    num_sources = 1 + max(turn.source for turn in found)
    said = list(broken_order(found, [3] * num_sources, [Shares(0, dict.fromkeys(range(num_sources), 1.0))]))
    assert not said if part_of_message is None else any(part_of_message in each for each in said)


def test_documents_come_once() -> None:
    assert is_permutation(np.array([2, 0, 1]), 3)
    assert not is_permutation(np.array([2, 0, 0]), 3)
    assert not is_permutation(np.array([0, 1]), 3)
