"""Prompts, as texts or conversations, and their token ids."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mtrain.base.errors import ConfigError, DataError
from mtrain.config import Config
from mtrain.config.schema.data import SftSection
from mtrain.data.chat.encoder import ChatEncoder
from mtrain.data.encoding.checks import check_keys
from mtrain.data.encoding.encoder import chat_encoder
from mtrain.data.encoding.plain import asked
from mtrain.data.formats.jsonl import parsed_line, raw_lines
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


def questions_of(
    config: Config, tokenizer: Tokenizer, prompts: Sequence[Prompt], as_chat: bool | None, ends: Sequence[int] = ()
) -> list[Question]:
    """Encodes prompts.

    Args:
        prompts: Prompts; conversations always use the run's chat template.
        as_chat: Whether a text is a user's message, formatted by the run's chat template; None: if the run has one.
        ends: Further tokens that end an answer, from `declared_ends` of the model's Hugging Face folder.
    """
    section = config.data if isinstance(config.data, SftSection) else None
    inputs = [
        _text_or_record(prompt, section, f"prompt {number}, {shown(prompt)[:60]!r}: ")
        for number, prompt in enumerate(prompts, 1)
    ]
    is_wanted = as_chat is not False or not all(isinstance(prompt, str) for prompt in inputs)
    encoder = chat_encoder(section, tokenizer) if is_wanted and section is not None else None
    chat_stops = None if encoder is None else encoder.stop_ids()
    questions = []
    for number, prompt in enumerate(inputs, start=1):
        try:
            if isinstance(prompt, str) and (as_chat is False or (as_chat is None and encoder is None)):
                # a finetuning sample begins with the tokenizer's special tokens, a pretraining window anywhere
                in_text = section is not None and section.special_tokens_in_text
                ids = tokenizer.encode(prompt) if section is None else asked(prompt, tokenizer, in_text)
                stops = frozenset({tokenizer.eos_id})
            else:
                ids, stops = _question_ids(encoder, prompt), chat_stops or frozenset()
            if not ids:
                raise DataError("has no token; give a text that can be continued")
            if max(ids) >= config.model.vocab_size:
                raise DataError(
                    f"becomes token {max(ids)}, but model.vocab_size is {config.model.vocab_size}; change it"
                )
        except DataError as fault:
            raise DataError(f"prompt {number}, {shown(prompt)[:60]!r}: {fault}") from None
        questions.append(Question(ids, stops.union(ends)))
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


def _question_ids(encoder: ChatEncoder | None, prompt: str | Record) -> list[int]:
    if encoder is None:
        raise ConfigError(
            "the run has no chat template (data.chat_template), so prompts cannot be user messages; continue plain "
            "text instead: without --chat, or with eval.chat=false, and without messages"
        )
    return encoder.prompt({"messages": [{"role": "user", "content": prompt}]} if isinstance(prompt, str) else prompt)


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
    """Returns a prompt for display: the text, or the last message."""
    content = prompt.get("prompt", prompt.get("messages")) if isinstance(prompt, dict) else prompt
    if isinstance(content, str):
        return content
    return str(content[-1].get("content", "")) if content else ""
