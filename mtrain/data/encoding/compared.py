"""Encodes records of sequences that are compared, or that a head scores.

    pairs:    prompt, chosen, rejected; or chosen and rejected that begin alike, with the prompt inside
    answers:  prompt, completion, label (true if the answer is wanted)

A column of images belongs to the placeholders of the prompt, and so to each of its answers.

These are TRL's forms; prompt and answers are texts or lists of messages. Only answers are in the loss, not the prompt's
own messages. For a head, which judges answers by their last tokens, a pair may have a `margin`.

A head judges a sequence as a whole. The label follows the last token, like a token to predict, so labels are cut,
packed, padded and sent as tokens are; only the label is in the loss.
"""

import math
from collections.abc import Mapping, Set
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, assert_never

import numpy as np

from mtrain.base.errors import ConfigError, DataError
from mtrain.base.spelling import counted
from mtrain.config.schema.data import SftSection
from mtrain.config.schema.model import ModelSection
from mtrain.config.schema.output import HeadOutput
from mtrain.core.batch.sample import HERE, SampleEncoder, TokenizedSample
from mtrain.data.chat.conversation import untrained
from mtrain.data.encoding.checks import IMAGE_KEYS, check_keys, check_text
from mtrain.data.encoding.encoder import RecordEncoder
from mtrain.data.encoding.images import has_images, with_column
from mtrain.hf.images import ImageProcessor
from mtrain.hf.tokenizer.tokenizer import Tokenizer, tokenizer_file

_SHARED_KEYS = frozenset({"weight", "tools", "chat_template_kwargs"})
_PAIR_KEYS = frozenset({"prompt", "chosen", "rejected"}) | _SHARED_KEYS
_JUDGED_KEYS = _PAIR_KEYS | {"margin"}
_ANSWER_KEYS = frozenset({"prompt", "completion", "label"}) | _SHARED_KEYS
_TOKENS_KEYS = frozenset({"input_ids", "weight"})
_FLOAT32_MAX = float(np.finfo(np.float32).max)
_LABEL_VERSION, _PREFERENCE_VERSION = 2, 3
"""Versions of the encodings; incremented when the same record gives other tokens, or other records are refused."""


def source_encoder(
    section: SftSection,
    tokenizer: Tokenizer,
    compares: Literal["pairs", "answers"] | None,
    head: HeadOutput | None = None,
    is_number: bool = False,
    images: ImageProcessor | None = None,
) -> SampleEncoder:
    """Builds the encoder of a source's records; as cheap as `RecordEncoder`.

    Args:
        compares: Form of records of compared answers; None if a record is one sequence.
        head: Head that judges sequences, if the model has one.
        is_number: Whether a label is any number instead of a class.
        images: Processor of the images of conversations; None refuses images.
    """
    encoder = RecordEncoder(section, tokenizer, images if head is None else None)
    ignored = frozenset(section.ignore_keys)
    if compares is not None:
        return PreferenceEncoder(encoder, compares, ignored, is_judged=head is not None)
    return encoder if head is None else LabelEncoder(encoder, head, ignored, is_number)


def image_processor(section: SftSection, model: ModelSection) -> ImageProcessor | None:
    """Returns the processor of the tokenizer's folder; None if the model reads only text."""
    vision, limits = model.vision, section.images
    if vision is None:
        limit = next((f"{name}={value}" for name, value in limits.model_dump().items() if value is not None), None)
        if limit is not None:
            raise ConfigError(f"data.images.{limit} has no effect without model.vision; set model.vision, or remove it")
        return None
    assert section.tokenizer is not None  # a rule of the section
    return ImageProcessor(tokenizer_file(section.tokenizer).parent, vision, limits)


def judged(sample: TokenizedSample, label: int = 0) -> TokenizedSample:
    """Appends the label to the sequence; only the label is in the loss."""
    ids = np.append(sample.ids, np.int32(label))
    counts = np.zeros(len(ids), np.float32)
    counts[-1] = 1.0
    return replace(sample, ids=ids, loss_weights=counts)


class LabelEncoder:
    """Encodes a sequence with its class or number: a record has `label` and the keys of a single sequence."""

    def __init__(self, encoder: RecordEncoder, head: HeadOutput, ignored: Set[str], is_number: bool) -> None:
        """`is_number`: labels are numbers instead of classes; the number is then the only extra of every token."""
        self._encoder, self._head, self._ignored = encoder, head, ignored
        self._is_number = is_number
        form = "a number" if is_number else counted(head.rows, "label")
        self.fingerprint = f"{encoder.fingerprint} {form} {_LABEL_VERSION}"

    def encode(self, record: dict[str, Any], folder: Path = HERE) -> TokenizedSample:
        record = self._encoder.renamed(record)
        label = record.get("label")
        unlabelled = {name: value for name, value in record.items() if name != "label"}
        if self._is_number:
            sample = judged(self._sequence(unlabelled))
            return replace(sample, extras=np.full((len(sample.ids), 1), _number(label), np.float32))
        if isinstance(label, bool) or not isinstance(label, int) or not 0 <= label < self._head.rows:
            raise DataError(
                f"'label' is {label!r:.40}, but must be the number of a class, 0 to {self._head.rows - 1} "
                f"({self._head}); change it"
            )
        return judged(self._sequence(unlabelled), label)

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
            return self._encoder.conversation(record)
        return self._encoder.text(record) if "text" in record else self._encoder.joined_pair(record)

    def _tokens(self, record: dict[str, Any]) -> TokenizedSample:
        check_keys(record, _TOKENS_KEYS, self._ignored)
        ids = record["input_ids"]
        if isinstance(ids, list) and len(ids) == 1:  # a single token has nothing to predict, but may be judged
            twice = self._encoder.tokens({**record, "input_ids": ids * 2, "loss_mask": [1, 1]})
            return replace(twice, ids=twice.ids[:1], loss_weights=twice.loss_weights[:1])
        return self._encoder.tokens({**record, "loss_mask": [1] * (len(ids) if isinstance(ids, list) else 0)})


def _number(label: object) -> float:
    # 1e400 in JSON is inf, and comparisons with nan are false
    if isinstance(label, int | float) and not isinstance(label, bool) and abs(label) <= _FLOAT32_MAX:
        return float(label)
    raise DataError(f"'label' is {label!r:.40}, but must be a finite number that float32 can hold; change it")


class PreferenceEncoder:
    """Encodes a record as a chosen and a rejected sequence, or as one answer, with a negative weight if unwanted."""

    def __init__(
        self, encoder: RecordEncoder, compares: Literal["pairs", "answers"], ignored: Set[str], is_judged: bool = False
    ) -> None:
        self._encoder, self._compares, self._ignored, self._is_judged = encoder, compares, ignored, is_judged
        self.fingerprint = f"{encoder.fingerprint} {compares} {_PREFERENCE_VERSION}{' judged' if is_judged else ''}"

    def encode(self, record: dict[str, Any], folder: Path = HERE) -> tuple[TokenizedSample, ...]:
        record = self._encoder.renamed(record)
        match self._compares:
            case "pairs":
                return self._pair(record, folder)
            case "answers":
                return (self._answer(record, folder),)
            case _:
                assert_never(self._compares)

    def _pair(self, record: dict[str, Any], folder: Path) -> tuple[TokenizedSample, ...]:
        self._check_keys(record, _JUDGED_KEYS if self._is_judged else _PAIR_KEYS)
        answers = {name: _answer(record, name) for name in ("chosen", "rejected")}
        if isinstance(answers["chosen"], str) != isinstance(answers["rejected"], str):
            raise DataError("'chosen' and 'rejected' must both be texts or both be lists of messages; fix one")
        prompt = record.get("prompt")
        if prompt is None:
            prompt = _common(answers["chosen"], answers["rejected"])
            answers = {name: answer[len(prompt) :] for name, answer in answers.items()}
        pair = self._sequences(record, prompt, answers, folder)
        if not self._is_judged:
            return pair
        # every token has the margin as its extra, as the cache stores extras
        sized = [(sequence, len(sequence.ids)) for sequence in map(judged, pair)]
        return tuple(replace(sequence, extras=np.full((n, 1), _margin(record), np.float32)) for sequence, n in sized)

    def _check_keys(self, record: dict[str, Any], known: Set[str]) -> None:
        check_keys(record, known | {*IMAGE_KEYS} if self._encoder.reads_images else known, self._ignored)

    def _answer(self, record: dict[str, Any], folder: Path) -> TokenizedSample:
        self._check_keys(record, _ANSWER_KEYS)
        label = record.get("label")
        if not isinstance(label, bool):
            raise DataError(f"'label' is {label!r}, but must be true (a wanted answer) or false; change it")
        if record.get("prompt") is None:
            raise DataError("has no 'prompt'; a line needs prompt, completion and label")
        (sample,) = self._sequences(record, record["prompt"], {"completion": _answer(record, "completion")}, folder)
        # the sign is the label, even with a weight of 0, since the cache has no other field for it
        return replace(sample, weight=math.copysign(sample.weight, 1.0 if label else -1.0))

    def _sequences(
        self, record: dict[str, Any], prompt: object, named_answers: Mapping[str, Any], folder: Path
    ) -> tuple[TokenizedSample, ...]:
        """Encodes a prompt with each of its named answers, all texts or all lists of messages."""
        empty = next((name for name, answer in named_answers.items() if not answer), None)
        if empty is not None:
            raise DataError(f"{empty!r} is empty after the prompt, so there is nothing to compare; remove the line")
        if all(isinstance(answer, str) for answer in named_answers.values()):
            text = check_text(prompt, "'prompt'")
            answers = [check_text(answer, f"{name!r}") for name, answer in named_answers.items()]
            only_messages = ("tools", "chat_template_kwargs", *IMAGE_KEYS)
            if named := next((key for key in only_messages if record.get(key)), None):
                raise DataError(f"has {named!r}, which only messages can have; write the prompt as messages")
            joined = self._encoder.joined(text, answers, record.get("weight", 1.0))
            return tuple(map(self._encoder.without_stray_images, joined))
        if not isinstance(prompt, list):
            name = next(iter(named_answers))
            raise DataError(f"{name!r} is a list of messages, but 'prompt' is not; use the same form for both")
        shared = {key: record[key] for key in (*_SHARED_KEYS, *IMAGE_KEYS) if key in record}
        before = [*map(untrained, prompt)]
        conversations = {name: {"messages": [*before, *answer], **shared} for name, answer in named_answers.items()}
        if self._encoder.reads_images:
            conversations = {name: with_column(conversation) for name, conversation in conversations.items()}
            for name, conversation in conversations.items():
                if any(map(has_images, conversation["messages"][len(before) :])):
                    raise DataError(f"{name!r} has an image, but only the prompt can have images; move it there")
        encoded = (self._encoder.conversation(conversation, folder) for conversation in conversations.values())
        return tuple(map(self._encoder.without_stray_images, encoded))


def _margin(record: dict[str, Any]) -> float:
    margin = record.get("margin", 0.0)
    if isinstance(margin, bool) or not isinstance(margin, int | float) or not abs(margin) <= _FLOAT32_MAX:
        raise DataError(f"'margin' is {margin!s:.40}, but must be a finite number of float32; change it")
    return float(margin)


def _answer(record: dict[str, Any], name: str) -> Any:
    if not isinstance(record.get(name), str | list):
        raise DataError(f"{name!r} must be a string or a list of messages, but is {record.get(name)!r:.40}; write it")
    return record[name]


def _common(chosen: Any, rejected: Any) -> Any:
    """Returns the prompt with which both answers begin. If the longer answer merely continues the shorter one, the last
    piece (character or message) of the shorter one is its answer."""
    shorter = min(len(chosen), len(rejected))
    count = next((index for index, (one, other) in enumerate(zip(chosen, rejected)) if one != other), None)
    if count is None:
        return chosen if chosen == rejected else chosen[: max(0, shorter - 1)]
    prompt = chosen[:count]
    # tokenizers join a blank to the word after it
    prompt = prompt[:-1] if isinstance(prompt, str) and prompt.endswith(" ") else prompt
    if not prompt:
        raise DataError("'chosen' and 'rejected' have no common beginning, and there is no 'prompt'; give it")
    return prompt
