"""Prompts, as texts or conversations, and their token ids."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mtrain.base.errors import ConfigError, DataError
from mtrain.config import Config
from mtrain.config.schema.data import SftSection
from mtrain.core.batch.images import SampleImages
from mtrain.core.batch.sample import HERE
from mtrain.data.chat.encoder import ChatEncoder
from mtrain.data.encoding.checks import IMAGE_KEYS, check_keys
from mtrain.data.encoding.compared import image_processor
from mtrain.data.encoding.encoder import chat_encoder
from mtrain.data.encoding.images import IMAGE_TYPES, with_column
from mtrain.data.encoding.plain import asked
from mtrain.data.formats.jsonl import parsed_line, raw_lines
from mtrain.data.samples.images import placed
from mtrain.hf.images import ImageProcessor
from mtrain.hf.tokenizer.tokenizer import Tokenizer

Messages = Sequence[Mapping[str, Any]]
"""Conversation to answer; each message has `role` and `content`."""
Record = dict[str, Any]
"""Line of JSON with `prompt` (text or messages), or with `messages` and keys of training data, such as `tools`."""
Prompt = str | Messages | Record
"""Text to continue, message of a user, or conversation."""


class Question(NamedTuple):
    """Token ids for a model to continue."""

    ids: list[int]
    stop_ids: frozenset[int]
    """Tokens that end the answer."""
    images: SampleImages | None = None
    """Images among the tokens; None for text alone."""


def questions_of(
    config: Config,
    tokenizer: Tokenizer,
    prompts: Sequence[Prompt],
    as_chat: bool | None,
    ends: Sequence[int] = (),
    folder: Path = HERE,
) -> list[Question]:
    """Encodes prompts.

    Args:
        prompts: Prompts; conversations always use the run's chat template.
        as_chat: Whether a text is a user's message, formatted by the run's chat template; None: if the run has one.
        ends: Further tokens that end an answer, from `declared_ends` of the model's Hugging Face folder.
        folder: Folder from which the paths of images in prompts count.
    """
    section = config.data if isinstance(config.data, SftSection) else None
    inputs = [
        _text_or_record(prompt, section, f"prompt {number}, {shown(prompt)[:60]!r}: ")
        for number, prompt in enumerate(prompts, 1)
    ]
    is_wanted = as_chat is not False or not all(isinstance(prompt, str) for prompt in inputs)
    processor = None if section is None else image_processor(section, config.model)
    encoder = chat_encoder(section, tokenizer, processor) if is_wanted and section is not None else None
    chat_stops = None if encoder is None else encoder.stop_ids()
    questions = []
    for number, prompt in enumerate(inputs, start=1):
        try:
            if isinstance(prompt, str) and (as_chat is False or (as_chat is None and encoder is None)):
                # a finetuning sample begins with the tokenizer's special tokens, a pretraining window anywhere
                in_text = section is not None and section.special_tokens_in_text
                ids = tokenizer.encode(prompt) if section is None else asked(prompt, tokenizer, in_text)
                stops, images = frozenset({tokenizer.eos_id}), None
                if config.model.vision is not None and config.model.vision.image_token in ids:
                    raise DataError("has the image token, but no image; remove the token, or give messages with parts")
            else:
                ids, images = _question(encoder, prompt, processor, folder)
                stops = chat_stops or frozenset()
            if not ids:
                raise DataError("has no token; give a text that can be continued")
            if max(ids) >= config.model.vocab_size:
                raise DataError(
                    f"becomes token {max(ids)}, but model.vocab_size is {config.model.vocab_size}; change it"
                )
        except DataError as fault:
            raise DataError(f"prompt {number}, {shown(prompt)[:60]!r}: {fault}") from None
        questions.append(Question(ids, stops.union(ends), images))
    return questions


def _text_or_record(prompt: Prompt, section: SftSection | None, prefix: str) -> str | Record:
    """Converts a prompt to a text or a record of messages; refuses a record with unknown keys."""
    if not isinstance(prompt, dict):
        return prompt if isinstance(prompt, str) else {"messages": list(prompt)}
    if "prompt" not in prompt:
        return prompt
    if not isinstance(prompt["prompt"], str):
        return {"messages": prompt["prompt"], **{key: value for key, value in prompt.items() if key != "prompt"}}
    check_keys(prompt, {"prompt"}, frozenset(section.ignore_keys if section is not None else ()), prefix)
    return str(prompt["prompt"])


def _question(
    encoder: ChatEncoder | None, prompt: str | Record, processor: ImageProcessor | None, folder: Path
) -> tuple[list[int], SampleImages | None]:
    if encoder is None:
        raise ConfigError(
            "the run has no chat template (data.chat_template), so prompts cannot be user messages; continue plain "
            "text instead: without --chat, or with eval.chat=false, and without messages"
        )
    record = {"messages": [{"role": "user", "content": prompt}]} if isinstance(prompt, str) else prompt
    ids, images = encoder.prompt(record if processor is None else with_column(record), folder)
    if processor is None or not images:
        return ids, None
    return ids, placed(np.array(ids), [processor.patches(image.content) for image in images], processor)


def has_images(prompt: Prompt) -> bool:
    """Says whether a conversation has images, in a column or in its messages."""
    if isinstance(prompt, str):
        return False
    record = prompt if isinstance(prompt, dict) else {"messages": prompt}
    messages = record.get("messages", record.get("prompt"))
    contents = [message.get("content") for message in messages] if isinstance(messages, Sequence) else []
    parts = [part for content in contents if isinstance(content, list) for part in content]
    is_image = any(isinstance(part, Mapping) and part.get("type") in IMAGE_TYPES for part in parts)
    return is_image or any(name in record for name in IMAGE_KEYS)


def after_images(texts: Sequence[str], paths: Sequence[Path]) -> list[Prompt]:
    """Puts the images of files before each text, as one message of a user; without images, returns the texts."""
    if not paths:
        return list(texts)
    parts = [{"type": "image", "path": str(path.absolute())} for path in paths]
    return [[{"role": "user", "content": [*parts, {"type": "text", "text": text}]}] for text in texts]


def read_prompts(path: Path) -> list[Prompt]:
    """Reads prompts from a file: one text per line, or in .jsonl one object per line with `prompt` or `messages`."""
    if not path.is_file():
        raise DataError(f"{path}, which should hold prompts, does not exist; name a text file")
    if path.suffix == ".jsonl":
        lines = enumerate(raw_lines(path), 1)
        prompts: list[Prompt] = [
            _prompt_of_line(line, f"{path}, line {number}") for number, line in lines if line.strip()
        ]
    else:
        try:
            text = path.read_bytes().decode("utf-8-sig")
        except (OSError, UnicodeDecodeError) as fault:
            raise DataError(f"{path}, which should hold prompts, cannot be read: {fault}; name a text file") from None
        # at line feeds only: a prompt may contain other characters that Python's splitlines splits at
        prompts = [line.removesuffix("\r") for line in text.split("\n") if line.strip()]
    if not prompts:
        raise DataError(f"{path} contains no prompt; write one per line")
    return prompts


def _prompt_of_line(line: bytes, where: str) -> Prompt:
    needed = f'{where}: needs an object with "prompt" (a text) or "messages" (a list of objects with role and content)'
    try:
        record = parsed_line(line)
    except DataError as fault:
        raise DataError(f"{needed}, but is not a JSON object: {fault}") from None
    values = [record[key] for key in ("prompt", "messages") if key in record]
    if len(values) != 1:
        raise DataError(f"{needed}, exactly one of the two; repair the line")
    (prompt,) = values
    is_conversation = isinstance(prompt, list) and prompt and all(isinstance(message, dict) for message in prompt)
    if not isinstance(prompt, str) and not is_conversation:
        raise DataError(f"{needed}, but the value is {str(prompt)[:60]!r}; repair the line")
    return prompt if len(record) == 1 else record


def shown(prompt: Prompt) -> str:
    """Returns a prompt for display: the text, or the last message, with [image] for each image."""
    content = prompt.get("prompt", prompt.get("messages")) if isinstance(prompt, dict) else prompt
    if isinstance(content, str):
        return content
    said = content[-1].get("content", "") if content else ""
    parts = said if isinstance(said, list) else []
    texts = [str(part.get("text", "[image]")) for part in parts if isinstance(part, Mapping)]
    return " ".join(texts) if texts else str(said)
