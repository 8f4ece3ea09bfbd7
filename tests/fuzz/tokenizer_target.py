"""`tokenizer.json` and `tokenizer_config.json`: opened, and used on text."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from mtrain.hf.tokenizer.tokenizer import load_tokenizer
from tests.fuzz.mutations import mutated_bytes, mutated_tree
from tests.fuzz.target import Target

_FILE, _SETTINGS = "tokenizer.json", "tokenizer_config.json"
_TEXTS = ["the quick brown fox", "", "a\0b <unk> </s>", "naïve 日本 🙂 12345\n\n  x"]
_SPECIAL = ["<unk>", "</s>"]
_RUST_PARTS = (  # each ends in a panic of the library, or of the process, somewhere
    ("normalizer", {"type": "Precompiled", "precompiled_charsmap": "AAAA"}),
    ("normalizer", {"type": "Precompiled", "precompiled_charsmap": "CAAAAP////////8AAAAA"}),
    ("normalizer", {"type": "Replace", "pattern": {"String": ""}, "content": "x"}),
    ("pre_tokenizer", {"type": "Split", "pattern": {"Regex": "(?=e)"}, "behavior": "Isolated", "invert": True}),
    ("decoder", {"type": "Strip", "content": "a", "start": 10**9, "stop": 5}),
    ("truncation", {"direction": "Right", "max_length": 0, "strategy": "LongestFirst", "stride": 5}),
    ("model", {"type": "Unigram", "unk_id": 7, "vocab": [["</s>", 0.0], ["a", -1.0]]}),
)


@cache
def _bases() -> tuple[dict[str, Any], ...]:
    """Returns one tokenizer of each kind of model."""
    kinds: list[tuple[Any, Any]] = [
        (models.BPE(unk_token="<unk>"), trainers.BpeTrainer(vocab_size=90, special_tokens=_SPECIAL)),
        (models.Unigram(), trainers.UnigramTrainer(vocab_size=60, special_tokens=_SPECIAL, unk_token="<unk>")),
        (models.WordPiece(unk_token="<unk>"), trainers.WordPieceTrainer(vocab_size=80, special_tokens=_SPECIAL)),
        (models.WordLevel(unk_token="<unk>"), trainers.WordLevelTrainer(special_tokens=_SPECIAL)),
    ]
    found = []
    for model, trainer in kinds:
        tokenizer = Tokenizer(model)
        tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace("x", "y")])
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
        tokenizer.decoder = decoders.Metaspace()
        tokenizer.train_from_iterator(["the quick brown fox jumps", "over the lazy dog 123"] * 9, trainer)
        found.append(json.loads(tokenizer.to_str()))
    return tuple(found)


def _write(folder: Path, random: Random) -> None:
    content, settings = random.choice(_bases()), {"eos_token": "</s>", "unk_token": {"content": "<unk>"}}
    written, beside = json.dumps(content).encode(), json.dumps(settings).encode()
    match random.choice(("tree", "tree", "bytes", "parts", "parts", "prefix", "settings", "settings", "whole")):
        case "tree":
            written = json.dumps(mutated_tree(content, random)).encode()
        case "bytes":
            written = mutated_bytes(written, random)
        case "parts":
            changed = dict(random.choice(_RUST_PARTS) for _ in range(random.choice((1, 1, 2))))
            written = json.dumps({**content, **changed}).encode()
        case "prefix":
            prefix = random.choice(("#", "##", "é", "toolong", "", 7, None))
            written = json.dumps(
                {**content, "model": {**content["model"], "continuing_subword_prefix": prefix}}
            ).encode()
        case "settings":
            beside = random.choice((json.dumps(mutated_tree(settings, random)).encode(), mutated_bytes(beside, random)))
        case "whole":
            pass
    (folder / _FILE).write_bytes(written)
    (folder / _SETTINGS).write_bytes(beside)


def _read(folder: Path) -> None:
    """Checks that ids lie in the vocabulary, and that the same text has the same ids."""
    tokenizer = load_tokenizer(folder)
    assert 0 <= tokenizer.eos_id < tokenizer.vocab_size
    assert 0 <= tokenizer.pad_id < tokenizer.vocab_size
    ids = [tokenizer.encode(text) for text in _TEXTS]
    assert all(0 <= id_ < tokenizer.vocab_size for row in ids for id_ in row)
    assert tokenizer.encode_batch(_TEXTS, 2) == tokenizer.encode_batch(_TEXTS, 1) == ids
    for row in ids:
        tokenizer.decode([*row, tokenizer.eos_id])


TARGET = Target(_write, _read, frozenset({3}))
