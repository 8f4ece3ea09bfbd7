"""A whole conversation as the model reads it, and the characters that count in the loss."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from mtrain.base.errors import DataError
from mtrain.data.chat.conversation import ANSWERS, Conversation
from mtrain.data.chat.marks import RenderOther, marks_of
from mtrain.data.chat.spans import AnswerFinder, Compare, SpecialTexts


class Weighed(NamedTuple):
    """Characters that count in the loss."""

    start: int
    end: int
    weight: float
    """Weight of each token."""


class Rendering(NamedTuple):
    """A rendered conversation."""

    text: str
    weighed: list[Weighed]
    """Characters in the loss, in ascending order."""
    places: Mapping[int, tuple[int, int]]
    """Number of each message in the loss -> first character and end of its place in the text."""
    open_weight: float | None
    """Weight of an end token that has to follow, as the last answer is in the loss and has none; None where no token
    has to follow."""


def found_answers(conversation: Conversation, compare: Compare, special: SpecialTexts) -> Rendering:
    """Renders a conversation under a template that does not mark answers.

    Raises:
        DataError: An answer cannot be found, or the template refuses the conversation.
    """
    messages, weights = conversation.messages, conversation.answer_weights
    finder = AnswerFinder(len(messages), compare, special)
    spans = finder.find({number: list(_own_words(messages[number])) for number in weights})
    weighed = [Weighed(span.start, span.end, weights[span.message]) for span in spans]
    is_open = spans[-1].message == len(messages) - 1 and not spans[-1].is_ended
    places = {span.message: (span.start, span.end) for span in spans}
    return Rendering(finder.full, weighed, places, weighed[-1].weight if is_open else None)


def marked_answers(conversation: Conversation, compare: Compare, render_other: RenderOther) -> Rendering:
    """Renders a conversation under a template that marks answers by `{% generation %}`.

    Raises:
        DataError: An answer is not marked, or it is not clear which answer a mark belongs to.
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
    """Yields the texts of an answer that are no markup of the template."""
    yield from (message[key] for key in ("reasoning_content", "content") if key in message)
    for call in message.get("tool_calls", ()):
        yield call.get("function", call)["name"]
