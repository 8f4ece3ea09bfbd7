"""Encodes conversations under a chat template: token ids and their weights.

Special tokens in the texts of a conversation stay text; only those that the template writes become tokens. Private
characters mark the texts before rendering, so the rendering shows where a token comes from.
"""

from __future__ import annotations

import hashlib
import json
import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mtrain.base.errors import DataError
from mtrain.core.batch.sample import HERE, EncodedImage, TokenizedSample
from mtrain.data.chat.answers import Answer, Rendering, aligned_answers, marked_answers, with_mark
from mtrain.data.chat.conversation import ANSWERS, RESERVED, Conversation, LossOn, conversation_of, texts_of
from mtrain.data.chat.ends import TOOLS, EndFinder, Weighed, up_to_stops
from mtrain.data.chat.sandbox import Cut, LimitError, NotRendered, Renderer, RenderLimits, Sandbox
from mtrain.data.chat.shown import check_shown
from mtrain.data.chat.spans import SpecialTexts, UntrainableError, refused, special_texts
from mtrain.data.chat.template import ChatTemplate, ChatTemplates
from mtrain.data.encoding.images import ReadImage, image_reader
from mtrain.hf.images import ImageProcessor
from mtrain.hf.tokenizer.tokenizer import EncodedText, Tokenizer

_VERSION = 5
"""Version of the encoder's output; incremented when a record gives other ids or weights, or is refused."""
_MARKS_ANSWERS = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")


@dataclass(frozen=True)
class ChatOptions:
    ignored: frozenset[str] = frozenset()
    """Unknown keys that are dropped on purpose."""
    loss_on: LossOn = "all_answers"
    special_tokens_in_text: bool = False
    """Whether the text of a special token in a message becomes the token."""
    date: str | None = None
    """YYYY-MM-DD for templates that write today's date; None refuses them."""
    variables: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Switches of the template, such as enable_thinking; those of a record take precedence."""
    limits: RenderLimits = field(default_factory=RenderLimits)


class Ends(NamedTuple):
    """Special tokens of the answers under some templates."""

    ids: list[int]
    """Tokens that end answers; the one that ends plain text comes first."""
    inside: list[int]
    """Tokens that occur inside answers."""


class ChatPrompt(NamedTuple):
    """Messages and the beginning of an answer."""

    ids: list[int]
    """Token ids, with all tokens of each image."""
    images: tuple[EncodedImage, ...]


class ChatEncoder:
    """A `SampleEncoder` for records with `messages`; safe in forked processes and threads."""

    def __init__(
        self,
        templates: ChatTemplates,
        tokenizer: Tokenizer,
        options: ChatOptions,
        images: ImageProcessor | None = None,
    ) -> None:
        """`images` processes the images of conversations; None refuses them."""
        self._tokenizer, self._options, self._images = tokenizer, options, images
        self._variables = {**options.variables, **tokenizer.named}
        if holds(dict(options.variables), PRIVATE):
            raise DataError(f"data.chat_template_kwargs {_HOLDS_PRIVATE}")
        special, bos = tokenizer.special_tokens(), self._variables.get("bos_token")
        self._stop_ids: frozenset[int] | None = None
        self._special = special_texts(special, bos)
        # in some tokenizers the token that ends an answer is not special
        self._stops = special_texts(special | {self._variables.get("eos_token", "")} - {""}, bos)
        self._around_images = {} if images is None else images.around
        self._default = _Format(templates.default, options, self._around_images)
        is_one = templates.with_tools == templates.default
        self._with_tools = self._default if is_one else _Format(templates.with_tools, options, self._around_images)
        decisive = [
            *(_VERSION, tokenizer.fingerprint, templates.default.text, templates.with_tools.text, self._variables),
            *(options.loss_on, options.special_tokens_in_text, options.date),
        ]
        decisive += [] if images is None else [images.fingerprint]
        self.fingerprint = hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()

    def encode(self, record: dict[str, Any], folder: Path = HERE) -> TokenizedSample:
        """Encodes a record; paths of its images are relative to `folder`."""
        conversation = conversation_of(record, self._options.ignored, self._options.loss_on, self._reader(folder))
        form, conversation = self._read(conversation)
        try:
            return self._sample(form, conversation)
        except UntrainableError as fault:
            raise DataError(f"{fault.why}; {self._advice(form, conversation, fault)}") from None

    def _reader(self, folder: Path) -> ReadImage | None:
        return None if self._images is None else image_reader(self._images, folder)

    def _sample(self, form: _Format, conversation: Conversation) -> TokenizedSample:
        rendering = self._rendered(form, conversation)
        whole = Cut(len(conversation.messages), False)
        encoded = self._encoded(form, conversation, whole, rendering.text, _ends_of(rendering, self._stops))
        for answer in rendering.answers:
            self._check_prompt(rendering.text, encoded, answer)
        stops = [span for id_, span in zip(encoded.ids, encoded.offsets) if id_ in self.stop_ids()]
        weighed, open_weight = up_to_stops(rendering, stops, len(conversation.messages), self._stops)
        ids, weights = np.array(encoded.ids, np.int32), token_weights(encoded, weighed)
        if open_weight is not None:
            ids, weights = np.append(ids, np.int32(self._tokenizer.eos_id)), np.append(weights, np.float32(open_weight))
        if self._images is not None:
            ids, weights = with_features(ids, weights, conversation.images, self._images)
        if not weights[1:].any():
            raise DataError("has no token to train under this template; remove the line")
        return TokenizedSample(ids, weights, conversation.weight, images=conversation.images)

    def _advice(self, form: _Format, conversation: Conversation, fault: UntrainableError) -> str:
        """Returns advice for the user; suggests a setting only if the conversation is accepted with it."""

        def is_taken(other: Conversation) -> bool:
            try:
                self._sample(form, other)
            except LimitError:
                raise
            except DataError:
                return False
            return True

        switched = (
            (f"data.chat_template_kwargs={{{name}: {json.dumps(value)}}}", {name: value})
            for name, value in product(self._switches(form), (False, True))
            if name not in conversation.variables
        )
        ways = [(text, replace(conversation, variables={**conversation.variables, **to})) for text, to in switched]
        weights = conversation.answer_weights
        last = max(number for number, message in enumerate(conversation.messages) if message["role"] == ANSWERS)
        if len(weights) > 1 and last in weights:
            ways.append(("data.loss_on=last_answer", replace(conversation, answer_weights={last: weights[last]})))
        if len(weights) > 1 and fault.message in weights:
            other_weights = {number: weight for number, weight in weights.items() if number != fault.message}
            ways.append(('"train": false on that message', replace(conversation, answer_weights=other_weights)))
        accepted = [text for text, other in ways if is_taken(other)]
        return f"set {' or '.join(accepted)}, which avoids this, or {fault.remedy}" if accepted else fault.remedy

    def prompt(self, record: dict[str, Any], folder: Path = HERE) -> ChatPrompt:
        """Encodes messages and the beginning of an answer as in training, for sampling; paths of images are relative to
        `folder`."""
        form, conversation, text = self._written(record, begins_answer=True, folder=folder)
        ids = self._encoded(form, conversation, Cut(len(conversation.messages), True), text, []).ids
        if self._images is not None:
            whole = np.array(ids, np.int32)
            ids = with_features(whole, np.zeros(len(ids), np.float32), conversation.images, self._images)[0].tolist()
        return ChatPrompt(ids, conversation.images)

    def text(self, messages: Sequence[Mapping[str, Any]], begins_answer: bool) -> str:
        """Applies the template to messages; adds the beginning of an answer, or ends after the last message's content,
        which an answer continues."""
        *_, text = self._written({"messages": [dict(message) for message in messages]}, begins_answer)
        if begins_answer:
            return text
        before, content, _ = text.rpartition(str(messages[-1]["content"]).strip())
        return before + content

    def _written(
        self, record: dict[str, Any], begins_answer: bool, folder: Path = HERE
    ) -> tuple[_Format, Conversation, str]:
        conversation = conversation_of(record, self._options.ignored, None, self._reader(folder))
        form, conversation = self._read(conversation)
        text = self._renderer(form, conversation).render(Cut(len(conversation.messages), begins_answer))
        if isinstance(text, NotRendered):
            raise refused(text)
        return form, conversation, text

    def stop_ids(self) -> frozenset[int]:
        """Returns the tokens that end an answer: the tokenizer's eos and those that the templates write."""
        if self._stop_ids is None:
            try:
                self._stop_ids = frozenset({self._tokenizer.eos_id, *self.ends().ids})
            except LimitError:
                raise
            except DataError:  # neither template accepts a question and its answer
                self._stop_ids = frozenset({self._tokenizer.eos_id})
        return self._stop_ids

    def ends(self) -> Ends:
        """Finds the tokens that end answers under the templates; raises DataError if no template accepts a question and
        its answer."""
        eos = self._tokenizer.name(self._tokenizer.eos_id)
        is_one = self._with_tools is self._default
        stops, inside = dict[str, None](), dict[str, None]()
        fault = None
        for form in dict.fromkeys((self._default, self._with_tools)):
            finder = EndFinder(partial(self._rendered, form), self._stops, eos)
            tools = TOOLS if form is not self._default else None
            try:
                names = finder.find(tools, TOOLS if is_one else tools, self._switches(form))
            except LimitError:
                raise
            except DataError as refusal:
                fault = refusal
                continue
            stops |= dict.fromkeys(names)
            inside |= dict.fromkeys(finder.inside)
        if fault is not None and not stops:
            raise fault
        return Ends(self._single_ids(stops), self._single_ids(inside))

    def _single_ids(self, names: Iterable[str]) -> list[int]:
        """Returns the ids of the texts that are one token."""
        ids = [self._tokenizer.encode_with_offsets(name, special_tokens=True).ids for name in names]
        return [id_ for token_ids in ids if len(token_ids) == 1 for id_ in token_ids]

    def _switches(self, form: _Format) -> list[str]:
        return [name for name in form.sandbox.variables() if name not in RESERVED and name not in self._tokenizer.named]

    def _rendered(self, form: _Format, conversation: Conversation) -> Rendering:
        """Renders a conversation, finds its answers, and checks that the template shows all of it."""
        renderer = self._renderer(form, conversation)
        answers_of = marked_answers if form.marks_answers else aligned_answers
        rendering = answers_of(conversation, renderer, self._stops)
        bounds = {answer.message: answer.bounds for answer in rendering.answers}
        check_shown(conversation, rendering.text, bounds, form.template.text, renderer)
        return rendering

    def _renderer(self, form: _Format, conversation: Conversation) -> Renderer:
        variables = {**self._variables, **conversation.variables}
        return Renderer(form.sandbox, conversation.messages, conversation.tools, variables)

    def _read(self, conversation: Conversation) -> tuple[_Format, Conversation]:
        """Chooses the template of a conversation, and adapts the conversation to it."""
        if holds(_texts_of(conversation), PRIVATE):
            raise DataError(_HOLDS_PRIVATE)
        for token in self._around_images:
            if holds(_texts_of(conversation), re.compile(re.escape(token))):
                raise DataError(f"has the text {token}, which marks an image for this model; remove it")
        form = self._default if conversation.tools is None else self._with_tools
        return form, _in_readable_form(conversation, self._renderer(form, conversation))

    def _encoded(
        self, form: _Format, conversation: Conversation, cut: Cut, text: str, ends: Sequence[int]
    ) -> EncodedText:
        """Encodes a rendering; special tokens in its texts stay text, unless the options say otherwise."""
        texts = _texts_of(conversation)
        if self._options.special_tokens_in_text or not holds(texts, self._special.pattern):
            return self._tokenizer.encode_with_offsets(text, special_tokens=True)
        return self._with_literals(text, self._literals(form, texts, cut, text, ends))

    def _check_prompt(self, text: str, encoded: EncodedText, answer: Answer) -> None:
        """Refuses an answer that changes the ids of the text before it: a token spans the end of the prompt and the
        beginning of the answer, or the prompt is divided differently once the answer follows."""
        border, special, offsets = answer.bounds[0], self._special.pattern, encoded.offsets
        end = start = bisect_left(offsets, border, key=lambda offset: offset[0])
        # no token spans a special one, so comparing from the last special token on is enough
        while start and not special.fullmatch(text[slice(*offsets[start - 1])].strip()):
            start -= 1
        real = [(0, offsets[start - 1][1] - offsets[start - 1][0])] if start else []
        start = max(start - 1, 0)
        prompt = text[offsets[start][0] : border] if end else ""
        encode = partial(self._tokenizer.encode_with_offsets, special_tokens=True)
        is_same = (
            encode(prompt).ids == encoded.ids[start:end]
            or self._in_pieces(prompt, real).ids == encoded.ids[start:end]  # special tokens of a message are text
            or encode(text[:border]).ids == encoded.ids[:end]  # a normalizer may add to each text, so also to a piece
        )
        if not is_same:
            raise UntrainableError(
                f"the tokenizer divides the text before the answer messages[{answer.message}] differently once the "
                f"answer follows (its last token is then {text[slice(*offsets[end - 1])]!r}), so the model would not "
                "see it like this when it answers",
                "remove white space at the beginning of the answer, or give data.chat_template a template whose "
                "answers begin after a special token",
                answer.message,
            )

    def _literals(self, form: _Format, texts: list[Any], cut: Cut, text: str, ends: Sequence[int]) -> frozenset[int]:
        """Returns where special tokens from the conversation's texts begin in the rendering."""
        messages, tools, variables = with_marks(texts, self._special.pattern)
        marked = Renderer(form.sandbox, messages, tools, {**self._variables, **variables}).render(cut)
        if isinstance(marked, NotRendered):
            raise refused(marked)
        literals = literal_offsets(text, marked)
        theirs = {match.end() for match in self._special.pattern.finditer(text) if match.start() in literals}
        if not theirs.isdisjoint(ends):
            raise DataError(
                "an answer ends with the text of a special token, so its stop is not clear; remove that text"
            )
        return literals

    def _with_literals(self, text: str, literals: frozenset[int]) -> EncodedText:
        """Encodes a rendering in which some special tokens are plain text, by cutting it at the real ones. Some
        tokenizers encode pieces differently from the whole text, so both are compared first, with every special token
        as a token."""
        spans = [(match.start(), match.end()) for match in self._special.pattern.finditer(text)]
        real = [span for span in spans if span[0] not in literals]
        if self._in_pieces(text, spans).ids != self._tokenizer.encode_with_offsets(text, special_tokens=True).ids:
            raise DataError(
                "a message contains the text of a special token, which this tokenizer cannot tell from the token "
                "itself; remove the text, or set data.special_tokens_in_text=true to encode it as the token"
            )
        return self._in_pieces(text, real)

    def _in_pieces(self, text: str, special: Sequence[tuple[int, int]]) -> EncodedText:
        ids: list[int] = []
        offsets: list[tuple[int, int]] = []

        def add(start: int, end: int, is_special: bool) -> None:
            encoded = self._tokenizer.encode_with_offsets(text[start:end], special_tokens=is_special)
            ids.extend(encoded.ids)
            offsets.extend((start + first, start + last) for first, last in encoded.offsets)

        position = 0
        for start, end in special:
            add(position, start, False)
            add(start, end, True)
            position = end
        add(position, len(text), False)
        return EncodedText(ids, offsets)


_HOLDS_PRIVATE = "holds a character between U+F0000 and U+F000F, which is used for marks here; remove it"


def _texts_of(conversation: Conversation) -> list[Any]:
    return [conversation.messages, conversation.tools, conversation.variables]


def _ends_of(rendering: Rendering, special: SpecialTexts) -> list[int]:
    """Returns the ends of special tokens after which an answer has only white space."""
    bounds = (answer.bounds for answer in rendering.answers)
    return [
        match.end()
        for start, end in bounds
        for match in special.pattern.finditer(rendering.text, start, end)
        if not rendering.text[match.end() : end].strip()
    ]


_PART, _KEY = "\U000f0008", "no_key_of_a_part"


def _in_readable_form(conversation: Conversation, renderer: Renderer) -> Conversation:
    """Joins the parts of each content that the template would not read as a list.

    A template may read lists for some roles only. One that prints a list verbatim, with the keys of its parts, does not
    read it.
    """
    roles = {message["role"] for message in conversation.messages if isinstance(message.get("content"), list)}
    if not roles:
        return conversation
    read = set()
    for role in roles:
        messages = _with_lists(conversation.messages, {role}, _marked)
        text = replace(renderer, messages=messages).render(renderer.whole)
        if isinstance(text, str) and _PART in text and _KEY not in text:
            read.add(role)
    return replace(conversation, messages=_with_lists(conversation.messages, read, list))


def _with_lists(
    messages: Sequence[dict[str, Any]], roles: Set[str], change: Callable[[list[dict[str, str]]], object]
) -> list[dict[str, Any]]:
    """Keeps lists for these roles only."""

    def content(message: dict[str, Any]) -> object:
        return change(message["content"]) if message["role"] in roles else "".join(texts_of(message["content"]))

    return [{**item, "content": content(item)} if isinstance(item.get("content"), list) else item for item in messages]


def _marked(parts: list[dict[str, str]]) -> list[dict[str, str]]:
    has_image = any("text" not in part for part in parts)
    if has_image and not "".join(texts_of(parts)).strip():
        parts = [*parts, {"type": "text", "text": "."}]  # only texts can be marked
    marked = [{**part, "text": with_mark(part["text"], _PART)} if "text" in part else part for part in parts]
    return [{**part, _KEY: _KEY} for part in marked]


class _Format:
    """A template and the sandbox that renders it."""

    def __init__(self, template: ChatTemplate, options: ChatOptions, replaced: Mapping[str, str]) -> None:
        self.template = template
        name = f"chat template {template.origin}"
        self.sandbox = Sandbox(template.text, name, options.date, options.limits, replaced)
        self.marks_answers = _MARKS_ANSWERS.search(template.text) is not None


def with_features(
    ids: NDArray[np.int32], weights: NDArray[np.float32], images: Sequence[EncodedImage], processor: ImageProcessor
) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Replaces the token of each image by all tokens of the image, with a weight of 0 in the loss."""
    is_image = ids == processor.image_token
    if is_image.sum() != len(images):
        raise DataError(
            f"has {len(images)} image(s), but the template writes {is_image.sum()} token(s) for images "
            f"({processor.image_token}); set data.chat_template to a template that writes each image once"
        )
    if len(ids) and is_image[-1]:
        raise DataError("ends with an image, after which nothing is predicted; remove it")
    tokens = [processor.tokens(image.grid) for image in images]
    counts = np.ones(len(ids), np.int64)
    counts[is_image] = [len(each) for each in tokens]
    result, of_images = np.repeat(ids, counts), np.repeat(is_image, counts)
    result[of_images] = np.concatenate([np.empty(0, np.int32), *tokens])
    return result, np.repeat(np.where(is_image, np.float32(0), weights), counts)


def token_weights(encoded: EncodedText, weighed: Sequence[Weighed]) -> NDArray[np.float32]:
    """Returns [n]: weight of each token, the largest of the spans that it overlaps.

    A token that straddles the beginning of an answer (" yes" after "Answer:") is trained; else the answer would begin
    with an untrained token.
    """
    offsets = np.array(encoded.offsets, np.int64).reshape(-1, 2)
    starts, ends = offsets[:, 0], offsets[:, 1]
    # tokens before the first of `near` end before the span, and those after the last one begin after it
    reached, beyond = np.maximum.accumulate(ends), np.minimum.accumulate(starts[::-1])[::-1]
    weights = np.zeros(len(offsets), np.float32)
    for start, end, weight in weighed:
        near = slice(np.searchsorted(reached, start, "right"), np.searchsorted(beyond, end, "left"))
        inside = (starts[near] < end) & (ends[near] > start)
        if not inside.any():
            raise DataError("the tokenizer makes no token of an answer; remove the line")
        weights[near][inside] = np.maximum(weights[near][inside], np.float32(weight))
    return weights


PRIVATE = re.compile("[\U000f0000-\U000f000f]")
"""Characters that serve as marks in renderings; conversations must not contain them."""
_LITERAL = "\U000f0001"


def holds(value: object, pattern: re.Pattern[str]) -> bool:
    """Says whether any text or key in the value matches."""
    if isinstance(value, str):
        return pattern.search(value) is not None
    if isinstance(value, dict):
        return any(holds(key, pattern) or holds(item, pattern) for key, item in value.items())
    return isinstance(value, list) and any(holds(item, pattern) for item in value)


def with_marks(value: Any, pattern: re.Pattern[str]) -> Any:
    """Inserts a mark after the first character of each match; raises DataError where a key matches."""
    if isinstance(value, str):
        return pattern.sub(lambda match: match.group()[0] + _LITERAL + match.group()[1:], value)
    if isinstance(value, dict):
        if any(isinstance(key, str) and pattern.search(key) for key in value):
            raise DataError("a key holds the text of a special token; rename it")
        return {key: with_marks(item, pattern) for key, item in value.items()}
    return [with_marks(item, pattern) for item in value] if isinstance(value, list) else value


def literal_offsets(full: str, marked: str) -> frozenset[int]:
    """Returns where special tokens from the conversation's texts begin; `marked` is the rendering of `with_marks`."""
    pieces = marked.split(_LITERAL)
    if "".join(pieces) != full:
        raise DataError(
            "a message contains the text of a special token, and the template does more than print that message; "
            "remove the text, or set data.special_tokens_in_text=true to encode it as the token"
        )
    offsets, position = [], 0
    for piece in pieces[:-1]:
        position += len(piece)
        offsets.append(position - 1)
    return frozenset(offsets)
