"""Templates of nine formats: the ids are those of transformers, and the texts in the loss were checked by a person."""

from __future__ import annotations

import datetime
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jinja2
import pytest
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast
from transformers.utils import chat_template_utils

from mtrain.base.errors import DataError
from mtrain.core.batch.sample import TokenizedSample
from tests.data.chat.cases import CONVERSATIONS, DAY, ENDS, NAMES, SPECIAL, trained_texts
from tests.data.chat.conftest import MakeEncoder
from tests.messages import refuses

GOLDEN: dict[str, dict[str, list[str] | str]] = json.loads(
    (Path(__file__).parent / "trained_texts.json").read_text(encoding="utf-8")
)
"""Template -> conversation -> the texts in the loss, or why it is refused."""


class _Day(datetime.datetime):
    @classmethod
    def now(cls, tz: datetime.tzinfo | None = None) -> _Day:
        return cls.fromisoformat(DAY)


@pytest.fixture
def theirs(template_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    monkeypatch.setattr(chat_template_utils, "datetime", _Day)  # the day of the test is no day of ours

    def load(name: str) -> Any:
        folder = template_folder(name)
        return PreTrainedTokenizerFast(
            tokenizer_file=str(folder / "tokenizer.json"),
            bos_token="<|begin_of_text|>",
            eos_token=ENDS.get(name, "<|im_end|>"),
            pad_token="<pad>",
            chat_template=(folder / "chat_template.jinja").read_text(encoding="utf-8"),
        )

    return load


@pytest.mark.parametrize("name", NAMES)
def test_ids_are_those_of_transformers(name: str, chat_encoder: MakeEncoder, theirs: Callable[[str], Any]) -> None:
    judge, encoder, count = theirs(name), chat_encoder(name, loss_on="last_answer"), 0
    for conversation, record in CONVERSATIONS.items():
        try:
            found = encoder.encode(record).ids.tolist()
        except DataError:
            assert isinstance(GOLDEN[name][conversation], str), "refused"
            continue
        expected = judge.apply_chat_template(record["messages"], tools=record.get("tools"), return_dict=False)
        if name == "glm4":  # its stop token belongs to the next message, and none follows the last one
            assert found.pop() == judge.eos_token_id
        assert found == expected, conversation
        count += 1
    assert count >= 3


@pytest.mark.parametrize("name", NAMES)
def test_what_a_template_refuses_is_refused(name: str, chat_encoder: MakeEncoder, theirs: Callable[[str], Any]) -> None:
    judge = theirs(name)
    for conversation, record in CONVERSATIONS.items():
        try:
            judge.apply_chat_template(record["messages"], tools=record.get("tools"))
        except (jinja2.TemplateError, TypeError):
            assert "refuses" in GOLDEN[name][conversation]
            with refuses(DataError):
                chat_encoder(name).encode(record)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_in_the_loss_is_what_a_person_read(name: str, chat_encoder: MakeEncoder, chat_tokenizer: Path) -> None:
    decoder, found = Tokenizer.from_file(str(chat_tokenizer)), {}
    for conversation, record in CONVERSATIONS.items():
        found[conversation] = outcome(functools.partial(chat_encoder(name).encode, record), decoder)
    assert found == GOLDEN[name]


def outcome(encode: Callable[[], TokenizedSample], decoder: Tokenizer) -> list[str] | str:
    """Returns the texts in the loss, or the beginning of the message."""
    try:
        return trained_texts(encode(), decoder)
    except DataError as fault:
        return str(fault).partition(";")[0]


def test_the_tokenizer_of_these_tests_knows_the_tokens(chat_tokenizer: Path) -> None:
    model = Tokenizer.from_file(str(chat_tokenizer))
    assert all(len(model.encode(token, add_special_tokens=False).ids) == 1 for token in SPECIAL)
