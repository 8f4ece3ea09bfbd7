"""Sources of a chat template: the tokenizer's folder, a name, or a file of its own."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mtrain.base.errors import DataError
from mtrain.base.files import write_atomically
from mtrain.base.plain_files import read_plain_file
from mtrain.config.schema.data import is_path_of_template
from mtrain.hf.tokenizer.tokenizer import json_object

SETTINGS_FILE = "tokenizer_config.json"
TEMPLATE_FILE = "chat_template.jinja"
TEMPLATE_FOLDER = "additional_chat_templates"
_PROCESSOR_FILE = "chat_template.json"
SPECIAL_TOKENS_FILE = "special_tokens_map.json"
_DEFAULT, _WITH_TOOLS = "default", "tool_use"
_MOST_BYTES = 1 << 24
"""Largest size of a template or a file of settings; the longest templates have about twenty thousand bytes."""


@dataclass(frozen=True)
class ChatTemplate:
    """One template and its file."""

    text: str
    origin: Path
    """File that holds the template."""


@dataclass(frozen=True)
class ChatTemplates:
    """The template of a run, and that for conversations with tools, which some models have separately."""

    default: ChatTemplate
    with_tools: ChatTemplate


def chosen_templates(choice: str, tokenizer: Path) -> ChatTemplates | None:
    """Finds the templates that `data.chat_template` means; None where "auto" finds none.

    Args:
        choice: Value of the key: "auto", the name of one of several templates, or the path of a file.
        tokenizer: Path of the tokenizer, as in `Tokenizer.path`.

    Raises:
        DataError: There is no such template, or a file is damaged.
    """
    if is_path_of_template(choice):
        return _alone(ChatTemplate(_text(Path(choice)), Path(choice)))
    named = named_templates(tokenizer)
    if choice != "auto":
        if choice in named:
            return _alone(named[choice])
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
    """Finds the templates in a tokenizer's folder by name; "default" is the template without a name.

    Files take precedence over settings, as in transformers.

    Raises:
        DataError: A file is damaged.

    Source: transformers 5.23, tokenization_utils_base.py, _from_pretrained; chat_template.json is of its processors.
    """
    folder = tokenizer.parent
    found: dict[str, ChatTemplate] = {}
    if (file := folder / TEMPLATE_FILE).is_file():
        found[_DEFAULT] = ChatTemplate(_text(file), file)
    for file in sorted((folder / TEMPLATE_FOLDER).glob("*.jinja")):
        found[file.stem] = ChatTemplate(_text(file), file)
    for name in (SETTINGS_FILE, _PROCESSOR_FILE):
        if not found:
            found = _in_settings(folder / name)
    return found


def template_files(templates: ChatTemplates) -> dict[str, str]:
    """Returns path inside a tokenizer's folder -> text, so that `auto` finds these templates there."""
    files = {TEMPLATE_FILE: templates.default.text}
    if templates.with_tools != templates.default:
        files[f"{TEMPLATE_FOLDER}/{_WITH_TOOLS}.jinja"] = templates.with_tools.text
    return files


def put_templates(files: Mapping[str, str], folder: Path) -> None:
    """Makes these the templates of a tokenizer's folder; nothing is touched where they already are.

    Args:
        files: Templates as `template_files` returns them.
        folder: Folder of a tokenizer; may hold none.

    Raises:
        DataError: The settings of the tokenizer are damaged.
    """
    named = named_templates(folder / SETTINGS_FILE)
    held = {name: named[name].text for name in (_DEFAULT, _WITH_TOOLS) if name in named}
    wanted = {_DEFAULT if name == TEMPLATE_FILE else Path(name).stem: text for name, text in files.items()}
    if held == wanted:
        return
    for other in [folder / TEMPLATE_FILE, folder / _PROCESSOR_FILE, *(folder / TEMPLATE_FOLDER).glob("*.jinja")]:
        other.unlink(missing_ok=True)
    settings = _settings(folder / SETTINGS_FILE)
    if settings.pop("chat_template", None) is not None:
        write_atomically(folder / SETTINGS_FILE, json.dumps(settings, indent=2, ensure_ascii=False) + "\n")
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        write_atomically(folder / name, text)


def _alone(template: ChatTemplate) -> ChatTemplates:
    return ChatTemplates(template, template)


def _in_settings(file: Path) -> dict[str, ChatTemplate]:
    content = _settings(file).get("chat_template")
    if not content:
        return {}
    if isinstance(content, str):
        return {_DEFAULT: ChatTemplate(content, file)}
    if isinstance(content, list) and all(_is_named(each) for each in content):
        return {each["name"]: ChatTemplate(each["template"], file) for each in content}
    raise DataError(f"{file} has a chat_template that is neither a string nor a list of named templates; correct it")


def _is_named(found: object) -> bool:
    return isinstance(found, dict) and isinstance(found.get("name"), str) and isinstance(found.get("template"), str)


def _settings(file: Path) -> dict[str, Any]:
    """Reads the settings; empty where there is no such file."""
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
