"""Builds the encoder that `data.*` asks for, and encodes records of single sequences."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, assert_never

from mtrain.base.errors import DataError
from mtrain.config.extras import key_and_sizes
from mtrain.config.schema.data import SftSection
from mtrain.core.batch.sample import HERE, TokenizedSample
from mtrain.data.chat.conversation import untrained
from mtrain.data.chat.encoder import ChatEncoder, ChatOptions
from mtrain.data.chat.template import TEMPLATE_FILE, chosen_templates, template_files
from mtrain.data.encoding.checks import token_extras
from mtrain.data.encoding.images import with_column
from mtrain.data.encoding.plain import (
    PLAIN_TEMPLATE,
    TextPart,
    alpaca_as_messages,
    chat_parts,
    joined,
    pair_parts,
    sharegpt_as_messages,
    text_parts,
    tokenized,
    tokens_sample,
    with_response,
)
from mtrain.hf.images import ImageProcessor
from mtrain.hf.tokenizer.tokenizer import Tokenizer, tokenizer_file

PLAIN = "plain"
"""Value of data.chat_template for no template."""
_CONVERSATIONS = ("messages", "sharegpt", "alpaca")


def chat_encoder(section: SftSection, tokenizer: Tokenizer, images: ImageProcessor | None = None) -> ChatEncoder | None:
    """Builds the encoder of conversations; None without a template, or for the plain form."""
    if section.chat_template == PLAIN:
        return None
    templates = chosen_templates(section.chat_template, tokenizer.path)
    if templates is None:
        return None
    options = ChatOptions(
        frozenset(section.ignore_keys),
        section.loss_on,
        section.special_tokens_in_text,
        section.chat_date,
        section.chat_template_kwargs,
    )
    return ChatEncoder(templates, tokenizer, options, images)


def trained_templates(section: SftSection) -> dict[str, str]:
    """Returns the chat templates for an export: path in a tokenizer's folder -> text.

    Empty without a template, and for the plain form unless `data.format` names a form of conversations.
    """
    if section.chat_template == PLAIN:
        return {TEMPLATE_FILE: PLAIN_TEMPLATE} if section.format in _CONVERSATIONS else {}
    assert section.tokenizer is not None  # a rule of the section
    templates = chosen_templates(section.chat_template, tokenizer_file(section.tokenizer))
    return {} if templates is None else template_files(templates)


_FORMS = {"conversations": "sharegpt", "instruction": "alpaca", "text": "text"}
"""Key of a record -> its format, which must be named because `auto` does not assume it."""


def _refuse_known_form(record: dict[str, Any]) -> None:
    known = next((key for key in _FORMS if key in record), None)
    if known is not None:
        form = _FORMS[known]
        raise DataError(f"has no 'prompt', but {known!r}, as in records of the format {form}; set data.format={form}")
    if "chosen" in record and "rejected" in record:
        raise DataError(
            "has 'chosen' and 'rejected', two answers to compare; set loss.function=dpo, or another such loss"
        )


class RecordEncoder:
    """A `SampleEncoder` for all forms of single sequences; cheap, so each worker process may build its own."""

    def __init__(self, section: SftSection, tokenizer: Tokenizer, images: ImageProcessor | None = None) -> None:
        """`images` processes the images of conversations; None refuses them."""
        self._section, self._tokenizer, self._images = section, tokenizer, images
        self._chat = chat_encoder(section, tokenizer, images)
        self._ignored = frozenset(section.ignore_keys)
        self.fingerprint = self._fingerprint()

    def _fingerprint(self) -> str:
        base = self._tokenizer.fingerprint if self._chat is None else self._chat.fingerprint
        options: list[object] = [self._section.loss_on, self._section.special_tokens_in_text]
        bos, begin = self._tokenizer.bos_id, list(self._tokenizer.begin_ids)
        options += [] if begin == [bos] or (bos is None and not begin) else [begin]  # version 0.1.0 used any bos
        options += [] if self._images is None else [self._images.fingerprint]
        if self._chat is not None or options == ["all_answers", False]:
            return base  # without a template, runs of version 0.1.0 know their data by the fingerprint of the tokenizer
        return hashlib.sha256(json.dumps([base, *options]).encode()).hexdigest()

    def renamed(self, record: dict[str, Any]) -> dict[str, Any]:
        """Renames columns by `data.columns`."""
        columns = self._section.columns
        if not columns:
            return record
        missing = next((name for name in columns if name not in record), None)
        if missing is not None:
            raise DataError(
                f"has no {missing!r}, which data.columns names; its keys are {', '.join(record) or 'none'}: change one"
            )
        names = [columns.get(name, name) for name in record]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise DataError(f"has {twice!r} and another key that data.columns renames to it; remove one of the two")
        return dict(zip(names, record.values()))

    def encode(self, record: dict[str, Any], folder: Path = HERE) -> TokenizedSample:
        """Encodes a record as one sequence, with its extras; paths of its images are relative to `folder`."""
        record = self.renamed(record)
        sizes = dict(key_and_sizes(extra) for extra in self._section.extras)
        sample = self._encode({key: value for key, value in record.items() if key not in sizes}, folder)
        self.without_stray_images(sample)
        return replace(sample, extras=token_extras(record, sizes, len(sample.ids))) if sizes else sample

    @property
    def reads_images(self) -> bool:
        """Whether conversations can have images."""
        return self._images is not None

    def without_stray_images(self, sample: TokenizedSample) -> TokenizedSample:
        """Returns the sample; raises DataError if it has image tokens but no image."""
        if self._images is not None and not sample.images and (sample.ids == self._images.image_token).any():
            raise DataError(f"has the image token, {self._images.image_token}, but no image; remove the token")
        return sample

    def _encode(self, record: dict[str, Any], folder: Path) -> TokenizedSample:
        match self._section.format:
            case "auto":
                return self._of_any_form(record, folder)
            case "messages":
                return self.conversation(record, folder)
            case "prompt_response":
                return self.pair(record, folder)
            case "text":
                return self.text(record)
            case "tokens":
                return self.tokens(record)
            case "sharegpt":
                return self.conversation(sharegpt_as_messages(record, self._ignored), folder)
            case "alpaca":
                return self.conversation(alpaca_as_messages(record, self._ignored), folder)
            case "preference" | "unpaired_preference":
                raise AssertionError("records of several sequences have an encoder of their own")
            case _:
                assert_never(self._section.format)

    def _of_any_form(self, record: dict[str, Any], folder: Path) -> TokenizedSample:
        if "messages" in record and ("prompt" in record or "response" in record):
            raise DataError("has messages as well as prompt or response; keep one of the two forms")
        if "messages" in record:
            return self.conversation(record, folder)
        if "input_ids" in record:
            return self.tokens(record)
        if "prompt" not in record:
            _refuse_known_form(record)
        return self.pair(record, folder)

    def conversation(self, record: dict[str, Any], folder: Path = HERE) -> TokenizedSample:
        if self._chat is not None:
            return self._chat.encode(record if self._images is None else with_column(record), folder)
        if self._section.chat_template != PLAIN:
            raise DataError(
                f"has messages, but {self._tokenizer.path.parent} has no chat template; use the tokenizer's folder "
                "of a model with one, give data.chat_template the path of a .jinja file, or set it to plain "
                'to write each message as "### role" and its content'
            )
        if "messages" not in record:
            raise DataError("has no 'messages'; a line needs messages, or another data.format")
        return self._plain(chat_parts(record, self._ignored, self._section.loss_on), record)

    def pair(self, record: dict[str, Any], folder: Path = HERE) -> TokenizedSample:
        """Encodes a prompt and a response: two texts, or two lists of messages; only the response is in the loss."""
        pair = with_response(record)
        prompt, response = pair.get("prompt"), pair.get("response")
        if isinstance(prompt, list) and isinstance(response, list):
            options = {key: value for key, value in pair.items() if key not in ("prompt", "response")}
            return self.conversation({"messages": [*map(untrained, prompt), *response], **options}, folder)
        return self._plain(pair_parts(pair, self._ignored), pair)

    def joined_pair(self, record: dict[str, Any]) -> TokenizedSample:
        """Encodes a prompt and a response as one text, as `plain.joined` does."""
        prompt, response = pair_parts(record, self._ignored)
        return self.joined(prompt.text, [response.text], record.get("weight", 1.0))[0]

    def joined(self, prompt: str, answers: Sequence[str], weight: object) -> list[TokenizedSample]:
        """Encodes a prompt with each of its answers as `plain.joined` does."""
        return joined(prompt, answers, self._tokenizer, weight, self._section.special_tokens_in_text)

    def text(self, record: dict[str, Any]) -> TokenizedSample:
        return self._plain(text_parts(record, self._ignored), record)

    def tokens(self, record: dict[str, Any]) -> TokenizedSample:
        """Encodes a record of token ids and their loss mask."""
        return tokens_sample(record, self._ignored, self._tokenizer.vocab_size)

    def _plain(self, parts: list[TextPart], record: dict[str, Any]) -> TokenizedSample:
        special = self._section.special_tokens_in_text
        return tokenized(parts, self._tokenizer, record.get("weight", 1.0), special)
