"""Continuing a prompt."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from mtrain.base.errors import ConfigError
from mtrain.config import Config
from mtrain.tokenizer import load_tokenizer
from mtrain.training.sampling.prompts import questions_of
from tests.config.samples import config

WORDS = ["<unk>", "<s>", "</s>", "<end>", "a", "user", "assistant"]
TEMPLATE = (
    "{% for m in messages %}{{ m.role }} {{ m.content }} <end> {% endfor %}"
    "{% if add_generation_prompt %}assistant {% endif %}"
)


def word_tokenizer(folder: Path) -> None:
    """Writes a tokenizer of a few words."""
    model = Tokenizer(models.WordLevel({word: id_ for id_, word in enumerate(WORDS)}, unk_token="<unk>"))
    model.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    model.add_special_tokens(["<s>", "</s>", "<end>"])
    model.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    word_tokenizer(tmp_path)
    return tmp_path


def finetuning(tokenizer: Path, **data: Any) -> Config:
    given = {"kind": "sft", "seq_length": 8, "train": [{"path": "x"}], "tokenizer": str(tokenizer), **data}
    return config(data=given)


def test_a_prompt_may_be_a_question_in_the_chat_template_of_the_run(tokenizer: Path) -> None:
    (tokenizer / "chat_template.jinja").write_text(TEMPLATE)
    run, model = finetuning(tokenizer), load_tokenizer(tokenizer)
    text, question = questions_of(run, model, ["a"], as_chat=False)[0], questions_of(run, model, ["a"], as_chat=True)[0]
    assert (text.ids, text.stop_ids) == ([1, 4], frozenset({2}))
    assert (question.ids, question.stop_ids) == ([5, 4, 3, 6], frozenset({2, 3}))


def test_a_run_without_a_chat_template_asks_nothing(tokenizer: Path) -> None:
    for run in (finetuning(tokenizer), finetuning(tokenizer, chat_template="plain"), config()):
        with pytest.raises(ConfigError, match="the run has no chat template"):
            questions_of(run, load_tokenizer(tokenizer), ["a"], as_chat=True)
