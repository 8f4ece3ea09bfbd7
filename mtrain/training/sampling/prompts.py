"""What a model is asked."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mtrain.base.errors import ConfigError, DataError
from mtrain.config import Config
from mtrain.config.schema.data import SftSection
from mtrain.data.chat.encoder import ChatEncoder
from mtrain.data.encoding.encoder import chat_encoder
from mtrain.tokenizer import Tokenizer

Messages = Sequence[Mapping[str, Any]]
"""A conversation that waits for an answer: each with `role` and `content`."""
Prompt = str | Messages
"""A text to continue, or what a user says; or a conversation."""


class Question(NamedTuple):
    """What a model is given to continue."""

    ids: list[int]
    stop_ids: frozenset[int]
    """Each of them ends the answer."""


def questions_of(
    config: Config, tokenizer: Tokenizer, prompts: Sequence[Prompt], as_chat: bool | None, ends: Sequence[int] = ()
) -> list[Question]:
    """Token ids of prompts.

    Args:
        config: Of the run.
        tokenizer: That of `data.tokenizer`.
        prompts: Conversations always go through the run's chat template.
        as_chat: Whether a text is what a user says, to be written by the run's chat template; None: where it has one.
        ends: Further tokens that end an answer, as `declared_ends` of the folder that the model comes from.

    Raises:
        ConfigError: A chat template is wanted and the run has none.
        DataError: The template refuses a prompt, or a prompt has no token.
    """
    is_wanted = as_chat is not False or not all(isinstance(prompt, str) for prompt in prompts)
    encoder = chat_encoder(config.data, tokenizer) if is_wanted and isinstance(config.data, SftSection) else None
    chat_stops = None if encoder is None else encoder.stop_ids()
    found = []
    for number, prompt in enumerate(prompts, start=1):
        if isinstance(prompt, str) and (as_chat is False or (as_chat is None and encoder is None)):
            # a finetuning sample begins with the tokenizer's bos, a pretraining window anywhere
            start = [] if config.data.kind != "sft" or tokenizer.bos_id is None else [tokenizer.bos_id]
            ids, stops = start + tokenizer.encode(prompt), frozenset({tokenizer.eos_id})
        else:
            ids, stops = _asked(encoder, prompt), chat_stops or frozenset()
        if not ids:
            raise DataError(f"prompt {number} is {prompt!r}, which has no token; give a text that can be continued")
        found.append(Question(ids, stops.union(ends)))
    return found


def _asked(encoder: ChatEncoder | None, prompt: Prompt) -> list[int]:
    if encoder is None:
        raise ConfigError(
            "the run has no chat template (data.chat_template), so nothing can be asked; continue plain text instead: "
            "without --chat, or with eval.chat=false, and without messages"
        )
    return encoder.prompt([{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt)


def read_prompts(path: Path) -> list[Prompt]:
    """Prompts of a file: of .jsonl one object a line, with `prompt` (text) or `messages`; else one text a line.

    Raises:
        DataError: It is missing, holds nothing, or a line cannot be understood; names it.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as fault:
        raise DataError(f"{path} with prompts cannot be read: {fault}; name a text file") from None
    is_json = path.suffix == ".jsonl"
    found = [
        _of_line(line, f"{path}, line {n}") if is_json else line for n, line in enumerate(lines, 1) if line.strip()
    ]
    if not found:
        raise DataError(f"{path} holds no prompt; write one a line")
    return found


def _of_line(line: str, place: str) -> Prompt:
    needed = f'{place}: needs an object with "prompt" (a text) or "messages" (a list of objects with role and content)'
    try:
        record = json.loads(line)
    except ValueError as fault:
        raise DataError(f"{needed}, but is no JSON: {fault}") from None
    given = [record[key] for key in ("prompt", "messages") if isinstance(record, dict) and key in record]
    if len(given) != 1:
        raise DataError(f"{needed}, and one of the two; repair the line")
    (prompt,) = given
    is_conversation = isinstance(prompt, list) and prompt and all(isinstance(each, dict) for each in prompt)
    if not isinstance(prompt, str) and not is_conversation:
        raise DataError(f"{needed}, but the value is {str(prompt)[:60]!r}; repair the line")
    return prompt  # type: ignore[no-any-return]


def shown(prompt: Prompt) -> str:
    """For people: the text, or what was said last."""
    return prompt if isinstance(prompt, str) else str(prompt[-1].get("content", ""))
