"""Answers in a rendered conversation, found by marks of the template or by what it writes for shorter conversations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from mtrain.base.errors import DataError
from mtrain.data.chat.conversation import ANSWERS, Conversation, texts_of
from mtrain.data.chat.marks import RenderOther, marks_of
from mtrain.data.chat.spans import AnswerFinder, Compare, SpecialTexts


class Answer(NamedTuple):
    """An answer in the loss, and what the template writes after it."""

    message: int
    spans: tuple[tuple[int, int], ...]
    """First character and end of each piece, ascending."""
    after: int
    """End of the special token that follows at once; else that of the last piece."""
    weight: float
    """Weight of each token in the loss."""

    @property
    def place(self) -> tuple[int, int]:
        return self.spans[0][0], self.spans[-1][1]


class Rendering(NamedTuple):
    """A rendered conversation."""

    text: str
    answers: list[Answer]
    """Answers in the loss, ascending."""


def found_answers(conversation: Conversation, compare: Compare, special: SpecialTexts) -> Rendering:
    """Renders a conversation under a template that does not mark answers."""
    messages, weights = conversation.messages, conversation.answer_weights
    finder = AnswerFinder(len(messages), compare, special)
    spans = finder.find({number: list(_own_words(messages[number])) for number in weights})
    full = finder.full
    answers = [
        Answer(each.message, ((each.start, each.end),), special.after(full, each.end), weights[each.message])
        for each in spans
    ]
    return Rendering(full, answers)


def marked_answers(
    conversation: Conversation, compare: Compare, render_other: RenderOther, special: SpecialTexts
) -> Rendering:
    """Renders a conversation under a template that marks answers by `{% generation %}`."""
    messages, weights = conversation.messages, conversation.answer_weights
    numbers = [number for number, message in enumerate(messages) if message["role"] == ANSWERS]
    full, spans = marks_of(messages, numbers, compare, render_other)
    for number in weights:
        if not spans[number]:
            raise DataError(f"the template marks nothing of messages[{number}] by {{% generation %}}; correct it")
    answers = [
        Answer(number, tuple(spans[number]), special.after(full, spans[number][-1][1]), weight)
        for number, weight in weights.items()
    ]
    return Rendering(full, answers)


def _own_words(message: Mapping[str, Any]) -> Iterator[str]:
    """Yields the texts of an answer that are not markup."""
    yield from texts_of(message.get("reasoning_content", ""))
    yield from texts_of(message.get("content", ""))
    for call in message.get("tool_calls", ()):
        yield call.get("function", call)["name"]
