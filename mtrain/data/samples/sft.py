"""Questions and answers from JSONL; only the answers are in the loss.

A line is an object with `prompt` and `response` (texts), or with `messages`: a list of objects with `role` (system,
user, assistant or tool) and `content` (text). Optional: `weight`, what the sample counts (a number of at least 0, by
default 1). Other keys are refused, of a line and of a message, unless `data.ignore_keys` names them: what is dropped
without a word may be what the model should have seen (docs/finetuning.md).

    prompt/response:  bos? + prompt + response + eos             in the loss: response, eos
    messages:         bos? + for each message header + content   in the loss: content and eos of every assistant message
                      + (eos if it is the assistant's)

The header is the plain text "### role\\n", with "\\n\\n" before it from the second message on. Each piece (prompt,
response, header, content) is tokenised by itself, so no token lies half in the loss.

A sample fits a row when it has at most seq_length + 1 tokens, as the last one is only predicted. Longer ones are cut at
the end (end), left out (drop) or an error (refuse); a cut sample may have nothing left to learn and then counts as
an empty sequence (loss.empty_sequences). drop and refuse tokenise the whole file when it is opened.
"""

import math
from collections.abc import Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, assert_never

import numpy as np
from numpy.typing import NDArray

from mtrain.base.errors import DataError
from mtrain.data.formats.jsonl import Lines, check_at
from mtrain.data.samples.sample import Sample, padded
from mtrain.tokenizer import Tokenizer

ROLES = ("system", "user", "assistant", "tool")
_PAIR_KEYS = frozenset({"prompt", "response", "weight"})
_CHAT_KEYS = frozenset({"messages", "weight"})
_MESSAGE_KEYS = frozenset({"role", "content"})
_REASONS = {
    "tools": "descriptions of tools are not shown to the model",
    "tool_calls": "calls of tools are not shown to the model",
    "weight": "a message has no weight of its own, only the whole line has",
    "train": "every message of the assistant is in the loss, and no other",
}
"""Known keys of other programs, and what would be lost."""


class TextSpan(NamedTuple):
    """Text that is tokenised by itself."""

    text: str
    in_loss: bool
    ends: bool
    """Whether eos follows, which is in the loss as the text is."""


@dataclass(frozen=True)
class LineFormat:
    """What a line may hold."""

    ignored: Set[str] = frozenset()
    """Keys of lines and messages that are dropped on purpose."""
    template: Path | None = None
    """Holds a chat template, which is not applied, so that messages are refused; None where they are wanted as
    plain text."""

    def check(self, found: dict[str, Any]) -> None:
        """Refuses a line that is not a sample.

        Raises:
            DataError: says what is wrong, not where.
        """
        if "messages" in found and ("prompt" in found or "response" in found):
            raise DataError("has messages beside prompt or response; keep one of the two forms")
        if "messages" in found:
            self._check_chat(found)
        else:
            _check_pair(found)
        self._check_keys(found, _CHAT_KEYS if "messages" in found else _PAIR_KEYS, "")
        _check_weight(found.get("weight", 1.0))

    def _check_chat(self, found: dict[str, Any]) -> None:
        if self.template is not None:
            raise DataError(
                f"has messages, and {self.template} holds a chat template, which is not applied: the model would learn "
                "another form of chat than its own; write prompt and response as the template has them, or set "
                "data.chat_format=plain to learn the plain form on purpose"
            )
        _check_messages(found["messages"])
        for number, message in enumerate(found["messages"]):
            self._check_keys(message, _MESSAGE_KEYS, f"messages[{number}] ")

    def _check_keys(self, found: dict[str, Any], known: Set[str], place: str) -> None:
        unknown = next((key for key in found if key not in known and key not in self.ignored), None)
        if unknown is None:
            return
        reason = f" ({_REASONS[unknown]})" if unknown in _REASONS else ""
        raise DataError(
            f"{place}has the key {unknown!r}, which is not read{reason}; known are {', '.join(sorted(known))}: remove "
            "it, or name it in data.ignore_keys to train without it"
        )


class SFTDataset:
    """Lines of a JSONL file as padded rows, one sequence each."""

    def __init__(
        self,
        lines: Lines,
        numbers: range,
        tokenizer: Tokenizer,
        seq_length: int,
        too_long: Literal["end", "drop", "refuse"],
        form: LineFormat,
    ) -> None:
        """
        Args:
            lines: Checked by `form`.
            numbers: The part of the lines that is used, counted from 0.
            tokenizer: Of the model.
            seq_length: Positions of a row.
            too_long: What happens to a sample of more than seq_length + 1 tokens.
            form: What a line may hold.

        Raises:
            DataError: a sample is too long and has to be refused, or none is left.
        """
        self._lines, self._tokenizer, self._seq_length = lines, tokenizer, seq_length
        self._form = form
        # numbers of lines, not texts: a file may be larger than memory
        self._kept = np.arange(numbers.start, numbers.stop)
        match too_long:
            case "end":
                pass
            case "drop":
                self._kept = self._kept[np.array([self._excess(number) <= 0 for number in numbers], bool)]
            case "refuse":
                self._refuse_excess(numbers)
            case _:
                assert_never(too_long)
        self.num_dropped = len(numbers) - len(self._kept)
        if not len(self._kept):
            raise DataError(
                f"{lines.path}: lines {numbers.start + 1} to {numbers.stop} hold no sample ({self.num_dropped} were "
                f"dropped as longer than {seq_length + 1} tokens); give more lines, another data.split or a larger "
                "data.seq_length"
            )
        self.fingerprint = (
            f"{lines.fingerprint}-{tokenizer.fingerprint}-{numbers.start}-{numbers.stop}-{seq_length}-{too_long}"
        )

    def __len__(self) -> int:
        return len(self._kept)

    def sample(self, epoch: int, index: int) -> Sample:
        """Row of line `index`; the same in every epoch."""
        number = int(self._kept[index])
        found = self._lines[number]
        check_at(self._lines.path, number + 1, found, self._form.check)  # the file may have changed since it was opened
        # tokenised when it is asked for, in the prefetch thread where there is one
        ids, in_loss = tokenised(pieces(found), self._tokenizer)
        size = self._seq_length + 1
        return padded(
            ids[:size],
            # shifted: position t predicts token t + 1
            in_loss[1:size],
            self._seq_length,
            self._tokenizer.pad_id,
            weight=float(found.get("weight", 1.0)),
        )

    def _excess(self, number: int) -> int:
        """Tokens of a line beyond those of a row; 0 or less where it fits."""
        return len(tokenised(pieces(self._lines[number]), self._tokenizer)[0]) - (self._seq_length + 1)

    def _refuse_excess(self, numbers: range) -> None:
        for number in numbers:
            if (excess := self._excess(number)) > 0:
                takes = self._seq_length + 1
                raise DataError(
                    f"{self._lines.path} line {number + 1}: has {takes + excess} tokens, but "
                    f"data.seq_length={self._seq_length} takes {takes}; raise it, shorten the sample, or set "
                    "data.too_long to end or drop"
                )


def tokenised(parts: list[TextSpan], tokenizer: Tokenizer) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Ids of a whole sample, [n], and 1 for each that is in the loss, [n]."""
    ids = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    in_loss = [0.0] * len(ids)
    for part in parts:
        new = tokenizer.encode(part.text) + ([tokenizer.eos_id] if part.ends else [])
        ids += new
        in_loss += [float(part.in_loss)] * len(new)
    return np.array(ids, np.int64), np.array(in_loss)


def pieces(found: dict[str, Any]) -> list[TextSpan]:
    """The texts of a checked line."""
    if "messages" not in found:
        return [TextSpan(found["prompt"], False, False), TextSpan(found["response"], True, True)]
    parts: list[TextSpan] = []
    for number, message in enumerate(found["messages"]):
        answers = message["role"] == "assistant"
        parts.append(TextSpan(("\n\n" if number else "") + f"### {message['role']}\n", False, False))
        parts.append(TextSpan(message["content"], answers, answers))
    return parts


def _check_pair(found: dict[str, Any]) -> None:
    for key in ("prompt", "response"):
        if key not in found:
            raise DataError(f"has no {key!r}; a line needs prompt and response, or messages")
        _check_text(found[key], f"{key!r}")
    if not found["response"]:
        raise DataError("'response' is empty, so there is nothing to learn; remove the line or answer")


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
        _check_text(message["content"], f"{place}.content")
    if not any(message["role"] == "assistant" and message["content"] for message in messages):
        raise DataError("'messages' has no answer by the role assistant, so there is nothing to learn; remove the line")


def _check_text(text: object, name: str) -> None:
    if text is None:
        raise DataError(f"{name} is null, but must be a text; write it, or remove the line")
    if not isinstance(text, str):
        raise DataError(f"{name} is a {type(text).__name__}, but must be a text; put it in quotes")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise DataError(f"{name} holds half a surrogate pair, which is not text; fix the escape sequence") from None


def _check_weight(weight: object) -> None:
    # bool first: True is an int in Python
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not math.isfinite(weight) or weight < 0:
        raise DataError(f"'weight' is {weight!r}, but must be a finite number of at least 0; change it")
