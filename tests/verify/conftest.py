"""Fixtures of kept ranks, and of a tokenizer."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from tests.verify.kept import KeptPool


@pytest.fixture(scope="package")
def kept() -> Iterator[KeptPool]:
    """Keeps the ranks that `mtrain verify parity` would start anew for every layout."""
    with KeptPool() as pool:
        yield pool


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Works in an empty folder, so that no path of a shipped configuration leads to what a user's run has left."""
    monkeypatch.chdir(tmp_path_factory.mktemp("empty"))


@pytest.fixture
def word_tokenizer(tmp_path: Path) -> Path:
    """Writes a tokenizer of whole words."""
    words = ["<unk>", "<s>", "</s>", *"abcdefg"]
    model = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    model.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    model.add_special_tokens(["<s>", "</s>"])
    model.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    return tmp_path
