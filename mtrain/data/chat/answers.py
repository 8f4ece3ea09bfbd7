"""Finds the answers in a rendered conversation, by the template's marks or by rendering shorter conversations."""

import copy
import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

from mtrain.base.errors import DataError
from mtrain.data.chat.conversation import ANSWERS, Conversation, texts_of
from mtrain.data.chat.sandbox import CLOSE, OPEN, Cut, NotRendered, Renderer
from mtrain.data.chat.spans import AnswerFinder, SpecialTexts, refused


class Answer(NamedTuple):
    """An answer in the loss, and the template's text after it."""

    message: int
    spans: tuple[tuple[int, int], ...]
    """First character and end of each piece, ascending."""
    after: int
    """End of the special token that follows immediately, or else of the last piece."""
    weight: float

    @property
    def bounds(self) -> tuple[int, int]:
        return self.spans[0][0], self.spans[-1][1]


class Rendering(NamedTuple):
    text: str
    answers: list[Answer]
    """Answers in the loss, ascending."""


def aligned_answers(conversation: Conversation, renderer: Renderer, special: SpecialTexts) -> Rendering:
    """Renders a conversation under a template that does not mark answers."""
    messages, weights = conversation.messages, conversation.answer_weights
    finder = AnswerFinder(renderer, special)
    spans = finder.find({number: list(_answer_texts(messages[number])) for number in weights})
    full = finder.full
    answers = [
        Answer(span.message, ((span.start, span.end),), special.after(full, span.end), weights[span.message])
        for span in spans
    ]
    return Rendering(full, answers)


def marked_answers(conversation: Conversation, renderer: Renderer, special: SpecialTexts) -> Rendering:
    """Renders a conversation under a template that marks answers by `{% generation %}`."""
    messages, weights = conversation.messages, conversation.answer_weights
    numbers = [number for number, message in enumerate(messages) if message["role"] == ANSWERS]
    full, spans = marks_of(numbers, renderer)
    for number in weights:
        if not spans[number]:
            raise DataError(f"the template marks nothing of messages[{number}] by {{% generation %}}; correct it")
    answers = [
        Answer(number, tuple(spans[number]), special.after(full, spans[number][-1][1]), weight)
        for number, weight in weights.items()
    ]
    return Rendering(full, answers)


def _answer_texts(message: Mapping[str, Any]) -> Iterator[str]:
    """Yields the texts of an answer that are not markup."""
    yield from texts_of(message.get("reasoning_content", ""))
    yield from texts_of(message.get("content", ""))
    for call in message.get("tool_calls", ()):
        yield call.get("function", call)["name"]


_FIRST, _LAST = "\U000f0006", "\U000f0007"
_MARK = re.compile(f"[{OPEN}{CLOSE}]|{_FIRST}([0-9]+){_LAST}")
_TAG_OR_CHAR = re.compile(r"<[^<>]*>|(\S)")


def marks_of(answers: Sequence[int], renderer: Renderer) -> tuple[str, dict[int, list[tuple[int, int]]]]:
    """Returns the rendering, and the nonempty spans that the template marks in each answer; `answers` must ascend.

    Each message carries its number in its texts, so a mark belongs to the answer whose number it contains, or to the
    one answer between the numbers around it. If a template does more with the texts than print them, its marks are
    counted in the renderings of ever longer conversations instead.
    """
    size = len(renderer.messages)
    (rendered,) = renderer.compare([renderer.whole])
    if isinstance(rendered, NotRendered):
        raise refused(rendered)
    full = rendered.suffix
    numbered = replace(renderer, messages=_with_numbers(renderer.messages)).render(Cut(size, False, True))
    if isinstance(numbered, str) and _MARK.sub("", numbered) == full:
        _check_marks(numbered)
        owned = _marks_by_number(numbered, answers, size)
        if owned is not None:
            return full, owned
    return full, _marks_by_count(full, answers, renderer)


def _with_numbers(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Puts the number of each message into its texts, at positions that templates are unlikely to change."""
    numbered: list[dict[str, Any]] = copy.deepcopy([dict(message) for message in messages])
    for number, message in enumerate(numbered):
        calls = [call.get("function", call) for call in message.get("tool_calls", ())]
        content = message.get("content")
        fields = [(part, "text") for part in content] if isinstance(content, list) else [(message, "content")]
        fields += [(message, "reasoning_content"), (message, "thinking"), *((call, "name") for call in calls)]
        for holder, key in fields:
            if key not in holder:
                continue
            holder[key] = with_mark(holder[key], f"{_FIRST}{number}{_LAST}")
    return numbered


def with_mark(text: str, mark: str) -> str:
    """Inserts a mark before the last character that is neither white space nor part of a tag: templates strip both."""
    end = len(text.rstrip())
    if end and text[end - 1] == ">":
        end = max((match.end() for match in _TAG_OR_CHAR.finditer(text) if match[1]), default=0)
    return text[: end - 1] + mark + text[end - 1 :] if end else text


def _check_marks(marked: str) -> None:
    """Refuses nested or cut marks."""
    marks = re.findall(f"[{OPEN}{CLOSE}]", marked)
    if marks != [OPEN, CLOSE] * (len(marks) // 2):
        raise _unclear_marks()


def _unclear_marks() -> DataError:
    return DataError(
        "the template nests, cuts or changes what it marks by {% generation %}, so what is in the loss is not clear; "
        "write the blocks directly where the text is printed"
    )


class _Span(NamedTuple):
    start: int
    end: int
    numbers: tuple[int, ...]
    """Numbers of the messages whose texts are in the span."""


def _spans(marked: str) -> Iterator[_Span]:
    """Yields a span for each marked text, and an empty one for each text between marks."""
    position = start = last = 0
    numbers: list[int] = []
    for match in _MARK.finditer(marked):
        position, last = position + match.start() - last, match.end()
        if match[1] is not None:
            numbers.append(int(match[1]))
            continue
        is_end = match.group() == CLOSE
        yield _Span(start if is_end else position, position, tuple(numbers))
        start, numbers = position, []
    yield _Span(position, position, tuple(numbers))


def _marks_by_number(numbered: str, answers: Sequence[int], size: int) -> dict[int, list[tuple[int, int]]] | None:
    """Assigns marks to answers by the numbers around them; None if the numbers are ambiguous."""
    owned: dict[int, list[tuple[int, int]]] = {answer: [] for answer in answers}
    spans = list(_spans(numbered))
    before = [-1, *accumulate((max(span.numbers, default=-1) for span in spans), max)]
    after = [*accumulate((min(span.numbers, default=size) for span in reversed(spans)), min, initial=size)][::-1]
    for index, span in enumerate(spans):
        if span.start == span.end:
            continue
        is_numbered = len(span.numbers) > 0
        first, last = (min(span.numbers), max(span.numbers)) if is_numbered else (before[index], after[index + 1])
        owners = answers[bisect_left(answers, first) : bisect_right(answers, last)]
        if len(owners) != 1 or (is_numbered and (before[index] > first or last > after[index + 1])):
            return None
        owned[owners[0]].append((span.start, span.end))
    return owned


def _marks_by_count(full: str, answers: Sequence[int], renderer: Renderer) -> dict[int, list[tuple[int, int]]]:
    """Assigns marks to answers by counting the marks up to the end of each answer."""
    cuts = [Cut(len(renderer.messages), False, True), *(Cut(answer + 1, False, True) for answer in answers[:-1])]
    rendered = []
    for result in renderer.compare(cuts):
        if isinstance(result, NotRendered):
            raise refused(result)
        rendered.append(result)
    marked = rendered[0].suffix
    _check_marks(marked)
    if _MARK.sub("", marked) != full:
        raise _unclear_marks()
    spans = [(span.start, span.end) for span in list(_spans(marked))[1::2]]
    counts = [marked.count(OPEN, 0, result.common) + result.suffix.count(OPEN) for result in rendered[1:]]
    counts = [0, *counts, len(spans)]
    if any(earlier > later for earlier, later in pairwise(counts)):
        raise DataError("the template marks fewer answers by {% generation %} when more follow; correct it")
    return {
        answer: [span for span in spans[first:last] if span[0] < span[1]]
        for answer, (first, last) in zip(answers, pairwise(counts), strict=True)
    }
