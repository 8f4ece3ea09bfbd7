"""Checks that a template shows everything in a conversation, so that no part is dropped silently.

Most texts appear in the rendering unchanged. For one that does not, the conversation is rendered again with a mark in
it: a mark that does not appear is in a part that the template omits.
"""

import copy
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from mtrain.data.chat.conversation import Conversation
from mtrain.data.chat.sandbox import NotRendered, Renderer
from mtrain.data.chat.spans import UntrainableError

_FIRST, _LAST = "\U000f0004", "\U000f0005"
_END_OF_REASONING = re.compile(r"</?think>")


class _Part(NamedTuple):
    """A text that the template must show."""

    name: str
    """Name for error messages."""
    text: str
    within: tuple[int, int]
    """Part of the rendering in which the text must appear."""
    path: tuple[str | int, ...]
    """Path of the text in {"messages": ..., "tools": ...}."""
    position: int
    """End of this part in the text at `path`."""
    key: str | None = None
    """Key that the template must read, if the text alone proves little."""


def check_shown(
    conversation: Conversation, full: str, answers: Mapping[int, tuple[int, int]], template: str, renderer: Renderer
) -> None:
    """Refuses a conversation if the template leaves something out.

    Args:
        answers: Message number -> first character and end in the rendering, for messages in the loss.
    """
    for number, (start, end) in answers.items():
        _check_arguments(conversation.messages[number], number, full[start:end])
    missing = [
        part
        for part in _parts(conversation, answers, len(full))
        # the name of a tool may occur in any text, so the template has to mention tools at least
        if not (_appears(part.text, full, part.within) and (part.key is None or part.key in template))
    ]
    if not missing:
        return
    content: dict[str, Any] = copy.deepcopy({"messages": conversation.messages, "tools": conversation.tools})
    marks = [f"{_FIRST}{number}{_LAST}" for number in range(len(missing))]
    for mark, part in sorted(zip(marks, missing), key=lambda pair: -pair[1].position):  # from the end of each text on
        _insert(content, part, mark)
    probe = replace(renderer, messages=content["messages"], tools=content["tools"]).render(renderer.whole)
    if isinstance(probe, NotRendered):
        raise UntrainableError(
            f"the template may leave out {missing[0].name}, and refuses a test of it ({probe.why})", _REMEDY
        )
    for mark, part in zip(marks, missing):
        if not _appears(mark, probe, (0, len(probe))):
            raise UntrainableError(f"the template does not show {part.name} to the model", _REMEDY)


_REMEDY = "remove it from the line, or give data.chat_template a template that shows it"


def _parts(conversation: Conversation, answers: Mapping[int, tuple[int, int]], length: int) -> Iterator[_Part]:
    for number, message in enumerate(conversation.messages):
        is_answer, prefix = number in answers, f"messages[{number}]"
        within = answers.get(number, (0, length))
        # templates leave out reasoning of answers outside the loss on purpose
        for name, text, key in _contents(message.get("content", ""), ("messages", number, "content")):
            yield from _pieces(text, f"{prefix}.{name}", within, key, is_answer)
        if is_answer and "reasoning_content" in message:
            text = message["reasoning_content"]
            yield _Part(f"{prefix}.reasoning_content", text, within, ("messages", number, "thinking"), len(text))
        for index, call in enumerate(message.get("tool_calls", ())):
            path: tuple[str | int, ...] = ("messages", number, "tool_calls", index)
            yield from _name_part(call, f"{prefix}.tool_calls[{index}]", within, path, "tool_calls")
    for index, tool in enumerate(conversation.tools or ()):
        yield from _name_part(tool, f"tools[{index}]", (0, length), ("tools", index), "tools")


def _contents(
    content: str | list[dict[str, str]], path: tuple[str | int, ...]
) -> list[tuple[str, str, tuple[str | int, ...]]]:
    """Returns name, text and path of each text of a content."""
    if isinstance(content, str):
        return [("content", content, path)]
    return [
        (f"content[{index}]", part["text"], (*path, index, "text"))
        for index, part in enumerate(content)
        if "text" in part
    ]


def _pieces(
    content: str, name: str, within: tuple[int, int], path: tuple[str | int, ...], whole: bool
) -> Iterator[_Part]:
    """Yields reasoning and answer separately if a text holds both."""
    position = 0
    pieces = []
    for match in _END_OF_REASONING.finditer(content):
        pieces.append(_Part(name, content[position : match.start()], within, path, match.start()))
        position = match.end()
    last = _Part(name, content[position:], within, path, len(content))
    yield from (*pieces, last) if whole else (last,)


def _name_part(
    description: dict[str, Any], name: str, within: tuple[int, int], path: tuple[str | int, ...], key: str
) -> Iterator[_Part]:
    """Yields the name of a function; other kinds of descriptions have none."""
    inner = description.get("function", description)
    text = inner.get("name") if isinstance(inner, dict) else None
    if isinstance(text, str):
        path = (*path, "name") if inner is description else (*path, "function", "name")
        yield _Part(name, text, within, path, len(text), key)


def _appears(text: str, full: str, within: tuple[int, int]) -> bool:
    """Says whether the text appears, verbatim or inside JSON."""
    text = text.strip()
    if full.find(text, *within) >= 0:
        return True
    return any(full.find(json.dumps(text, ensure_ascii=ascii)[1:-1], *within) >= 0 for ascii in (False, True))


def _check_arguments(message: Mapping[str, Any], number: int, answer: str) -> None:
    for index, call in enumerate(message.get("tool_calls", ())):
        text = call.get("function", call).get("arguments")
        if not isinstance(text, str) or text in answer:
            continue
        if any(json.dumps(text, ensure_ascii=ascii)[1:-1] in answer for ascii in (False, True)):
            raise UntrainableError(
                f"messages[{number}].tool_calls[{index}] has its arguments as a text, which the template writes as "
                "JSON once more",
                "give the arguments as an object",
            )


def _insert(content: dict[str, Any], part: _Part, mark: str) -> None:
    holder: Any = content
    for key in part.path[:-1]:
        holder = holder[key]
    text = holder[part.path[-1]]
    holder[part.path[-1]] = text[: part.position] + mark + text[part.position :]
    if part.path[-1] == "thinking":
        holder["reasoning_content"] = holder["thinking"]  # two names of one text
