"""Contents that are lists of parts: passed to templates that read lists, joined for those that read texts."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import replace
from typing import Any

from mtrain.data.chat.conversation import Conversation, texts_of
from mtrain.data.chat.marks import with_mark
from mtrain.data.chat.sandbox import NotRendered

_MARK, _KEY = "\U000f0008", "no_key_of_a_part"

Render = Callable[[Sequence[dict[str, Any]]], str | NotRendered]
"""Renders other messages with the tools and variables of the conversation."""


def as_read(conversation: Conversation, render: Render) -> Conversation:
    """Joins the parts of each content that the template would not read as a list.

    A template may read lists for some roles only. One that prints a list as it is, with the keys of its parts, does not
    read it.
    """
    roles = {each["role"] for each in conversation.messages if isinstance(each.get("content"), list)}
    read = {role for role in roles if _is_read(render(_with_lists(conversation.messages, {role}, _marked)))}
    return replace(conversation, messages=_with_lists(conversation.messages, read, list)) if roles else conversation


def _with_lists(
    messages: Sequence[dict[str, Any]], roles: Set[str], change: Callable[[list[dict[str, str]]], object]
) -> list[dict[str, Any]]:
    """Keeps lists for these roles only."""

    def content(message: dict[str, Any]) -> object:
        return change(message["content"]) if message["role"] in roles else "".join(texts_of(message["content"]))

    return [{**each, "content": content(each)} if isinstance(each.get("content"), list) else each for each in messages]


def _marked(parts: list[dict[str, str]]) -> list[dict[str, str]]:
    return [{**part, "text": with_mark(part["text"], _MARK), _KEY: _KEY} for part in parts]


def _is_read(text: str | NotRendered) -> bool:
    return isinstance(text, str) and _MARK in text and _KEY not in text
