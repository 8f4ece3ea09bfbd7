"""Files of safetensors: the library of Hugging Face itself is the oracle of what is accepted."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from random import Random

import torch
from safetensors.torch import load_file, save

from mtrain.hf.io.safetensors import SafetensorsFile, raw_bytes
from mtrain.hf.schema.files import read_header
from tests.fuzz.mutations import mutated_bytes, mutated_tree
from tests.fuzz.target import Target

_NAME = "model.safetensors"


@cache
def _content() -> bytes:
    tensors = {
        "model.embed_tokens.weight": torch.arange(12, dtype=torch.bfloat16).view(4, 3),
        "model.norm.weight": torch.arange(3, dtype=torch.float32),
        "scale": torch.tensor(2.0),
        "none": torch.empty(0, 5),
    }
    return save(tensors, {"format": "pt"})


def _write(folder: Path, random: Random) -> None:
    content = _content()
    length = int.from_bytes(content[:8], "little")
    header, data = content[8 : 8 + length], content[8 + length :]
    match random.choice(("tree", "tree", "header", "header", "all", "length", "deep", "whole")):
        case "tree":
            tree = mutated_tree(json.loads(header), random)
            content = _joined(json.dumps(tree, ensure_ascii=random.random() < 0.5).encode("utf-8", "replace"), data)
        case "header":
            content = _joined(mutated_bytes(header, random), data)
        case "all":
            content = mutated_bytes(content, random)
        case "length":
            number = random.choice((0, 1, 2, length - 1, length + 1, len(content), 10**8, 2**63, 2**64 - 1))
            content = number.to_bytes(8, "little") + content[8:]
        case "deep":
            depth = random.choice((100, 1000, 10**6))
            content = _joined(random.choice((b"[" * depth, b'{"a":' * depth, b"[" * depth + b"]" * depth)), data)
        case "whole":
            pass
    (folder / _NAME).write_bytes(content)


def _joined(header: bytes, data: bytes) -> bytes:
    return len(header).to_bytes(8, "little") + header + data


def _read(folder: Path) -> None:
    """Checks that the library also accepts an accepted file, with the same content."""
    file = SafetensorsFile(folder / _NAME)
    theirs = load_file(folder / _NAME)
    assert file.entries.keys() == theirs.keys() == read_header(folder / _NAME).tensors.keys()
    for name, values in theirs.items():
        assert file.tensor(name).dtype == values.dtype, name
        assert file.tensor(name).shape == values.shape, name
        assert bytes(raw_bytes(file.tensor(name))) == bytes(raw_bytes(values)), name


TARGET = Target(_write, _read, frozenset({3}))
