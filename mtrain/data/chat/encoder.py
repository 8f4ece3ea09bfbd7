"""Conversations under a chat template -> token ids and what each of them counts.

Special tokens in the texts of a conversation are text, and only what the template writes is a token: private characters
mark them before the conversation is rendered, so the rendering says where they come from.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mtrain.base.errors import DataError
from mtrain.data.chat.conversation import ANSWERS, Conversation, LossOn, conversation_of
from mtrain.data.chat.marks import RenderOther, marks_of
from mtrain.data.chat.sandbox import Cut, NotRendered, Rendered, RenderLimits, Sandbox
from mtrain.data.chat.shown import check_shown
from mtrain.data.chat.spans import AnswerFinder, Compare, SpecialTexts, refused, special_texts
from mtrain.data.chat.template import ChatTemplate, ChatTemplates
from mtrain.data.samples.sample import TokenizedSample
from mtrain.tokenizer import EncodedText, Tokenizer


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


_VERSION = 3
"""Number of the version of this package's output; raised when the same record gives other ids or weights, or another
record is refused."""
_MARKS_ANSWERS = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")


@dataclass(frozen=True)
class ChatOptions:
    """Options of the configuration that concern conversations."""

    ignored: frozenset[str] = frozenset()
    """Unknown keys that are dropped on purpose."""
    loss_on: LossOn = "all_answers"
    special_tokens_in_text: bool = False
    """Whether the text of a special token in a message becomes the token."""
    date: str | None = None
    """Date as YYYY-MM-DD, for a template that writes today's date; None refuses such a template."""
    variables: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Switches of the template, such as enable_thinking; those of a record take precedence."""
    limits: RenderLimits = field(default_factory=RenderLimits)


class ChatEncoder:
    """A `SampleEncoder` for records with `messages`; may be used in forked processes and from several threads."""

    def __init__(self, templates: ChatTemplates, tokenizer: Tokenizer, options: ChatOptions) -> None:
        """
        Args:
            templates: Templates for conversations without and with tools.
            tokenizer: Tokenizer of the model.
            options: Options of the configuration.

        Raises:
            DataError: The tokenizer's settings are damaged.
        """
        self._tokenizer, self._options = tokenizer, options
        self._variables = {**options.variables, **tokenizer.named}
        if holds(dict(options.variables), PRIVATE):
            raise DataError(f"data.chat_template_kwargs {_HOLDS_PRIVATE}")
        special, bos = tokenizer.special_tokens(), self._variables.get("bos_token")
        self._special = special_texts(special, bos)
        # in some tokenizers the end of an answer is a token, but not a special one
        self._stops = special_texts(special | {self._variables.get("eos_token", "")} - {""}, bos)
        self._default = _Format(templates.default, options)
        is_one = templates.with_tools == templates.default
        self._with_tools = self._default if is_one else _Format(templates.with_tools, options)
        decisive = [
            *(_VERSION, tokenizer.fingerprint, templates.default.text, templates.with_tools.text, self._variables),
            *(options.loss_on, options.special_tokens_in_text, options.date),
        ]
        self.fingerprint = hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()

    def encode(self, record: dict[str, Any]) -> TokenizedSample:
        """Encodes a conversation with the weight of each token."""
        conversation = conversation_of(record, self._options.ignored, self._options.loss_on)
        form, given = self._form(conversation), _checked_texts(conversation)
        rendering = self._rendered(form, conversation)
        whole = Cut(len(conversation.messages), False)
        encoded = self._encoded(form, given, whole, rendering.text, [each.end for each in rendering.weighed])
        ids, weights = encoded.ids, token_weights(encoded, rendering.weighed)
        if rendering.open_weight is not None:
            ids, weights = [*ids, self._tokenizer.eos_id], np.append(weights, np.float32(rendering.open_weight))
        if not weights[1:].any():
            raise DataError("has no token to learn under this template; remove the line")
        return TokenizedSample(np.array(ids, np.int32), weights, conversation.weight)

    def prompt(self, record: dict[str, Any]) -> list[int]:
        """Returns the ids of messages and of the beginning of an answer, as a model is asked; encoded as `encode` does
        it.

        Args:
            record: Record as `encode` takes it: messages, tools, chat_template_kwargs.

        Raises:
            DataError: The record is no conversation, or the template refuses it.
        """
        conversation = conversation_of(record, self._options.ignored, None)
        form, given = self._form(conversation), _checked_texts(conversation)
        variables, whole = {**self._variables, **conversation.variables}, Cut(len(conversation.messages), True)
        text = form.sandbox.render(conversation.messages, conversation.tools, variables, whole)
        if isinstance(text, NotRendered):
            raise refused(text)
        return self._encoded(form, given, whole, text, []).ids

    def stop_ids(self) -> frozenset[int]:
        """Returns the tokens at which an answer ends: the tokenizer's, and those that the templates write.

        Raises:
            DataError: The template refuses a question and its answer.
        """
        return frozenset({self._tokenizer.eos_id, *self.ends()})

    def ends(self) -> list[int]:
        """Returns the token that ends an answer under the template, and the one under the template for tools if it
        differs.

        Raises:
            DataError: The template refuses a question and its answer, with and without a system message.
        """
        messages = [{"role": "user", "content": "a"}, {"role": ANSWERS, "content": "b"}]
        found = [self._end(form, messages) for form in dict.fromkeys((self._default, self._with_tools))]
        return list(dict.fromkeys(found))

    def _end(self, form: _Format, messages: list[dict[str, Any]]) -> int:
        def conversation(before: list[dict[str, Any]]) -> Conversation:
            return conversation_of({"messages": [*before, *messages]}, frozenset(), self._options.loss_on)

        try:
            rendering = self._rendered(form, conversation([]))
        except DataError as fault:
            try:
                rendering = self._rendered(form, conversation([{"role": "system", "content": "c"}]))
            except DataError:
                raise fault from None
        if rendering.open_weight is not None:
            return self._tokenizer.eos_id
        encoded = self._tokenizer.encode_with_offsets(rendering.text, special_tokens=True)
        counted = np.flatnonzero(token_weights(encoded, rendering.weighed))
        # what follows it inside of a mark, such as a line's end, is the template's
        ends = (id_ for id_ in reversed([encoded.ids[place] for place in counted]) if self._is_stop(id_))
        return next(ends, self._tokenizer.eos_id)

    def _is_stop(self, id_: int) -> bool:
        name = self._tokenizer.name(id_)
        return name != self._stops.bos and self._stops.pattern.fullmatch(name) is not None

    def _rendered(self, form: _Format, conversation: Conversation) -> Rendering:
        variables = {**self._variables, **conversation.variables}

        def compare(cuts: Sequence[Cut]) -> list[Rendered | NotRendered]:
            return form.sandbox.compare(conversation.messages, conversation.tools, variables, cuts)

        def render_numbered(messages: Sequence[Mapping[str, Any]], cut: Cut) -> str | NotRendered:
            return form.sandbox.render(messages, conversation.tools, variables, cut)

        def render_other(other: dict[str, Any]) -> str | NotRendered:
            whole = Cut(len(conversation.messages), False)
            return form.sandbox.render(other["messages"], other["tools"], variables, whole)

        if form.marks_answers:
            rendering = marked_answers(conversation, compare, render_numbered)
        else:
            rendering = found_answers(conversation, compare, self._stops)
        check_shown(conversation, rendering.text, rendering.places, form.template.text, render_other)
        return rendering

    def _form(self, conversation: Conversation) -> _Format:
        return self._default if conversation.tools is None else self._with_tools

    def _encoded(self, form: _Format, given: list[Any], cut: Cut, text: str, ends: Sequence[int]) -> EncodedText:
        """Encodes a rendering; special tokens in the conversation's own texts stay text, unless the options say
        otherwise.

        Args:
            form: Template that rendered the text.
            given: Messages, tools and variables.
            cut: Part of the conversation that was rendered.
            text: Rendering of the conversation.
            ends: Places in the rendering at which answers end.
        """
        if self._options.special_tokens_in_text or not holds(given, self._special.pattern):
            return self._tokenizer.encode_with_offsets(text, special_tokens=True)
        return self._with_literals(text, self._literals(form, given, cut, text, ends))

    def _literals(self, form: _Format, given: list[Any], cut: Cut, text: str, ends: Sequence[int]) -> frozenset[int]:
        """Returns the places in the rendering at which special tokens from the conversation's own texts begin."""
        messages, tools, own = with_marks(given, self._special.pattern)
        marked = form.sandbox.render(messages, tools, {**self._variables, **own}, cut)
        if isinstance(marked, NotRendered):
            raise refused(marked)
        literals = literal_places(text, marked)
        theirs = {match.end() for match in self._special.pattern.finditer(text) if match.start() in literals}
        if not theirs.isdisjoint(ends):
            raise DataError(
                "an answer ends with the text of a special token, so its stop is not clear; remove that text"
            )
        return literals

    def _with_literals(self, text: str, literals: frozenset[int]) -> EncodedText:
        """Encodes a rendering in which some special tokens are text.

        The text is cut at the real ones. Not every tokenizer gives the same ids for a text and for its pieces, so this
        is compared first with all of them taken as tokens.
        """
        places = [(match.start(), match.end()) for match in self._special.pattern.finditer(text)]
        real = [place for place in places if place[0] not in literals]
        if self._in_pieces(text, places).ids != self._tokenizer.encode_with_offsets(text, special_tokens=True).ids:
            raise DataError(
                "a text holds that of a special token, which this tokenizer cannot tell from the token; remove it, or "
                "set data.special_tokens_in_text=true to let it be the token"
            )
        return self._in_pieces(text, real)

    def _in_pieces(self, text: str, special: Sequence[tuple[int, int]]) -> EncodedText:
        ids: list[int] = []
        offsets: list[tuple[int, int]] = []

        def add(start: int, end: int, is_special: bool) -> None:
            found = self._tokenizer.encode_with_offsets(text[start:end], special_tokens=is_special)
            ids.extend(found.ids)
            offsets.extend((start + first, start + last) for first, last in found.offsets)

        position = 0
        for start, end in special:
            add(position, start, False)
            add(start, end, True)
            position = end
        add(position, len(text), False)
        return EncodedText(ids, offsets)


_HOLDS_PRIVATE = "holds a character between U+F0000 and U+F000F, which marks places here; remove it"


def _checked_texts(conversation: Conversation) -> list[Any]:
    """Returns messages, tools and variables.

    Raises:
        DataError: A text holds a character that marks places.
    """
    given = [conversation.messages, conversation.tools, conversation.variables]
    if holds(given, PRIVATE):
        raise DataError(_HOLDS_PRIVATE)
    return given


class _Format:
    """One template and the sandbox that renders it."""

    def __init__(self, template: ChatTemplate, options: ChatOptions) -> None:
        self.template = template
        self.sandbox = Sandbox(template.text, f"chat template {template.origin}", options.date, options.limits)
        self.marks_answers = _MARKS_ANSWERS.search(template.text) is not None


def token_weights(encoded: EncodedText, weighed: Sequence[Weighed]) -> NDArray[np.float32]:
    """Returns [n]: weight of each token, that of the span in which any of its characters lies.

    A token may hold the end of a header and the beginning of an answer (" yes" after "Answer:"). Such a token is in the
    loss, as otherwise the answer would begin with a token that is never trained. In two spans, the larger weight
    counts.
    """
    places = np.array(encoded.offsets, np.int64).reshape(-1, 2)
    starts, ends = places[:, 0], places[:, 1]
    # before the first of these tokens none reaches into a span, and after the last one none does
    reached, beyond = np.maximum.accumulate(ends), np.minimum.accumulate(starts[::-1])[::-1]
    weights = np.zeros(len(places), np.float32)
    for start, end, weight in weighed:
        near = slice(np.searchsorted(reached, start, "right"), np.searchsorted(beyond, end, "left"))
        inside = (starts[near] < end) & (ends[near] > start)
        if not inside.any():
            raise DataError("the tokenizer makes no token of an answer; remove the line")
        weights[near][inside] = np.maximum(weights[near][inside], np.float32(weight))
    return weights


PRIVATE = re.compile("[\U000f0000-\U000f000f]")
"""Pattern of the characters that mark places in renderings; no text of a conversation may hold them."""
_LITERAL = "\U000f0001"


def holds(value: object, pattern: re.Pattern[str]) -> bool:
    """Says whether any text or key in the value has a match."""
    if isinstance(value, str):
        return pattern.search(value) is not None
    if isinstance(value, dict):
        return any(holds(key, pattern) or holds(each, pattern) for key, each in value.items())
    return isinstance(value, list) and any(holds(each, pattern) for each in value)


def with_marks(value: Any, pattern: re.Pattern[str]) -> Any:
    """Puts a mark into each match of a value, after its first character.

    Raises:
        DataError: A key has a match.
    """
    if isinstance(value, str):
        return pattern.sub(lambda match: match.group()[0] + _LITERAL + match.group()[1:], value)
    if isinstance(value, dict):
        if any(isinstance(key, str) and pattern.search(key) for key in value):
            raise DataError("a key holds the text of a special token; rename it")
        return {key: with_marks(each, pattern) for key, each in value.items()}
    return [with_marks(each, pattern) for each in value] if isinstance(value, list) else value


def literal_places(full: str, marked: str) -> frozenset[int]:
    """Returns the places in the rendering at which special tokens from the conversation's texts begin.

    Args:
        full: Rendering of the conversation.
        marked: Rendering of the conversation `with_marks`.

    Raises:
        DataError: The template does more with these texts than to print them.
    """
    pieces = marked.split(_LITERAL)
    if "".join(pieces) != full:
        raise DataError(
            "a text holds that of a special token, and the template does more with it than to print it; remove it, or "
            "set data.special_tokens_in_text=true to let it be the token"
        )
    places, position = [], 0
    for piece in pieces[:-1]:
        position += len(piece)
        places.append(position - 1)
    return frozenset(places)
