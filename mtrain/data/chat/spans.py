"""Characters of a rendered conversation that are in the loss.

The whole conversation is rendered once, and the model reads that text. An answer is found in it by rendering
shorter conversations, whatever the template's markup is:

    full     = all messages
    prompt   = the messages before the answer, and the beginning of an answer (add_generation_prompt)
    answered = the messages up to the answer

The answer begins where `prompt` ends in `full`, and ends where `answered` does. White space after the last special
token belongs to the template; a special token immediately after the answer ends it and belongs to it.

An answer counts only if the model would have seen exactly the text before it in `full` when it writes the answer. So
where a template writes earlier messages in another way once later ones follow, the answers concerned are refused. One
difference does not count: tags without text between them, such as an empty <think></think> written only for the last
answer; then the answer is trained as rendered in `full`.

Renderings are aligned without regard to such empty thoughts: templates write one into the beginning of an answer or
into the last answer, and leave it out of earlier ones, or the other way round. It tells the model that no thought
follows, so it does not count as a difference. Everything else does.
"""

# ruff: noqa: RUF001 - DeepSeek writes its tokens with another bar than the others
from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from mtrain.base.errors import DataError
from mtrain.base.spelling import counted
from mtrain.data.chat.sandbox import Cut, NotRendered, Rendered, Renderer

_DELIMITER = r"[<\[◁]/?[|｜]?/?[^\s<>\[\]◁▷|｜/]+[|｜]?[>\]▷]"
_OPENED = re.compile(rf"(?P<open>{_DELIMITER})(?P<label>\w*)\s*(?=(?P<close>{_DELIMITER}))")
"""Two delimiters with at most a label between them; the second is not consumed, as it may begin the next pair."""
_THOUGHT = re.compile("think|thought|reason", re.IGNORECASE)
_BEGIN = re.compile(r"^(begin|start|open)|(begin|start|open)$")
_END = re.compile(r"^(end|stop|close)|(end|stop|close)$")
_FILLING = re.compile(r"(?:^|[\W_])of(?=[\W_]|$)|[\W_]|\d+$", re.IGNORECASE)
_SPACE = re.compile(r"\s*")
_BRACKETS = "<[◁|｜>]▷"
_LONGEST = 256
"""Most characters of an empty pair with the white space around it."""


class Gap(NamedTuple):
    """Consecutive empty pairs with the white space around them."""

    start: int
    end: int
    first: int
    """Where the first pair begins."""
    last: int
    """Where the last pair ends."""
    opened: str
    """Text that opens the last pair."""

    def moved(self, by: int) -> Gap:
        return Gap(self.start + by, self.end + by, self.first + by, self.last + by, self.opened)


class Aligned(NamedTuple):
    """How far a text agrees with the whole conversation."""

    left: str
    """Text from the first difference on."""
    end: int
    """Position of the first difference in the whole conversation."""


def gaps(text: str) -> list[Gap]:
    """Finds the empty pairs of a text, ascending.

    A pair is two tags of one name (`<x></x>`, `<|x></x|>`, `<|x><x|>`), with or without a label that names thoughts
    (`<|channel>thought\\n<channel|>`), or a beginning and an end of thoughts (`[BEGIN_THINK][END_THINK]`).
    """
    merged: list[Gap] = []
    for match in _OPENED.finditer(text):
        if not _is_pair(match["open"], match["label"], match["close"]):
            continue
        before, last = merged[-1].end if merged else 0, match.end("close")
        start = match.start()
        while start > before and text[start - 1].isspace():
            start -= 1
        end = _after_space(text, last)
        if merged and start == before:
            merged[-1] = merged[-1]._replace(end=end, last=last, opened=match["open"])
        else:
            merged.append(Gap(start, end, match.start(), last, match["open"]))
    return merged


def _is_pair(opened: str, label: str, closed: str) -> bool:
    name, other = opened.strip(_BRACKETS), closed.strip(_BRACKETS)
    if name.startswith("/") or (label and not _THOUGHT.search(label)):
        return False
    if other.startswith("/"):
        return other.lstrip("/|｜") == name
    if name == other:  # <|x> and <x|>, but not the same one twice
        return opened[1] in "|｜" and opened[-2] not in "|｜" and closed[1] not in "|｜" and closed[-2] in "|｜"
    bare, other_bare = (_FILLING.sub("", delimiter).lower() for delimiter in (name, other))
    core, other_core = _BEGIN.sub("", bare), _END.sub("", other_bare)
    if core != other_core:
        return False
    # turns have such delimiters as well, and a delimiter that is only a number says nothing by itself
    return _THOUGHT.search(core if core != bare and other_core != other_bare else label) is not None


def _after_space(text: str, position: int) -> int:
    match = _SPACE.match(text, position)
    assert match is not None, "it may be empty"
    return match.end()


class Whole:
    """Rendering of a whole conversation, to compare its beginnings with."""

    def __init__(self, text: str, special: re.Pattern[str]) -> None:
        self.text, self._special = text, special
        self._gaps = gaps(text)

    def align(self, rendered: Rendered) -> Aligned:
        """Finds how far the text of a beginning agrees with the whole.

        A special token agrees as a whole or not at all. If the text ends with an empty pair but the whole opens one
        with content, the text does not agree to its end.
        """
        if not rendered.suffix:
            return Aligned("", rendered.common)
        start = max(0, rendered.common - _LONGEST)
        around = bisect_left(self._gaps, start, key=lambda gap: gap.end)
        if around < len(self._gaps) and self._gaps[around].start < start:
            start = self._gaps[around].start
        text = self.text[start : rendered.common] + rendered.suffix
        return self._aligned(text, start, self._gaps[around:])

    def _aligned(self, text: str, position: int, later: Sequence[Gap]) -> Aligned:
        here, ours, theirs = 0, [*gaps(text)], [*later]
        while True:
            gap = ours[0] if ours else None
            other = theirs[0] if theirs else None
            length = min(
                (len(text) if gap is None else gap.start) - here,
                (len(self.text) if other is None else other.start) - position,
            )
            if text[here : here + length] != self.text[position : position + length]:
                length = self._num_common(text, here, position, length)
                return Aligned(text[here + length :], position + length)
            here, position = here + length, position + length
            gap = ours.pop(0) if gap is not None and gap.start == here else None
            other = theirs.pop(0) if other is not None and other.start == position else None
            if gap is None and other is None:
                return Aligned(text[here:], position)
            # white space around an empty pair belongs to the pair
            after = gap.end if gap is not None else _after_space(text, here)
            if after == len(text):
                return self._at_end(text[here:], gap and gap.moved(-here), position, other)
            here, position = after, other.end if other is not None else _after_space(self.text, position)

    def _at_end(self, text: str, gap: Gap | None, position: int, other: Gap | None) -> Aligned:
        """Ends the comparison when the rest of the text is a gap or white space."""
        if gap is None:
            return Aligned("", position + num_common(text, self.text[position : position + len(text)]))
        if other is not None:
            after = self.text[other.last : other.end]
            return Aligned("", other.last + num_common(text[gap.last :], after))
        after = self.text[position : _after_space(self.text, position)]
        end = position + num_common(text[: gap.first] or text[gap.last :], after)
        goes_on = self.text.startswith(gap.opened, position + len(after))
        return Aligned(text[gap.first :] if goes_on else "", end)

    def _num_common(self, text: str, here: int, position: int, length: int) -> int:
        """Returns the length of the common beginning; special tokens count as a whole or not at all."""
        common = num_common(text[here : here + length], self.text[position : position + length])
        for piece, start in ((text, here), (self.text, position)):
            for match in self._special.finditer(piece, max(start, start + common - _LONGEST)):
                if match.start() >= start + common:
                    break
                if match.end() > start + common:
                    common = match.start() - start
        return common


def num_common(one: Sequence[object], other: Sequence[object]) -> int:
    return next((index for index, (a, b) in enumerate(zip(one, other)) if a != b), min(len(one), len(other)))


_ROLE = re.compile("assistant|model", re.IGNORECASE)
_OTHER_TEMPLATE = "give data.chat_template a template that keeps earlier messages unchanged"


class UntrainableError(DataError):
    """The template does not render a conversation as the model will see it at inference."""

    def __init__(self, why: str, remedy: str, message: int | None = None) -> None:
        """`message` is the number of the answer; None if the error concerns no single answer."""
        super().__init__(f"{why}; {remedy}")
        self.why, self.remedy, self.message = why, remedy, message


class AnswerSpan(NamedTuple):
    message: int
    start: int
    end: int


class SpecialTexts(NamedTuple):
    """Texts that are single tokens."""

    pattern: re.Pattern[str]
    bos: str | None
    """Text of bos, which never ends an answer."""

    def after(self, text: str, position: int) -> int:
        """Returns the end of the token at `position` if that token can end an answer, else `position`."""
        match = self.pattern.match(text, position)
        return position if match is None or match.group() == self.bos else match.end()

    def last(self, text: str) -> str | None:
        """Returns the token at the end of a text, ignoring white space; None if the text ends otherwise."""
        tokens = list(self.pattern.finditer(text))
        return tokens[-1].group() if tokens and not text[tokens[-1].end() :].strip() else None

    def without(self, text: str) -> str:
        """Returns the text without tokens and surrounding white space."""
        return self.pattern.sub("", text).strip()


def special_texts(tokens: Iterable[str], bos: str | None) -> SpecialTexts:
    """Builds the pattern of these tokens, which matches the longest."""
    ordered = sorted(tokens, key=len, reverse=True)
    return SpecialTexts(re.compile("|".join(map(re.escape, ordered)) or r"(?!)"), bos)


class AnswerFinder:
    """Finds the answers of one conversation by rendering its first messages."""

    def __init__(self, renderer: Renderer, special: SpecialTexts) -> None:
        self._renderer, self._special = renderer, special
        self._renderings: dict[Cut, Rendered | NotRendered] = {}
        self._whole = Whole("", special.pattern)
        self.full = ""
        """Rendering of the whole conversation, once `find` has returned."""

    def find(self, messages: Mapping[int, Iterable[str]]) -> list[AnswerSpan]:
        """Finds the spans of these messages: ascending number -> texts of the message."""
        # one request for the renderings that are nearly always needed
        self._fetch([cut for number in messages for cut in (Cut(number, True), Cut(number + 1, False))])
        full = self._renderings[self._renderer.whole]
        if isinstance(full, NotRendered):
            raise refused(full)
        self.full, self._whole = full.suffix, Whole(full.suffix, self._special.pattern)
        spans = [self._span(number) for number in messages]
        for span in spans:
            self._check_header(span, messages[span.message])
        for earlier, later in pairwise(spans):
            if earlier.end > later.start:
                raise _not_found(later.message, "it begins before the answer before it ends")
        return spans

    def _check_header(self, span: AnswerSpan, texts: Iterable[str]) -> None:
        """Refuses a header in the loss if the template's beginning of an answer does not distinguish it."""
        starts = [self.full.find(text.strip(), span.start, span.end) for text in texts if text.strip()]
        before = self.full[span.start : min((start for start in starts if start >= 0), default=span.end)]
        if not _ROLE.search(before):
            return
        cuts = (Cut(span.message, prompt) for prompt in (True, False))
        if len({self._rendered(cut, span.message) for cut in cuts}) == 1:
            raise _not_found(span.message, "add_generation_prompt changes nothing, so its header would be in the loss")

    def _fetch(self, cuts: Iterable[Cut]) -> None:
        whole = self._renderer.whole
        missing = [cut for cut in dict.fromkeys(cuts) if cut not in self._renderings and cut != whole]
        if missing or whole not in self._renderings:
            self._renderings.update(zip([whole, *missing], self._renderer.compare([whole, *missing]), strict=True))

    def _rendered(self, cut: Cut, answer: int) -> Rendered:
        if cut not in self._renderings:
            self._fetch([cut])
        rendered = self._renderings[cut]
        if isinstance(rendered, NotRendered):
            what = (
                f"the first {counted(cut.num_messages, 'message')} alone"
                if cut.num_messages
                else "a prompt without messages"
            )
            raise _not_found(answer, f"the template does not render {what} ({rendered.why})")
        return rendered

    def _span(self, number: int) -> AnswerSpan:
        start = self._start(number)
        end = self._end(number, start)
        if not self.full[start:end].strip():
            raise _not_found(number, "the template writes nothing for it")
        return AnswerSpan(number, start, end)

    def _start(self, number: int) -> int:
        prompt = self._whole.align(self._rendered(Cut(number, True), number))
        if not prompt.left:
            return prompt.end
        if self._whole.align(self._rendered(Cut(number, False), number)).left:
            raise UntrainableError(
                f"the template renders the messages before messages[{number}] differently when later ones follow, so "
                "the model would not see them like this when it answers",
                _OTHER_TEMPLATE,
                number,
            )
        raise _not_found(number, "it does not begin as add_generation_prompt does")

    def _end(self, number: int, start: int) -> int:
        if number == len(self._renderer.messages) - 1:
            return len(self.full)
        answered = self._whole.align(self._rendered(Cut(number + 1, False), number))
        if answered.end < start or self._special.without(answered.left):
            raise UntrainableError(
                f"the template changes the answer messages[{number}] when later ones follow, for instance drops its "
                "reasoning, so the model would learn an answer other than the one to give",
                _OTHER_TEMPLATE,
                number,
            )
        if answered.left.strip() and self._special.last(self.full[start : answered.end]) is None:
            raise UntrainableError(
                f"the template ends the answer messages[{number}] differently when later ones follow: alone by "
                f"{answered.left.strip()!r}, so the model would learn an end other than the one to give",
                _OTHER_TEMPLATE,
                number,
            )
        return answered.end


def refused(refusal: NotRendered) -> UntrainableError:
    """Builds the error for a template that refuses the conversation."""
    return UntrainableError(f"the template refuses the conversation: {refusal.why}", "change the line, or leave it out")


def _not_found(number: int, why: str) -> UntrainableError:
    return UntrainableError(
        f"the answer messages[{number}] cannot be found in what the template writes: {why}",
        "mark answers by {% generation %} in your own template (data.chat_template), or leave the line out",
        number,
    )
