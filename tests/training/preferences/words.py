"""A tokenizer of whole words, and texts that it can encode."""

import json
from pathlib import Path

import tokenizers

WORDS = ["red", "green", "blue", "cat", "dog", "bird", "one", "two", "three", "yes", "no"]
TEXTS = [(" ".join(WORDS[: 2 + i % 5]), " ".join(WORDS[i % 7 : i % 7 + 1 + i % 3])) for i in range(8)]
"""Prompts and answers."""


def save_tokenizer(folder: Path) -> None:
    """Writes the tokenizer as it lies in a Hugging Face folder."""
    vocabulary = {word: number for number, word in enumerate(["<unk>", "</s>", *WORDS])}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    model.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>", "unk_token": "<unk>"}))
