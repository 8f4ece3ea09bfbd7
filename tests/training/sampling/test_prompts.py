"""Prompts are encoded like training data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from mtrain.base.errors import DataError
from mtrain.config.schema.data import SftSection
from mtrain.data.encoding.encoder import RecordEncoder
from mtrain.hf.tokenizer.tokenizer import load_tokenizer
from mtrain.training.sampling.prompts import questions_of, read_prompts
from tests.messages import refuses
from tests.training.sampling.test_generate import finetuning

WORDS = ["<unk>", "</s>", "<end>", "user", "assistant", "system", "tool", "a", "b", "<", "end", ">", "on", "search"]
TEMPLATE = (
    "{% if tools %}tool {% for t in tools %}{{ t.function.name }} {% endfor %}{% endif %}"
    "{% if mode %}{{ mode }} {% endif %}"
    "{% for m in messages %}{{ m.role }} {{ m.content }} <end> {% endfor %}"
    "{% if add_generation_prompt %}assistant {% endif %}"
)
TOOLS = [{"type": "function", "function": {"name": "search", "parameters": {}}}]


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    model = Tokenizer(models.WordLevel({word: id_ for id_, word in enumerate(WORDS)}, unk_token="<unk>"))
    model.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Punctuation()])
    model.add_special_tokens(["</s>", "<end>"])
    model.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    return tmp_path


TEXTS = ["a b", "a <end> b", "b</s>", "a\r\nb"]
MORE: list[dict[str, Any]] = [
    {"tools": TOOLS},
    {},
    {"tools": json.dumps(TOOLS)},
    {"chat_template_kwargs": {"mode": "on"}},
    {"note": 1},
]
BY_DAY = [*zip(TEXTS, MORE), (TEXTS[0], MORE[-1])]
"""Each text and each field once; special tokens in text: test_a_text_is_the_prompt_of_its_sample."""


@pytest.mark.parametrize(
    ("text", "more", "options"),
    [
        pytest.param(text, more, options, marks=[] if (text, more) in BY_DAY and not options else [pytest.mark.nightly])
        for options in ({}, {"special_tokens_in_text": True})
        for more in MORE
        for text in TEXTS
    ],
)
def test_a_question_is_the_beginning_of_its_sample(
    tokenizer: Path, text: str, more: dict[str, Any], options: dict[str, Any]
) -> None:
    config = finetuning(tokenizer, ignore_keys=["note"], **options)
    assert isinstance(config.data, SftSection)
    model = load_tokenizer(tokenizer)
    asked = [{"role": "system", "content": "b"}, {"role": "user", "content": text}]
    answer = {"role": "assistant", "content": "a"}
    sample = RecordEncoder(config.data, model).encode({"messages": [*asked, answer], **more})
    start = int(sample.loss_weights.nonzero()[0][0])
    for record in ({"messages": asked, **more}, {"prompt": asked, **more}):
        path = tokenizer / "asked.jsonl"
        path.write_text("\ufeff" * 0 + json.dumps(record) + "\r\n")
        (question,) = questions_of(config, model, read_prompts(path), as_chat=None)
        assert question.ids == sample.ids[:start].tolist()


@pytest.mark.parametrize("options", [{}, {"special_tokens_in_text": True}])
@pytest.mark.parametrize("text", ["a b", "a <end> b", "</s>"])
def test_a_text_is_the_prompt_of_its_sample(tokenizer: Path, text: str, options: dict[str, Any]) -> None:
    config, model = finetuning(tokenizer, **options), load_tokenizer(tokenizer)
    assert isinstance(config.data, SftSection)
    sample = RecordEncoder(config.data, model).encode({"prompt": text, "response": "a"})
    (question,) = questions_of(config, model, [text], as_chat=False)
    assert question.ids == sample.ids[: len(question.ids)].tolist()
    assert sample.loss_weights[len(question.ids)] == 1


def test_unknown_keys_are_refused_as_in_training(tokenizer: Path) -> None:
    config, model = finetuning(tokenizer), load_tokenizer(tokenizer)
    for record in ({"prompt": "a", "note": 1}, {"messages": [{"role": "user", "content": "a"}], "note": 1}):
        with refuses(DataError, "'a'", "'note'"):
            questions_of(config, model, [record], as_chat=True)
    with refuses(DataError, "messages[0]", "'colour'"):
        questions_of(config, model, [[{"role": "user", "content": "a", "colour": 1}]], as_chat=True)


def test_only_the_end_of_a_line_ends_a_prompt(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_bytes("\ufeffone\u2028two\x0cthree\r\nfour\n\n".encode())
    assert read_prompts(path) == ["one\u2028two\x0cthree", "four"]
