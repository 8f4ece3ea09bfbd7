"""Stop tokens: an exported chat model stops where the run's own answers stop, whichever program generates.

transformers and vLLM end an answer at the ids of generation_config.json and at the tokenizer's eos_token. A base model
names the end of a document there, but a chat template teaches the end of a turn.
"""

import json
import logging
from pathlib import Path
from typing import Any, NamedTuple

from mtrain.base.errors import DataError
from mtrain.base.files import write_atomically
from mtrain.config.schema.model import ModelSection
from mtrain.data.chat.encoder import ChatEncoder, ChatOptions, Ends
from mtrain.data.chat.template import SETTINGS_FILE, SPECIAL_TOKENS_FILE, ChatTemplates, chosen_templates
from mtrain.data.encoding.plain import PLAIN_TEMPLATE
from mtrain.hf.schema.files import EOS_KEY, GENERATION_NAME, as_declared, declared_ends, read_json
from mtrain.hf.tokenizer.tokenizer import HF_TOKENIZER_FILE, Tokenizer, load_tokenizer

_log = logging.getLogger(__name__)

_ANY_DATE = "2026-01-01"
"""Date for a template that writes a date; the end of an answer does not depend on it."""
_EOS = "eos_token"
_EXTRA_KEYS = ("extra_special_tokens", "additional_special_tokens")


class Ending(NamedTuple):
    """Tokens that end an answer of an exported model."""

    ids: list[int]
    """Token ids, the end of a turn first."""
    is_new: bool
    """Whether the original model lacked the end of a turn."""


def put_ending(folder: Path, origin: Path | None, model: ModelSection) -> Ending | None:
    """Writes the tokens that end an answer under the chat template into an export; keeps files that have them already.

    generation_config.json gets the end of a turn before its other ends. If the original did not list it, it also
    becomes the tokenizer's eos_token, unless the template uses eos_token for something else.

    Returns:
        Tokens that end an answer; None if the model has a head, the folder has no tokenizer, or its template has no
        end.
    """
    if model.output.head_rows or not (folder / HF_TOKENIZER_FILE).is_file():
        return None
    tokenizer = load_tokenizer(folder)
    templates = chosen_templates("auto", tokenizer.path)
    if templates is None:
        return None
    try:
        stops, inside = _ends(templates, tokenizer)
    except DataError as fault:
        _log.info(f"note: {folder.name} gets no stop tokens: {fault}")
        return None
    declared = declared_ends(origin)
    if early := [tokenizer.name(token) for token in (set(declared) - set(stops)) & set(inside)]:
        _log.warning(
            f"the chat template writes {', '.join(sorted(early))} inside answers, but {origin} lists it as a stop "
            f"token, so programs that load {folder.name} stop there; remove it from {EOS_KEY} in {GENERATION_NAME}"
        )
    ending = Ending(list(dict.fromkeys([*stops, tokenizer.eos_id, *declared])), not set(stops) <= set(declared))
    if not set(ending.ids) <= set(declared):
        has_original = origin is not None and (origin / GENERATION_NAME).is_file()
        original = read_json(origin / GENERATION_NAME) if origin is not None and has_original else {}
        write_json(folder / GENERATION_NAME, {**original, EOS_KEY: as_declared(ending.ids)})
    texts = {templates.default.text, templates.with_tools.text}
    if ending.is_new and stops[0] != tokenizer.eos_id and not any(_EOS in text for text in texts):
        _write_eos_token(folder, tokenizer, tokenizer.name(stops[0]))
    return ending


def ends_next_to(path: Path) -> frozenset[int]:
    """Returns the tokens that end answers under the chat templates next to a tokenizer; empty without templates and,
    with a note in the log, if a file cannot be read."""
    try:
        tokenizer = load_tokenizer(path)
        templates = chosen_templates("auto", tokenizer.path)
        return frozenset() if templates is None else frozenset(_ends(templates, tokenizer).ids)
    except DataError as fault:
        _log.info(f"note: the stop tokens of the chat templates of {path} are unknown: {fault}")
        return frozenset()


def _ends(templates: ChatTemplates, tokenizer: Tokenizer) -> Ends:
    if templates.default.text == PLAIN_TEMPLATE:
        return Ends([tokenizer.eos_id], [])
    return ChatEncoder(templates, tokenizer, ChatOptions(date=_ANY_DATE)).ends()


def _write_eos_token(folder: Path, tokenizer: Tokenizer, name: str) -> None:
    """Replaces the eos_token in the settings; the old one remains a special token."""
    settings = read_json(folder / SETTINGS_FILE)
    if settings.get("add_eos_token"):
        return  # or every text would end with the end of a turn
    old = tokenizer.name(tokenizer.eos_id)
    if old not in {token.get("content") for token in read_json(folder / HF_TOKENIZER_FILE).get("added_tokens") or []}:
        key = _EXTRA_KEYS[0] if settings.get(_EXTRA_KEYS[0]) else _EXTRA_KEYS[1]
        extra = settings.get(key) or []
        if isinstance(extra, list):
            settings[key] = [*extra, old]
    write_json(folder / SETTINGS_FILE, {**settings, _EOS: name})
    # this file takes precedence if the settings do not list added tokens
    if (file := folder / SPECIAL_TOKENS_FILE).is_file() and _EOS in (named := read_json(file)):
        write_json(file, {**named, _EOS: name})


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Writes JSON in Hugging Face's format."""
    write_atomically(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n")
