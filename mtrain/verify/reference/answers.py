"""Samples from JSONL: their tokens, and which of them are learned.

    prompt/response:  bos? + prompt + response + eos             learned: response, eos
    messages:         bos? + for each message header + content   learned: content and eos of the assistant's messages
                      + (eos if it is the assistant's)

The header is "### role\\n", with "\\n\\n" before it from the second message on; each piece is tokenised separately.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np

from mtrain.tokenizer import Tokenizer
from mtrain.verify.reference.text import Text


def objects(path: Path, numbers: Collection[int]) -> dict[int, Any]:
    """Reads the JSON objects of the lines with these numbers, counted from 0."""
    with path.open("rb") as file:
        return {number: json.loads(line) for number, line in enumerate(file) if number in numbers}


def num_lines(path: Path) -> int:
    """Counts the lines of the file."""
    with path.open("rb") as file:
        return sum(1 for _ in file)


def text_of(found: dict[str, Any], tokenizer: Tokenizer, seq_length: int) -> Text:
    """Converts a line to a sample, cut at the end if it is too long."""
    ids: list[int] = list(tokenizer.begin_ids)
    counts = [0.0] * len(ids)

    def add(text: str, is_learned: bool, ends: bool) -> None:
        new = tokenizer.encode(text) + [tokenizer.eos_id] * ends
        ids.extend(new)
        counts.extend([float(is_learned)] * len(new))

    if "messages" in found:
        for number, message in enumerate(found["messages"]):
            answers = message["role"] == "assistant"
            add("\n\n" * (number > 0) + f"### {message['role']}\n", False, False)
            add(message["content"], answers, answers)
    else:
        add(found["prompt"], False, False)
        add(found["response"], True, True)
    size = seq_length + 1
    weight = float(found.get("weight", 1.0))
    return Text(np.array(ids[:size], np.int64), np.array(counts[:size]), weight)
