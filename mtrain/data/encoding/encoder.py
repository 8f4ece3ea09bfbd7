"""Which encoder a configuration means."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mtrain.base.errors import DataError
from mtrain.config.schema.data import SftSection
from mtrain.data.encoding.plain import chat_parts, pair_parts, tokenized
from mtrain.data.samples.tokenized import SampleEncoder, TokenizedSample
from mtrain.tokenizer import Tokenizer, chat_template


def encoder_of(section: SftSection, tokenizer: Tokenizer) -> SampleEncoder:
    """The encoder of finetuning records; cheap, so that each worker process may build its own.

    Args:
        section: `data.*`.
        tokenizer: That of `data.tokenizer`.

    Raises:
        DataError: Its chat template cannot be read.
    """
    template = None if section.chat_format == "plain" else chat_template(tokenizer.path)
    return _PlainEncoder(tokenizer, frozenset(section.ignore_keys), template)


class _PlainEncoder:
    """`prompt` and `response`, or messages under plain headers."""

    def __init__(self, tokenizer: Tokenizer, ignored: frozenset[str], template: Path | None) -> None:
        self._tokenizer, self._ignored, self._template = tokenizer, ignored, template
        # a record that is refused because of the template must not be served from the cache of a run without it
        self.fingerprint = tokenizer.fingerprint if template is None else f"{tokenizer.fingerprint} without messages"

    def encode(self, record: dict[str, Any]) -> TokenizedSample:
        """As `SampleEncoder` says."""
        if "messages" not in record:
            return tokenized(pair_parts(record, self._ignored), self._tokenizer, record.get("weight", 1.0))
        if "prompt" in record or "response" in record:
            raise DataError("has messages beside prompt or response; keep one of the two forms")
        if self._template is not None:
            raise DataError(
                f"has messages, and {self._template} holds a chat template, which is not applied: the model would "
                "learn another form of chat than its own; write prompt and response as the template has them, or set "
                "data.chat_format=plain to learn the plain form on purpose"
            )
        return tokenized(chat_parts(record, self._ignored), self._tokenizer, record.get("weight", 1.0))
