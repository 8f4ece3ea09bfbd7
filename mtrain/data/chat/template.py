"""Sources of a chat template: the tokenizer's folder, a name, or a separate file."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mtrain.base.errors import DataError
from mtrain.base.files import write_atomically
from mtrain.base.plain_files import read_plain_file
from mtrain.config.schema.data import is_path_of_template
from mtrain.hf.schema.files import json_object

SETTINGS_FILE = "tokenizer_config.json"
TEMPLATE_FILE = "chat_template.jinja"
TEMPLATE_FOLDER = "additional_chat_templates"
_PROCESSOR_FILE = "chat_template.json"
SPECIAL_TOKENS_FILE = "special_tokens_map.json"
_DEFAULT, _WITH_TOOLS = "default", "tool_use"
_MOST_BYTES = 1 << 24
"""Largest template or settings file; the longest templates have about twenty thousand bytes."""


@dataclass(frozen=True)
class ChatTemplate:
    text: str
    origin: Path


@dataclass(frozen=True)
class ChatTemplates:
    """Template of a run, and the one for conversations with tools, which differs for some models."""

    default: ChatTemplate
    with_tools: ChatTemplate


def chosen_templates(choice: str, tokenizer: Path) -> ChatTemplates | None:
    """Finds the templates of `data.chat_template`: "auto" (None if there are none), a name, or the path of a file."""
    if is_path_of_template(choice):
        return _one_template(ChatTemplate(_text(Path(choice)), Path(choice)))
    named = named_templates(tokenizer)
    if choice != "auto":
        if choice in named:
            return _one_template(named[choice])
        raise DataError(
            f"{tokenizer.parent} has no chat template named {choice!r}, but {_listed(named)}; set data.chat_template "
            "to one of them, to auto, to plain, or to the path of a .jinja file"
        )
    if not named:
        return None
    if _DEFAULT not in named:
        raise DataError(
            f"{tokenizer.parent} has chat templates, but none is the default: {_listed(named)}; name one as "
            "data.chat_template"
        )
    return ChatTemplates(named[_DEFAULT], named.get(_WITH_TOOLS, named[_DEFAULT]))


def named_templates(tokenizer: Path) -> dict[str, ChatTemplate]:
    """Finds the templates in a tokenizer's folder by name; the one without a name is "default".

    Files take precedence over settings, as in transformers.

    Source: transformers 5.23, tokenization_utils_base.py, _from_pretrained; processors write chat_template.json.
    """
    folder = tokenizer.parent
    templates: dict[str, ChatTemplate] = {}
    if (file := folder / TEMPLATE_FILE).is_file():
        templates[_DEFAULT] = ChatTemplate(_text(file), file)
    for file in sorted((folder / TEMPLATE_FOLDER).glob("*.jinja")):
        templates[file.stem] = ChatTemplate(_text(file), file)
    for name in (SETTINGS_FILE, _PROCESSOR_FILE):
        if not templates:
            templates = _in_settings(folder / name)
    return templates


def template_files(templates: ChatTemplates) -> dict[str, str]:
    """Returns path in a tokenizer's folder -> text, for `auto` to find."""
    files = {TEMPLATE_FILE: templates.default.text}
    if templates.with_tools != templates.default:
        files[f"{TEMPLATE_FOLDER}/{_WITH_TOOLS}.jinja"] = templates.with_tools.text
    return files


def put_templates(files: Mapping[str, str], folder: Path) -> None:
    """Writes these templates into a tokenizer's folder, unless they are there already."""
    named = named_templates(folder / SETTINGS_FILE)
    current = {name: named[name].text for name in (_DEFAULT, _WITH_TOOLS) if name in named}
    new = {_DEFAULT if name == TEMPLATE_FILE else Path(name).stem: text for name, text in files.items()}
    if current == new:
        return
    for other in [folder / TEMPLATE_FILE, folder / _PROCESSOR_FILE, *(folder / TEMPLATE_FOLDER).glob("*.jinja")]:
        other.unlink(missing_ok=True)
    settings = _settings(folder / SETTINGS_FILE)
    if settings.pop("chat_template", None) is not None:
        write_atomically(folder / SETTINGS_FILE, json.dumps(settings, indent=2, ensure_ascii=False) + "\n")
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        write_atomically(folder / name, text)


def _one_template(template: ChatTemplate) -> ChatTemplates:
    return ChatTemplates(template, template)


def _in_settings(file: Path) -> dict[str, ChatTemplate]:
    content = _settings(file).get("chat_template")
    if not content:
        return {}
    if isinstance(content, str):
        return {_DEFAULT: ChatTemplate(content, file)}
    if isinstance(content, list) and all(_is_named(entry) for entry in content):
        return {entry["name"]: ChatTemplate(entry["template"], file) for entry in content}
    raise DataError(f"{file} has a chat_template that is neither a string nor a list of named templates; correct it")


def _is_named(entry: object) -> bool:
    return isinstance(entry, dict) and isinstance(entry.get("name"), str) and isinstance(entry.get("template"), str)


def _settings(file: Path) -> dict[str, Any]:
    """Reads the settings; empty without a file."""
    return json_object(file, _content(file)) if file.exists() else {}


def _text(file: Path) -> str:
    try:
        return _content(file).decode("utf-8")
    except UnicodeDecodeError as fault:
        raise DataError(
            f"chat template {file}: byte {fault.start + 1} is not UTF-8; save the file in that encoding"
        ) from None


def _content(file: Path) -> bytes:
    try:
        return read_plain_file(file, _MOST_BYTES)
    except OSError as fault:
        raise DataError(f"{file} cannot be read: {fault.strerror or fault}; check the path") from fault


def _listed(named: Mapping[str, ChatTemplate]) -> str:
    return ", ".join(sorted(named)) or "none at all"
