"""Forms that need no chat template: `prompt` and `response`, and messages under plain headers.

    prompt/response:  bos? + prompt + response + eos             in the loss: response, eos
    messages:         bos? + for each message header + content   in the loss: content and eos of every assistant message
                      + (eos if it is the assistant's)

The header is the plain text "### role\\n", with "\\n\\n" before it from the second message on. Each piece (prompt,
response, header, content) is tokenised by itself, so no token lies half in the loss.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from typing import Any, NamedTuple

import numpy as np

from mtrain.base.errors import DataError
from mtrain.data.encoding.checks import check_keys, check_text, check_weight
from mtrain.data.samples.tokenized import TokenizedSample
from mtrain.tokenizer import Tokenizer

ROLES = ("system", "user", "assistant", "tool")
_PAIR_KEYS = frozenset({"prompt", "response", "weight"})
_CHAT_KEYS = frozenset({"messages", "weight"})
_MESSAGE_KEYS = frozenset({"role", "content"})


class TextPart(NamedTuple):
    """Text that is tokenised by itself."""

    text: str
    in_loss: bool
    ends: bool
    """Whether eos follows, which is in the loss as the text is."""


def pair_parts(found: dict[str, Any], ignored: Set[str]) -> list[TextPart]:
    """Prompt and response.

    Raises:
        DataError: The record is not of this form.
    """
    for key in ("prompt", "response"):
        if key not in found:
            raise DataError(f"has no {key!r}; a line needs prompt and response, or messages")
        check_text(found[key], f"{key!r}")
    if not found["response"]:
        raise DataError("'response' is empty, so there is nothing to learn; remove the line or answer")
    check_keys(found, _PAIR_KEYS, ignored)
    return [TextPart(found["prompt"], False, False), TextPart(found["response"], True, True)]


def chat_parts(found: dict[str, Any], ignored: Set[str]) -> list[TextPart]:
    """Messages, each under its header.

    Raises:
        DataError: The record is not of this form.
    """
    _check_messages(found["messages"])
    for number, message in enumerate(found["messages"]):
        check_keys(message, _MESSAGE_KEYS, ignored, f"messages[{number}] ")
    check_keys(found, _CHAT_KEYS, ignored)
    parts: list[TextPart] = []
    for number, message in enumerate(found["messages"]):
        answers = message["role"] == "assistant"
        parts.append(TextPart(("\n\n" if number else "") + f"### {message['role']}\n", False, False))
        parts.append(TextPart(message["content"], answers, answers))
    return parts


def tokenized(parts: Iterable[TextPart], tokenizer: Tokenizer, weight: object) -> TokenizedSample:
    """The parts one after the other.

    Args:
        parts: Of a whole sample.
        tokenizer: Of the model.
        weight: Of the record.

    Raises:
        DataError: The weight is none.
    """
    ids = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    counts = [0.0] * len(ids)
    for part in parts:
        new = tokenizer.encode(part.text) + ([tokenizer.eos_id] if part.ends else [])
        ids += new
        counts += [float(part.in_loss)] * len(new)
    return TokenizedSample(np.array(ids, np.int32), np.array(counts, np.float32), check_weight(weight))


def _check_messages(messages: object) -> None:
    if not isinstance(messages, list) or not messages:
        raise DataError("'messages' must be a list of at least one message; fix it")
    for number, message in enumerate(messages):
        place = f"messages[{number}]"
        if not isinstance(message, dict) or not {"role", "content"} <= message.keys():
            raise DataError(f"{place} needs an object with role and content; fix it")
        if message["role"] not in ROLES:
            raise DataError(
                f"{place} has the role {message['role']!r}, but must be one of {', '.join(ROLES)}; change it"
            )
        check_text(message["content"], f"{place}.content")
    if not any(message["role"] == "assistant" and message["content"] for message in messages):
        raise DataError("'messages' has no answer by the role assistant, so there is nothing to learn; remove the line")
