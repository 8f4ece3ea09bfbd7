"""A whole conversation as the model reads it, and what in it counts in the loss."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from mtrain.base.errors import DataError
from mtrain.data.chat.conversation import ANSWERS, Conversation
from mtrain.data.chat.marks import RenderOther, marks_of
from mtrain.data.chat.spans import AnswerFinder, Compare, SpecialTexts


class Weighed(NamedTuple):
    """Characters in the loss."""

    start: int
    end: int
    weight: float
    """What each token counts."""


class Rendering(NamedTuple):
    """A rendered conversation."""

    text: str
    weighed: list[Weighed]
    """Ascending."""
    places: Mapping[int, tuple[int, int]]
    """Number of each message in the loss -> the characters among which it stands."""
    open_weight: float | None
    """What an end token counts that has to follow, as the last answer is in the loss and has none; else None."""


def found_answers(conversation: Conversation, compare: Compare, special: SpecialTexts) -> Rendering:
    """Of a template that does not mark answers.

    Raises:
        DataError: They cannot be found, or the template refuses the conversation.
    """
    messages, weights = conversation.messages, conversation.answer_weights
    finder = AnswerFinder(len(messages), compare, special)
    spans = finder.find({number: list(_own_words(messages[number])) for number in weights})
    weighed = [Weighed(span.start, span.end, weights[span.message]) for span in spans]
    is_open = spans[-1].message == len(messages) - 1 and not spans[-1].is_ended
    places = {span.message: (span.start, span.end) for span in spans}
    return Rendering(finder.full, weighed, places, weighed[-1].weight if is_open else None)


def marked_answers(conversation: Conversation, compare: Compare, render_other: RenderOther) -> Rendering:
    """Of a template that marks answers by `{% generation %}`.

    Raises:
        DataError: It marks none, or which answer a mark belongs to is not clear.
    """
    messages, weights = conversation.messages, conversation.answer_weights
    answers = [number for number, message in enumerate(messages) if message["role"] == ANSWERS]
    full, spans = marks_of(messages, answers, compare, render_other)
    for answer in weights:
        if not spans[answer]:
            raise DataError(f"the template marks nothing of messages[{answer}] by {{% generation %}}; correct it")
    weighed = [Weighed(start, end, weight) for answer, weight in weights.items() for start, end in spans[answer]]
    places = {answer: (spans[answer][0][0], spans[answer][-1][1]) for answer in weights}
    return Rendering(full, weighed, places, None)


def _own_words(message: Mapping[str, Any]) -> Iterator[str]:
    """Texts of an answer that are no markup of the template."""
    yield from (message[key] for key in ("reasoning_content", "content") if key in message)
    for call in message.get("tool_calls", ()):
        yield call.get("function", call)["name"]
