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
"""Conversation that waits for an answer; each message has `role` and `content`."""
Record = dict[str, Any]
"""Line of JSON with `prompt` (text or messages), or with `messages` and other keys of training data, such as
`tools`."""
Prompt = str | Messages | Record
"""Text to continue, message of a user, or conversation."""


class Question(NamedTuple):
    """Token ids that a model is given to continue."""

    ids: list[int]
    stop_ids: frozenset[int]
    """Tokens that end the answer."""


def questions_of(
    config: Config, tokenizer: Tokenizer, prompts: Sequence[Prompt], as_chat: bool | None, ends: Sequence[int] = ()
) -> list[Question]:
    """Encodes prompts.

    Args:
        prompts: Prompts; conversations always use the run's chat template.
        as_chat: Whether a text is a user's message, formatted by the run's chat template; None: if there is one.
        ends: Further tokens that end an answer, from `declared_ends` of the folder that the model comes from.
    """
    section = config.data if isinstance(config.data, SftSection) else None
    given = [
        _one(prompt, section, f"prompt {number}, {shown(prompt)[:60]!r}: ") for number, prompt in enumerate(prompts, 1)
    ]
    is_wanted = as_chat is not False or not all(isinstance(prompt, str) for prompt in given)
    encoder = chat_encoder(section, tokenizer) if is_wanted and section is not None else None
    chat_stops = None if encoder is None else encoder.stop_ids()
    found = []
    for number, prompt in enumerate(given, start=1):
        try:
            if isinstance(prompt, str) and (as_chat is False or (as_chat is None and encoder is None)):
                # a finetuning sample begins with the tokenizer's special tokens, a pretraining window anywhere
                in_text = section is not None and section.special_tokens_in_text
                ids = tokenizer.encode(prompt) if section is None else asked(prompt, tokenizer, in_text)
                stops = frozenset({tokenizer.eos_id})
            else:
                ids, stops = _asked(encoder, prompt), chat_stops or frozenset()
            if not ids:
                raise DataError("has no token; give a text that can be continued")
            if max(ids) >= config.model.vocab_size:
                raise DataError(
                    f"becomes token {max(ids)}, but model.vocab_size is {config.model.vocab_size}; change it"
                )
        except DataError as fault:
            raise DataError(f"prompt {number}, {shown(prompt)[:60]!r}: {fault}") from None
        found.append(Question(ids, stops.union(ends)))
    return found


def _one(prompt: Prompt, section: SftSection | None, place: str) -> str | Record:
    """Converts a prompt to a text or a record of messages; refuses a record with unknown keys."""
    if not isinstance(prompt, dict):
        return prompt if isinstance(prompt, str) else {"messages": list(prompt)}
    if "prompt" not in prompt:
        return prompt
    if not isinstance(prompt["prompt"], str):
        return {"messages": prompt["prompt"], **{key: each for key, each in prompt.items() if key != "prompt"}}
    check_keys(prompt, {"prompt"}, frozenset(section.ignore_keys if section is not None else ()), place)
    return str(prompt["prompt"])


def _asked(encoder: ChatEncoder | None, prompt: str | Record) -> list[int]:
    if encoder is None:
        raise ConfigError(
            "the run has no chat template (data.chat_template), so prompts cannot be user messages; continue plain "
            "text instead: without --chat, or with eval.chat=false, and without messages"
        )
    return encoder.prompt({"messages": [{"role": "user", "content": prompt}]} if isinstance(prompt, str) else prompt)


def read_prompts(path: Path) -> list[Prompt]:
    """Reads prompts from a file: one text per line, or in .jsonl one object per line with `prompt` or `messages`."""
    if not path.is_file():
        raise DataError(f"{path} with prompts cannot be read: there is no such file; name a text file")
    if path.suffix == ".jsonl":
        lines = enumerate(raw_lines(path), 1)
        found: list[Prompt] = [_of_line(line, f"{path}, line {number}") for number, line in lines if line.strip()]
    else:
        try:
            text = path.read_bytes().decode("utf-8-sig")
        except (OSError, UnicodeDecodeError) as fault:
            raise DataError(f"{path} with prompts cannot be read: {fault}; name a text file") from None
        # at line feeds only: a prompt may contain other characters that Python takes for line ends
        found = [line.removesuffix("\r") for line in text.split("\n") if line.strip()]
    if not found:
        raise DataError(f"{path} contains no prompt; write one per line")
    return found


def _of_line(line: bytes, place: str) -> Prompt:
    needed = f'{place}: needs an object with "prompt" (a text) or "messages" (a list of objects with role and content)'
    try:
        record = parsed_line(line)
    except DataError as fault:
        raise DataError(f"{needed}, but is not a JSON object: {fault}") from None
    given = [record[key] for key in ("prompt", "messages") if key in record]
    if len(given) != 1:
        raise DataError(f"{needed}, and one of the two; repair the line")
    (prompt,) = given
    is_conversation = isinstance(prompt, list) and prompt and all(isinstance(each, dict) for each in prompt)
    if not isinstance(prompt, str) and not is_conversation:
        raise DataError(f"{needed}, but the value is {str(prompt)[:60]!r}; repair the line")
    return prompt if len(record) == 1 else record


def shown(prompt: Prompt) -> str:
    """Returns a prompt as shown to people: the text, or the last message."""
    said = prompt.get("prompt", prompt.get("messages")) if isinstance(prompt, dict) else prompt
    return said if isinstance(said, str) else str(said[-1].get("content", "")) if said else ""
