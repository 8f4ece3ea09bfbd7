"""Sequences that a head judges as a whole, by their last token.

The label follows the last token, in the place of the token that it would predict, so cutting, packing, padding and
sending labels need nothing new. Only the label is in the loss.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import replace
from typing import Any, Protocol

import numpy as np

from mtrain.base.errors import DataError
from mtrain.config.schema.output import HeadOutput
from mtrain.core.batch.sample import TokenizedSample
from mtrain.data.encoding.checks import check_keys

_TOKENS_KEYS = frozenset({"input_ids", "weight"})
_VERSION = 2
"""Raised when the same record gives other tokens."""


class _SequenceEncoders(Protocol):
    """Encoder of single sequences, such as `RecordEncoder`."""

    fingerprint: str

    def conversation(self, record: dict[str, Any]) -> TokenizedSample: ...

    def renamed(self, record: dict[str, Any]) -> dict[str, Any]: ...

    def joined_pair(self, record: dict[str, Any]) -> TokenizedSample: ...

    def text(self, record: dict[str, Any]) -> TokenizedSample: ...

    def tokens(self, record: dict[str, Any]) -> TokenizedSample: ...


def judged(sample: TokenizedSample, label: int = 0) -> TokenizedSample:
    """Appends the label to the sequence; only the label is in the loss."""
    ids = np.append(sample.ids, np.int32(label))
    counts = np.zeros(len(ids), np.float32)
    counts[-1] = 1.0
    return replace(sample, ids=ids, loss_weights=counts)


class LabelEncoder:
    """Encoder of a sequence with its class or number: a record has `label`, next to any form of a single sequence."""

    def __init__(self, encoders: _SequenceEncoders, head: HeadOutput, ignored: Set[str], is_number: bool) -> None:
        """Set `is_number` if a label is any number instead of a class; it is then the one extra of every token."""
        self._encoders, self._head, self._ignored = encoders, head, ignored
        self._is_number = is_number
        form = "a number" if is_number else f"{head.rows} labels"
        self.fingerprint = f"{encoders.fingerprint} {form} {_VERSION}"

    def encode(self, record: dict[str, Any]) -> TokenizedSample:
        record = self._encoders.renamed(record)
        label = record.get("label")
        rest = {name: value for name, value in record.items() if name != "label"}
        if self._is_number:
            found = judged(self._sequence(rest))
            return replace(found, extras=np.full((len(found.ids), 1), _number(label), np.float32))
        if isinstance(label, bool) or not isinstance(label, int) or not 0 <= label < self._head.rows:
            raise DataError(
                f"'label' is {label!r:.40}, but must be the number of a class, 0 to {self._head.rows - 1} "
                f"({self._head}); change it"
            )
        return judged(self._sequence(rest), label)

    def _sequence(self, record: dict[str, Any]) -> TokenizedSample:
        forms = [name for name in ("messages", "text", "input_ids", "prompt") if name in record]
        if len(forms) != 1:
            raise DataError(
                f"has {' and '.join(forms) or 'no text'} next to 'label'; a line needs one of text, messages, prompt "
                "with response, or input_ids"
            )
        if "input_ids" in record:
            return self._tokens(record)
        if "messages" in record:
            return self._encoders.conversation(record)
        return self._encoders.text(record) if "text" in record else self._encoders.joined_pair(record)

    def _tokens(self, record: dict[str, Any]) -> TokenizedSample:
        check_keys(record, _TOKENS_KEYS, self._ignored)
        ids = record["input_ids"]
        if isinstance(ids, list) and len(ids) == 1:  # a single token has nothing to predict, but may be judged
            twice = self._encoders.tokens({**record, "input_ids": ids * 2, "loss_mask": [1, 1]})
            return replace(twice, ids=twice.ids[:1], loss_weights=twice.loss_weights[:1])
        return self._encoders.tokens({**record, "loss_mask": [1] * (len(ids) if isinstance(ids, list) else 0)})


def _number(label: object) -> float:
    # 1e400 in JSON is inf, and comparisons with nan are false
    if isinstance(label, int | float) and not isinstance(label, bool) and abs(label) <= np.finfo(np.float32).max:
        return float(label)
    raise DataError(f"'label' is {label!r:.40}, but must be a finite number that float32 can hold; change it")
