"""Questions and answers: what is learnt, by hand."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtrain.data.finetune import Conversations, Piece, check_object, tokenised
from mtrain.data.jsonl import Lines
from mtrain.errors import DataError
from mtrain.tokenizer import load_tokenizer

WriteJsonl = Callable[[Sequence[dict[str, Any]]], Path]


def conversations(
    path: Path,
    tokenizer: Path,
    seq_length: int,
    too_long: Literal["truncate", "drop", "refuse"] = "truncate",
    numbers: range | None = None,
) -> Conversations:
    lines = Lines(path, check_object)
    return Conversations(
        lines, range(len(lines)) if numbers is None else numbers, load_tokenizer(tokenizer), seq_length, too_long
    )


def test_only_the_answer_and_its_end_are_learnt(write_jsonl: WriteJsonl, word_tokenizer: Path) -> None:
    """a b -> c d e, with <s> = 1, </s> = 2, <pad> = 3, a = 4, b = 5, ..."""
    rows = conversations(write_jsonl([{"prompt": "a b", "response": "c d e", "weight": 0.5}]), word_tokenizer, 8)
    row = rows.sample(0, 0)
    assert row.tokens.tolist() == [1, 4, 5, 6, 7, 8, 3, 3]
    assert row.labels.tolist() == [4, 5, 6, 7, 8, 2, 0, 0]
    assert row.mask.tolist() == [0, 0, 1, 1, 1, 1, 0, 0]
    assert row.weight == 0.5
    assert row.document_starts is None
    assert row.num_padding == 2  # the prompt is text, whatever is learnt of it


def test_only_the_assistants_messages_are_learnt(write_jsonl: WriteJsonl, word_tokenizer: Path) -> None:
    """### = 14, user = 15, assistant = 16, system = 17."""
    messages = [
        {"role": "system", "content": "j"},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b c"},
        {"role": "user", "content": "d"},
        {"role": "assistant", "content": "e"},
    ]
    row = conversations(write_jsonl([{"messages": messages}]), word_tokenizer, 20).sample(0, 0)
    assert row.tokens.tolist() == [1, 14, 17, 13, 14, 15, 4, 14, 16, 5, 6, 2, 14, 15, 7, 14, 16, 8, 3, 3]
    assert row.labels.tolist() == [14, 17, 13, 14, 15, 4, 14, 16, 5, 6, 2, 14, 15, 7, 14, 16, 8, 2, 0, 0]
    assert row.mask.tolist() == [0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 0, 0, 0, 0, 0, 1, 1, 0, 0]
    assert row.weight == 1.0


@pytest.mark.parametrize(
    ("seq_length", "mask"),
    [
        (7, [0, 0, 1, 1, 1, 1, 0]),
        (6, [0, 0, 1, 1, 1, 1]),  # the end is the last label
        (5, [0, 0, 1, 1, 1]),
        (3, [0, 0, 1]),
        (2, [0, 0]),  # nothing is left to learn
    ],
)
def test_truncation_keeps_the_mask_on_the_answer(
    write_jsonl: WriteJsonl, word_tokenizer: Path, seq_length: int, mask: list[float]
) -> None:
    rows = conversations(write_jsonl([{"prompt": "a b", "response": "c d e"}]), word_tokenizer, seq_length)
    assert rows.sample(0, 0).mask.tolist() == mask
    assert rows.sample(0, 0).tokens.tolist() == [1, 4, 5, 6, 7, 8, 3][:seq_length]


def test_long_samples_are_dropped_or_refused_as_asked(write_jsonl: WriteJsonl, word_tokenizer: Path) -> None:
    path = write_jsonl(
        [{"prompt": "a", "response": "b"}, {"prompt": "a", "response": "b c"}, {"prompt": "c", "response": "d"}]
    )
    kept = conversations(path, word_tokenizer, 3, "drop")
    assert (len(kept), kept.num_dropped) == (2, 1)
    assert [kept.sample(0, index).tokens.tolist() for index in range(2)] == [[1, 4, 5], [1, 6, 7]]
    with pytest.raises(DataError, match=r"samples\.jsonl line 2: has 5 tokens, but data.seq_length=3 takes 4"):
        conversations(path, word_tokenizer, 3, "refuse")
    with pytest.raises(DataError, match=r"lines 1 to 3 hold no sample \(3 were dropped"):
        conversations(path, word_tokenizer, 2, "drop")


def test_a_part_of_the_lines_is_read_alone(write_jsonl: WriteJsonl, word_tokenizer: Path) -> None:
    path = write_jsonl([{"prompt": "a", "response": word} for word in "bcde"])
    rows = conversations(path, word_tokenizer, 4, numbers=range(2, 4))
    assert [rows.sample(0, index).labels.tolist() for index in range(len(rows))] == [[4, 7, 2, 0], [4, 8, 2, 0]]


@given(parts=st.lists(st.tuples(st.text("abc ", max_size=8), st.booleans(), st.booleans()), min_size=1, max_size=5))
def test_the_mask_counts_exactly_what_is_learnt(word_tokenizer: Path, parts: list[tuple[str, bool, bool]]) -> None:
    tokenizer = load_tokenizer(word_tokenizer)
    ids, learnt = tokenised([Piece(*part) for part in parts], tokenizer)
    assert len(ids) == len(learnt) == 1 + sum(len(text.split()) + ends for text, _, ends in parts)
    assert learnt.sum() == sum(len(text.split()) + ends for text, is_learnt, ends in parts if is_learnt)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"prompt": "a"}, r"line 1: has no 'response'; a line needs prompt and response, or messages"),
        ({"response": "a"}, r"line 1: has no 'prompt'"),
        ({"prompt": 3, "response": "a"}, r"line 1: 'prompt' is a int, but must be a text"),
        ({"prompt": "a", "response": None}, r"line 1: 'response' is a NoneType"),
        ({"prompt": "a", "response": ""}, r"line 1: 'response' is empty"),
        ({"prompt": "a", "response": "\ud800"}, r"line 1: 'response' holds half a surrogate pair"),
        ({"prompt": "a", "response": "b", "messages": []}, r"line 1: has messages beside prompt or response"),
        ({"messages": []}, r"line 1: 'messages' must be a list of at least one message"),
        ({"messages": ["a"]}, r"line 1: messages\[0\] needs an object with role and content"),
        (
            {"messages": [{"role": "bot", "content": "a"}]},
            r"messages\[0\] has the role 'bot', but must be one of system",
        ),
        ({"messages": [{"role": "user", "content": 1}]}, r"messages\[0\].content is a int"),
        ({"messages": [{"role": "user", "content": "a"}]}, r"'messages' has no answer by the role assistant"),
        ({"prompt": "a", "response": "b", "weight": -1}, r"line 1: 'weight' is -1, but must be a finite number"),
        ({"prompt": "a", "response": "b", "weight": True}, r"'weight' is True"),
        ({"prompt": "a", "response": "b", "weight": float("nan")}, r"'weight' is nan"),
    ],
)
def test_a_bad_sample_is_named(write_jsonl: WriteJsonl, line: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        Lines(write_jsonl([line]), check_object)


def test_a_line_that_changes_while_the_run_reads_it_is_named(write_jsonl: WriteJsonl, word_tokenizer: Path) -> None:
    path = write_jsonl([{"prompt": "a", "response": "b"}])
    rows = conversations(path, word_tokenizer, 4)
    path.write_text(path.read_text().replace("response", "reaction"))
    with pytest.raises(DataError, match=r"samples\.jsonl line 1: has no 'response'"):
        rows.sample(0, 0)
