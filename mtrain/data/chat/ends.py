"""Finds the tokens at which answers stop: the same for training samples, sampling and exports.

The token that ends an answer depends on the kind of answer (a text, a tool call, a thought) and, if a template opens
messages with a token instead of closing them, on the next message. So the template renders answers of every kind, alone
and followed by messages of every role. A token that also occurs inside an answer does not end it: a model that stopped
there would not give the whole answer.

A sample contains an answer up to the first of these tokens; an answer without one is refused.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence, Set
from itertools import product
from typing import Any, NamedTuple

from mtrain.base.errors import DataError
from mtrain.data.chat.answers import Answer, Rendering
from mtrain.data.chat.conversation import ANSWERS, ROLES, Conversation
from mtrain.data.chat.sandbox import LimitError
from mtrain.data.chat.spans import SpecialTexts, UntrainableError


class Weighed(NamedTuple):
    """Characters in the loss."""

    start: int
    end: int
    weight: float


def up_to_stops(
    rendering: Rendering, stops: Sequence[tuple[int, int]], num_messages: int, special: SpecialTexts
) -> tuple[list[Weighed], float | None]:
    """Returns the characters in the loss, each answer up to the token that ends it, and the weight of an end token to
    append if the last answer has none, else None. Refuses an answer that lacks a stop, or continues after one.

    Args:
        stops: First character and end of every token at which an answer may stop, ascending.
    """
    weighed: list[Weighed] = []
    for answer in rendering.answers:
        end, is_ended = _end(rendering.text, answer, stops, num_messages, special)
        pieces = [(start, min(last, end)) for start, last in answer.spans if start < end]
        pieces[-1] = (pieces[-1][0], max(pieces[-1][1], end if end > answer.bounds[1] else 0))
        weighed += [Weighed(*piece, answer.weight) for piece in pieces]
        if not is_ended:
            return weighed, answer.weight
    return weighed, None


def _end(
    text: str, answer: Answer, stops: Sequence[tuple[int, int]], num_messages: int, special: SpecialTexts
) -> tuple[int, bool]:
    """Returns where the tokens of an answer end, and whether the last one is a stop."""
    first, last = answer.bounds
    index = bisect_left(stops, (first, first))
    if index < len(stops) and stops[index][1] <= last:
        end = stops[index][1]
        if any(special.without(text[max(start, end) : close]) for start, close in answer.spans if close > end):
            raise UntrainableError(
                f"the answer messages[{answer.message}] continues after {text[slice(*stops[index])]!r}, at which other "
                "answers stop, so a model would give a part of it",
                "change the line, or leave it out",
                answer.message,
            )
        return end, True
    if index < len(stops) and stops[index] == (last, answer.after):
        return answer.after, True
    if answer.message == num_messages - 1 and not text[last:].strip():
        return len(text), False
    token = special.last(text[slice(*answer.bounds)])
    how = f"with {token!r}" if token else "without a special token"
    raise UntrainableError(
        f"the answer messages[{answer.message}] ends {how}, where no model would stop, since this template ends other "
        "answers differently",
        "give data.chat_template a template that ends all answers the same way",
        answer.message,
    )


Find = Callable[[Conversation], Rendering]
_TOOL_ROLES = ("tool", "function", "ipython")
_QUESTION, _ANSWER, _THOUGHT, _FUNCTION = "ques7tion", "ans7wer", "tho7ught", "func7tion"
"""Texts that no template contains."""
_REASONING = {"reasoning_content": _THOUGHT, "thinking": _THOUGHT}
_TEXTS: tuple[dict[str, Any], ...] = (
    {"content": _ANSWER},
    {"content": _ANSWER, **_REASONING},
    {"content": f"<think>\n{_THOUGHT}\n</think>\n\n{_ANSWER}"},
    {"content": ""},
)
"""Answers without tool calls; the role is added later."""
_CALLS: tuple[tuple[dict[str, Any], int], ...] = (
    *(({"content": ""}, 1), ({"content": ""}, 2), ({}, 1), ({"content": _ANSWER}, 1)),
    *((_REASONING, 1), ({"content": "", **_REASONING}, 1)),
)
"""Answers with tool calls, and the number of calls; role and calls are added later."""
_SWITCHED_TO: tuple[object, ...] = (False, True, [])
_PARAMETERS = {"type": "object", "properties": {"x": {"type": "string"}}, "required": ["x"]}
TOOLS = [{"type": "function", "function": {"name": _FUNCTION, "description": "d", "parameters": _PARAMETERS}}]


class _Ending(NamedTuple):
    """What the template writes at the end of an answer."""

    inside: frozenset[str]
    """Special tokens inside the answer."""
    closing: list[str]
    """Special tokens after it, in order."""
    following: str | None
    """Special token immediately after the answer, if any."""


class _Kind(NamedTuple):
    """Endings of one kind of answer."""

    followed: list[_Ending]
    """When messages of other roles follow."""
    alone: _Ending | None
    """When it is the last message; None if the template refuses that."""


class _Setting(NamedTuple):
    """Tools and template variables of a conversation."""

    tools: list[Any] | None
    variables: dict[str, Any]


class EndFinder:
    """Finds the tokens at which the answers of one template stop."""

    def __init__(self, find: Find, special: SpecialTexts, eos: str) -> None:
        self._find, self._special, self._eos = find, special, eos
        self._fault: DataError | None = None
        self._change: Callable[[list[dict[str, Any]]], list[dict[str, Any]]] = list
        self.inside: frozenset[str] = frozenset()
        """Special tokens inside answers, once `find` has returned."""

    def find(self, tools: list[Any] | None, tools_of_calls: list[Any] | None, switches: Sequence[str]) -> list[str]:
        """Finds the end tokens, plain text's first; eos stands in for an end that the template omits."""
        for self._change in (*_CHANGES, list):
            if self._ending([_message("user"), {"role": ANSWERS, **_TEXTS[0]}], 1, _Setting(tools, {})) is not None:
                break
        first, *other_answers = _TEXTS
        kinds = [self._kind([], first, ROLES, _Setting(tools, {}))]
        kinds += [self._kind([], answer, ("user",), _Setting(tools, {})) for answer in other_answers]
        kinds += self._calls(_Setting(tools_of_calls, {}))
        for name, value in product(switches, _SWITCHED_TO):
            call = {"content": "", **_calls({"x": "y"}, 1)}
            kinds.append(self._kind([], _TEXTS[0], ("user",), _Setting(tools, {name: value})))
            kinds.append(self._kind([], call, ("tool",), _Setting(tools_of_calls, {name: value})))
        endings = [ending for kind in kinds for ending in (*kind.followed, kind.alone) if ending is not None]
        if not endings:
            assert self._fault is not None, "each one was refused"
            raise self._fault
        inside = self.inside = frozenset[str]().union(*(ending.inside for ending in endings))
        stops: dict[str, None] = {}
        for kind in kinds:
            # plain text must end somewhere, so its closing token counts even if other answers contain that token
            is_inside = not stops and kind.alone is not None and {*kind.alone.closing} <= inside
            stops |= dict.fromkeys(self._ends(kind, inside, frozenset() if is_inside else inside))
        return list(stops)

    def _calls(self, setting: _Setting) -> Iterator[_Kind]:
        # some templates write arguments as they are, others as JSON
        arguments: list[object] = [{"x": "y"}, '{"x": "y"}']
        by_form = [[({**texts, **_calls(argument, count)}) for texts, count in _CALLS] for argument in arguments]
        for first, *other_calls in by_form:
            kind = self._kind([], first, (*_TOOL_ROLES, "user", ANSWERS), setting)
            if kind.alone is None and not kind.followed:
                continue
            yield kind
            for answer in other_calls:
                yield self._kind([], answer, ("tool", "user"), setting)
            result = _message("tool")
            yield self._kind([{"role": ANSWERS, **first}, result], _TEXTS[0], ("user",), setting)
            return

    def _kind(
        self, before: list[dict[str, Any]], answer: dict[str, Any], roles: Sequence[str], setting: _Setting
    ) -> _Kind:
        conversation = [_message("user"), *before, {"role": ANSWERS, **answer}]
        followed = [
            ending
            for role in roles
            if (ending := self._ending([*conversation, _message(role)], len(conversation) - 1, setting)) is not None
        ]
        return _Kind(followed, self._ending(conversation, len(conversation) - 1, setting))

    def _ending(self, messages: list[dict[str, Any]], answer: int, setting: _Setting) -> _Ending | None:
        changed = self._change(messages)
        index = answer + len(changed) - len(messages)
        try:
            return self._read(self._find(Conversation(changed, *setting, {index: 1.0}, 1.0)))
        except LimitError:
            raise
        except DataError as fault:
            self._fault = self._fault or fault
            return None

    def _read(self, rendering: Rendering) -> _Ending:
        (answer,) = rendering.answers
        text = "".join(rendering.text[start:end] for start, end in answer.spans)
        tokens = list(self._special.pattern.finditer(text))
        is_closing = [not self._special.without(text[token.start() :]) for token in tokens]
        names = [token.group() for token in tokens]
        num_inside = is_closing.count(False)
        following = rendering.text[answer.bounds[1] : answer.after]
        return _Ending(frozenset(names[:num_inside]), names[num_inside:], following or None)

    def _ends(self, kind: _Kind, inside: Set[str], not_closing: Set[str]) -> list[str]:
        stops = []
        for ending in kind.followed:
            stop = self._stop(ending, not_closing)
            if stop is not None:
                stops.append(stop)
            elif ending.following is not None and ending.following not in inside:
                stops.append(ending.following)
        if kind.alone is None or not {*kind.alone.closing}.isdisjoint(stops):
            return stops
        stop = self._stop(kind.alone, not_closing) or kind.alone.following or self._eos
        return [stop, *stops]

    def _stop(self, ending: _Ending, inside: Set[str]) -> str | None:
        names = [name for name in ending.closing if name not in inside]
        if self._eos in names:
            return self._eos
        return names[-1] if names else None


def _message(role: str) -> dict[str, Any]:
    call = {"tool_call_id": "call00000", "name": _FUNCTION} if role in _TOOL_ROLES else {}
    return {"role": role, "content": _QUESTION, **call}


def _calls(arguments: object, count: int) -> dict[str, Any]:
    function = {"name": _FUNCTION, "arguments": arguments}
    calls = [{"id": f"call0000{number}", "type": "function", "function": function} for number in range(count)]
    return {"tool_calls": calls}


def _after_system(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [_message("system"), *messages]


def _in_parts(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {**message, "content": [{"type": "text", "text": message["content"]}]} if "content" in message else message
        for message in messages
    ]


_CHANGES: tuple[Callable[[list[dict[str, Any]]], list[dict[str, Any]]], ...] = (list, _after_system, _in_parts)
"""Variants of a conversation: some templates need a system message, others lists of parts."""
