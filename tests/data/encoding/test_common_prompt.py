"""End of the prompt in pairs whose answers hold it: the same as in TRL."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from trl.data_utils import extract_prompt

from mtrain.core.batch.sample import SampleEncoder
from tests.data.chat.cases import assistant, folder_of, user, write_tokenizer
from tests.data.encoding.test_preferences import BOS, EOS, A, B, C, encoder, sequences

TEXT = st.text("ab \né", max_size=6)
TURNS = st.lists(st.sampled_from([user("a"), assistant("b"), user("c")]), max_size=4)


@pytest.fixture(scope="module")
def of_pairs(tmp_path_factory: pytest.TempPathFactory) -> SampleEncoder:
    """Builds an encoder of bytes, so that each character has tokens of its own."""
    folder = tmp_path_factory.mktemp("bytes")
    write_tokenizer(folder)
    return encoder(folder_of("chatml", folder / "tokenizer.json", folder / "model"), "pairs")


def seen(of_pairs: SampleEncoder, record: dict[str, Any]) -> list[tuple[list[int], list[float]]]:
    found = of_pairs.encode(record)
    assert isinstance(found, tuple)
    return [(each.ids.tolist(), each.loss_weights.tolist()) for each in found]


def assert_as_trl(of_pairs: SampleEncoder, chosen: Any, rejected: Any) -> None:
    pair = {"chosen": chosen, "rejected": rejected}
    assert seen(of_pairs, pair) == seen(of_pairs, extract_prompt(pair))


@given(prompt=TEXT, chosen=TEXT, rejected=TEXT)
def test_the_prompt_of_two_texts_ends_where_that_of_trl_does(
    of_pairs: SampleEncoder, prompt: str, chosen: str, rejected: str
) -> None:
    if chosen != rejected:
        assert_as_trl(of_pairs, "Q" + prompt + chosen, "Q" + prompt + rejected)


@given(shorter=TEXT.filter(bool), more=TEXT.filter(bool), is_chosen=st.booleans())
def test_a_text_that_goes_on_where_the_other_ends_is_an_answer(
    of_pairs: SampleEncoder, shorter: str, more: str, is_chosen: bool
) -> None:
    pair = (shorter + more, shorter) if is_chosen else (shorter, shorter + more)
    assert_as_trl(of_pairs, *pair)


@given(before=TURNS, num_more=st.integers(1, 3), is_chosen=st.booleans())
def test_a_conversation_that_goes_on_where_the_other_ends_is_an_answer(
    of_pairs: SampleEncoder, before: list[Any], num_more: int, is_chosen: bool
) -> None:
    shorter = [*before, assistant("d")]
    longer = [*shorter, *[user("e"), assistant("f")] * num_more]
    assert_as_trl(of_pairs, *((longer, shorter) if is_chosen else (shorter, longer)))


@pytest.mark.parametrize("is_chosen", [True, False])
def test_the_last_piece_of_the_shorter_text_is_in_the_loss(word_tokenizer: Path, is_chosen: bool) -> None:
    texts = ["a b c", "a b"] if is_chosen else ["a b", "a b c"]
    pair = sequences(word_tokenizer, "pairs", dict(zip(("chosen", "rejected"), texts)))
    longer, shorter = pair if is_chosen else reversed(pair)
    assert longer.ids.tolist() == [BOS, A, B, C, EOS]
    assert shorter.ids.tolist() == [BOS, A, B, EOS]
    assert longer.loss_weights.tolist() == [0, 0, 1, 1, 1]
    assert shorter.loss_weights.tolist() == [0, 0, 1, 1]
