"""Encoders of conversations, one for each template and options."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mtrain.data.chat.encoder import ChatEncoder, ChatOptions
from mtrain.data.chat.template import chosen_templates
from mtrain.hf.tokenizer.tokenizer import load_tokenizer
from tests.data.chat.cases import DAY, folder_of, write_tokenizer

MakeEncoder = Callable[..., ChatEncoder]


@pytest.fixture(scope="session")
def chat_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Writes a tokenizer.json with the special tokens of all templates."""
    folder = tmp_path_factory.mktemp("chat")
    write_tokenizer(folder)
    return folder / "tokenizer.json"


@pytest.fixture(scope="session")
def template_folder(tmp_path_factory: pytest.TempPathFactory, chat_tokenizer: Path) -> Callable[[str], Path]:
    """Returns a function that creates a tokenizer's folder with the template of that name."""
    parent = tmp_path_factory.mktemp("templates")
    return lambda name: folder_of(name, chat_tokenizer, parent / name)


@pytest.fixture(scope="session")
def chat_encoder(template_folder: Callable[[str], Path]) -> MakeEncoder:
    """Returns a function that builds the encoder of a template by name; one process renders all its conversations."""
    made: dict[Any, ChatEncoder] = {}

    def make(name: str, **options: Any) -> ChatEncoder:
        key = (name, *sorted(options.items()))
        if key not in made:
            tokenizer = load_tokenizer(template_folder(name))
            templates = chosen_templates("auto", tokenizer.path)
            assert templates is not None
            made[key] = ChatEncoder(templates, tokenizer, ChatOptions(**{"date": DAY, **options}))
        return made[key]

    return make


@pytest.fixture
def encoder_of_text(tmp_path: Path, chat_tokenizer: Path) -> MakeEncoder:
    """Returns a function that builds the encoder of a template given as text."""

    def make(text: str, eos: str = "<|im_end|>", **options: Any) -> ChatEncoder:
        folder = folder_of("chatml", chat_tokenizer, tmp_path / "own")
        (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos}))
        file = folder / "own.jinja"
        file.write_text(text)
        tokenizer = load_tokenizer(folder)
        templates = chosen_templates(str(file), tokenizer.path)
        assert templates is not None
        return ChatEncoder(templates, tokenizer, ChatOptions(**options))

    return make
