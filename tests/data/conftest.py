"""Small tokenizers and corpora."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

import mtrain.core.ranks  # noqa: F401 - its CPU emulation has to be there before megatron-core is imported
from mtrain.config import Config
from mtrain.data.formats.megatron_indexed import writing_corpus

WORDS = ["<unk>", "<s>", "</s>", "<pad>", *"abcdefghij", "###", "user", "assistant", "system"]
"""Token ids are positions in this list: a is 4, b is 5, ..."""


@pytest.fixture(scope="session")
def word_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Writes a tokenizer.json of whole words, so that ids can be written by hand."""
    folder = tmp_path_factory.mktemp("words")
    model = Tokenizer(models.WordLevel({word: id_ for id_, word in enumerate(WORDS)}, unk_token="<unk>"))
    model.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    model.add_special_tokens(["<s>", "</s>", "<pad>"])
    model.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    model.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "pad_token": "<pad>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture
def write_corpus(tmp_path: Path) -> Callable[[str, Sequence[Sequence[int]]], str]:
    """Returns a function that writes documents as a pair and returns its prefix."""

    def write(name: str, documents: Sequence[Sequence[int]]) -> str:
        prefix = str(tmp_path / name)
        with writing_corpus(prefix, vocab_size=1000) as writer:
            for document in documents:
                writer.add(np.array(document, np.int64))
        return prefix

    return write


@pytest.fixture
def write_jsonl(tmp_path: Path) -> Callable[[Sequence[dict[str, Any]]], Path]:
    """Returns a function that writes objects as lines and returns the file."""

    def write(objects: Sequence[dict[str, Any]]) -> Path:
        path = tmp_path / "samples.jsonl"
        path.write_text("".join(json.dumps(one) + "\n" for one in objects))
        return path

    return write


@pytest.fixture
def make_config() -> Callable[..., Config]:
    """Returns a function that builds a small configuration; sections are given as dictionaries."""

    def make(data: dict[str, Any], **sections: dict[str, Any]) -> Config:
        model = {"num_layers": 1, "hidden_size": 8, "ffn_hidden_size": 8, "num_attention_heads": 2, "vocab_size": 1000}
        given: dict[str, dict[str, Any]] = {
            "run": {"dir": "unused"},
            "model": model,
            "train": {"global_batch_size": 8, "micro_batch_size": 2, "num_steps": 3},
            "optimizer": {"lr": 1e-3},
            "data": {"seq_length": 8, **data},
        }
        for name, section in sections.items():
            given[name] = {**given.get(name, {}), **section}
        return Config.model_validate(given)

    return make
