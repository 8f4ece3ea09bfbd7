"""Records as token ids, by hand: a is 4, b is 5, ..."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mtrain.base.errors import DataError
from mtrain.config import Config
from mtrain.config.schema.data import SftSection
from mtrain.data.encoding.encoder import encoder_of
from mtrain.data.samples.tokenized import SampleEncoder
from mtrain.tokenizer import load_tokenizer


@pytest.fixture
def encoder(word_tokenizer: Path, make_config: Callable[..., Config]) -> Callable[..., SampleEncoder]:
    def build(**keys: Any) -> SampleEncoder:
        data = {"kind": "sft", "train": [{"path": "x"}], "tokenizer": str(word_tokenizer), **keys}
        section = make_config(data).data
        assert isinstance(section, SftSection)
        return encoder_of(section, load_tokenizer(word_tokenizer))

    return build


def test_prompt_and_response(encoder: Callable[..., SampleEncoder]) -> None:
    sample = encoder().encode({"prompt": "a b", "response": "c d e", "weight": 0.5})
    assert sample.ids.tolist() == [1, 4, 5, 6, 7, 8, 2]
    assert sample.loss_weights.tolist() == [0, 0, 0, 1, 1, 1, 1]
    assert sample.weight == 0.5


def test_plain_messages(encoder: Callable[..., SampleEncoder]) -> None:
    sample = encoder().encode({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]})
    assert sample.ids.tolist() == [1, 14, 15, 4, 14, 16, 5, 2]
    assert sample.loss_weights.tolist() == [0, 0, 0, 0, 0, 0, 1, 1]


def test_the_fingerprint_of_a_plain_form_is_that_of_its_tokenizer(
    encoder: Callable[..., SampleEncoder], word_tokenizer: Path
) -> None:
    """So that a run of version 0.1.0 knows its data again."""
    assert encoder().fingerprint == load_tokenizer(word_tokenizer).fingerprint


def test_an_unknown_key_is_refused_unless_it_is_named(encoder: Callable[..., SampleEncoder]) -> None:
    record = {"prompt": "a", "response": "b", "id": 1}
    with pytest.raises(DataError, match=r"has the key 'id', which is not read.*data.ignore_keys"):
        encoder().encode(record)
    assert encoder(ignore_keys=["id"]).encode(record).ids.tolist() == [1, 4, 5, 2]
