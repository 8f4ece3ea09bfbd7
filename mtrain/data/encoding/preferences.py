"""Records of preferences: pairs of answers, or answers that are judged separately.

    pairs:    prompt, chosen, rejected; or chosen and rejected that begin alike, with the prompt inside
    answers:  prompt, completion, label (true if the answer is wanted)

These are TRL's forms; prompt and answers are texts or lists of messages. Only answers are in the loss, not the prompt's
own messages. For a head, which judges answers by their last tokens, a pair may have a `margin`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from typing import Any, Literal, Protocol, assert_never

import numpy as np

from mtrain.base.errors import DataError
from mtrain.core.batch.sample import TokenizedSample
from mtrain.data.chat.conversation import untrained
from mtrain.data.encoding.checks import check_keys, check_text
from mtrain.data.encoding.judged import judged

_SHARED_KEYS = frozenset({"weight", "tools", "chat_template_kwargs"})
_PAIR_KEYS = frozenset({"prompt", "chosen", "rejected"}) | _SHARED_KEYS
_JUDGED_KEYS = _PAIR_KEYS | {"margin"}
_ANSWER_KEYS = frozenset({"prompt", "completion", "label"}) | _SHARED_KEYS
_FLOAT32_MAX = float(np.finfo(np.float32).max)
_VERSION = 3
"""Raised when the same record gives other tokens, or another record is refused."""


class _Encoders(Protocol):
    """Encoder of single sequences, such as `RecordEncoder`."""

    fingerprint: str

    def renamed(self, record: dict[str, Any]) -> dict[str, Any]: ...

    def conversation(self, record: dict[str, Any]) -> TokenizedSample: ...

    def joined(self, prompt: str, answers: Sequence[str], weight: object) -> list[TokenizedSample]: ...


class PreferenceEncoder:
    """A record gives the chosen and the rejected sequence; or one answer, whose weight is negative if it is
    unwanted."""

    def __init__(
        self,
        encoders: _Encoders,
        compares: Literal["pairs", "answers"],
        ignored: Set[str],
        is_judged: bool = False,
    ) -> None:
        self._encoders, self._compares, self._ignored, self._is_judged = encoders, compares, ignored, is_judged
        self.fingerprint = f"{encoders.fingerprint} {compares} {_VERSION}{' judged' if is_judged else ''}"

    def encode(self, record: dict[str, Any]) -> tuple[TokenizedSample, ...]:
        record = self._encoders.renamed(record)
        match self._compares:
            case "pairs":
                return self._pair(record)
            case "answers":
                return (self._answer(record),)
            case _:
                assert_never(self._compares)

    def _pair(self, record: dict[str, Any]) -> tuple[TokenizedSample, ...]:
        check_keys(record, _JUDGED_KEYS if self._is_judged else _PAIR_KEYS, self._ignored)
        given = {name: _answer(record, name) for name in ("chosen", "rejected")}
        if isinstance(given["chosen"], str) != isinstance(given["rejected"], str):
            raise DataError("'chosen' and 'rejected' must both be texts or both be lists of messages; fix one")
        prompt = record.get("prompt")
        if prompt is None:
            prompt = _common(given["chosen"], given["rejected"])
            given = {name: answer[len(prompt) :] for name, answer in given.items()}
        pair = self._sequences(record, prompt, given)
        return tuple(_with_margin(judged(each), _margin(record)) for each in pair) if self._is_judged else pair

    def _answer(self, record: dict[str, Any]) -> TokenizedSample:
        check_keys(record, _ANSWER_KEYS, self._ignored)
        label = record.get("label")
        if not isinstance(label, bool):
            raise DataError(f"'label' is {label!r}, but must be true (a wanted answer) or false; change it")
        if record.get("prompt") is None:
            raise DataError("has no 'prompt'; a line needs prompt, completion and label")
        (found,) = self._sequences(record, record["prompt"], {"completion": _answer(record, "completion")})
        # the sign is the label, even with a weight of 0: a cache holds nothing else next to the tokens
        return replace(found, weight=math.copysign(found.weight, 1.0 if label else -1.0))

    def _sequences(
        self, record: dict[str, Any], prompt: object, given: Mapping[str, Any]
    ) -> tuple[TokenizedSample, ...]:
        """Encodes a prompt with each of its named answers, all texts or all lists of messages."""
        empty = next((name for name, answer in given.items() if not answer), None)
        if empty is not None:
            raise DataError(f"{empty!r} is empty after the prompt, so there is nothing to compare; remove the line")
        if all(isinstance(answer, str) for answer in given.values()):
            text = check_text(prompt, "'prompt'")
            answers = [check_text(answer, f"{name!r}") for name, answer in given.items()]
            if named := next((key for key in ("tools", "chat_template_kwargs") if record.get(key)), None):
                raise DataError(f"has {named!r}, which only messages can have; write the prompt as messages")
            return tuple(self._encoders.joined(text, answers, record.get("weight", 1.0)))
        if not isinstance(prompt, list):
            name = next(iter(given))
            raise DataError(f"{name!r} is a list of messages, but 'prompt' is none; write both alike")
        shared = {key: record[key] for key in _SHARED_KEYS if key in record}
        before = [*map(untrained, prompt)]
        return tuple(
            self._encoders.conversation({"messages": [*before, *answer], **shared}) for answer in given.values()
        )


def _margin(record: dict[str, Any]) -> float:
    margin = record.get("margin", 0.0)
    if isinstance(margin, bool) or not isinstance(margin, int | float) or not abs(margin) <= _FLOAT32_MAX:
        raise DataError(f"'margin' is {margin!s:.40}, but must be a finite number of float32; change it")
    return float(margin)


def _with_margin(sample: TokenizedSample, margin: float) -> TokenizedSample:
    """Gives every token the margin as its extra, as the cache stores extras."""
    return replace(sample, extras=np.full((len(sample.ids), 1), margin, np.float32))


def _answer(record: dict[str, Any], name: str) -> Any:
    if not isinstance(record.get(name), str | list):
        raise DataError(f"{name!r} must be a string or a list of messages, but is {record.get(name)!r:.40}; write it")
    return record[name]


def _common(chosen: Any, rejected: Any) -> Any:
    """Returns the common beginning of two answers that hold their prompt.

    If one answer continues where the other ends, the last piece (character, message) of the shorter one is its answer.
    """
    shorter = min(len(chosen), len(rejected))
    count = next((place for place, (one, other) in enumerate(zip(chosen, rejected)) if one != other), None)
    if count is None:
        return chosen if chosen == rejected else chosen[: max(0, shorter - 1)]
    prompt = chosen[:count]
    # a blank belongs to the word after it, as tokenizers have it
    prompt = prompt[:-1] if isinstance(prompt, str) and prompt.endswith(" ") else prompt
    if not prompt:
        raise DataError("'chosen' and 'rejected' begin with nothing in common, and there is no 'prompt'; give it")
    return prompt
