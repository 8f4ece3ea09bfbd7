"""Small data and a tokenizer in the places that a configuration names."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
from tokenizers import Tokenizer, models, pre_tokenizers

from mtrain.config import Config
from mtrain.config.schema.data import MockSection
from mtrain.data.formats.megatron_indexed import writing_corpus

_WORDS = ["<unk>", "<s>", "</s>", *"abcdefgh", "user", "assistant"]
_TEMPLATE = (
    "{% for message in messages %}<s> {{ message.role }} {{ message.content }} </s> {% endfor %}"
    "{% if add_generation_prompt %}<s> assistant {% endif %}"
)
_NUM_RECORDS = 200
_NUM_DOCUMENTS = 3000
"""Enough for the smallest share of a split, a thousandth."""


def write_data_of(config: Config, folder: Path) -> None:
    """Writes every source and the tokenizer of a configuration.

    Args:
        config: Configuration whose paths are relative.
        folder: Working folder.
    """
    data = config.data
    assert not isinstance(data, MockSection), "it has no files"
    if data.tokenizer is not None:
        _write_tokenizer(folder / data.tokenizer)
    of_valid = (source for sources in data.valid_sets.values() for source in sources)
    for source in (*data.all_sources, *of_valid, *data.test):
        assert not Path(source.path).is_absolute(), "it would be written outside of the folder"
        path = folder / source.path
        path.parent.mkdir(parents=True, exist_ok=True)
        if data.kind == "indexed":
            _write_corpus(path)
        else:
            _write_records(path)


def _write_tokenizer(path: Path) -> None:
    """Writes a tokenizer of whole words with a chat template, as a folder or as the file in one."""
    folder = path.parent if path.suffix == ".json" else path
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(_WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": _TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def _write_corpus(prefix: Path) -> None:
    rng = np.random.default_rng(0)
    with writing_corpus(str(prefix), vocab_size=64) as writer:
        for length in rng.integers(2, 60, _NUM_DOCUMENTS):
            writer.add(rng.integers(0, 64, length).astype(np.int64))


def _write_records(path: Path) -> None:
    rng = np.random.default_rng(0)
    words = [" ".join(rng.choice(list("abcdefgh"), size)) for size in rng.integers(1, 12, 2 * _NUM_RECORDS)]
    records = [
        {"messages": [{"role": "user", "content": one}, {"role": "assistant", "content": other}]}
        for one, other in zip(words[::2], words[1::2], strict=True)
    ]
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), path)
    else:
        path.write_text("".join(json.dumps(each) + "\n" for each in records))
