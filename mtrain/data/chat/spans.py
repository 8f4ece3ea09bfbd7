"""Characters of a rendered conversation that are in the loss.

The whole conversation is rendered once, and that text is what the model reads. An answer is found in it by what the
template writes for shorter conversations, whatever its markup is:

    full     = all messages
    prompt   = the messages before the answer, and the beginning of an answer (add_generation_prompt)
    answered = the messages up to the answer

The answer begins where `prompt` ends in `full`, and ends where `answered` does. White space after the last special
token belongs to the template; a special token that follows at once ends the answer and belongs to it.

An answer counts only if the model would have seen exactly the text before it in `full` when it writes the answer. So
where a template writes earlier messages in another way once later ones follow, the answers concerned are refused. One
difference does not count: tags without text between them, such as an empty <think></think> that is written for the last
answer alone; there the answer counts as it stands in `full`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from mtrain.base.errors import DataError
from mtrain.data.chat.alignment import Whole
from mtrain.data.chat.sandbox import Cut, NotRendered, Rendered

Compare = Callable[[Sequence[Cut]], Sequence[Rendered | NotRendered]]
"""Function that renders the cuts of one conversation, each compared with the first."""
_ROLE = re.compile("assistant|model", re.IGNORECASE)
_WAY_ON = (
    'set data.loss_on=last_answer, set "train": false on that message, or give data.chat_template a template that '
    "keeps earlier messages as they are"
)


class AnswerSpan(NamedTuple):
    """Characters of one answer in the rendering."""

    message: int
    """Number of the message."""
    start: int
    end: int
    is_ended: bool
    """Whether its last token is a special one, at which the model stops."""


class SpecialTexts(NamedTuple):
    """Texts that are single tokens."""

    pattern: re.Pattern[str]
    """Pattern that matches one of them."""
    bos: str | None
    """Text of bos, which never ends an answer; None where there is no bos."""


def special_texts(tokens: Iterable[str], bos: str | None) -> SpecialTexts:
    """Builds the pattern of these tokens, which matches the longest one at a place."""
    ordered = sorted(tokens, key=len, reverse=True)
    return SpecialTexts(re.compile("|".join(map(re.escape, ordered)) or r"(?!)"), bos)


class AnswerFinder:
    """Search for the answers of one conversation by renderings of its beginnings."""

    def __init__(self, num_messages: int, compare: Compare, special: SpecialTexts) -> None:
        self._num_messages, self._compare, self._special = num_messages, compare, special
        self._found: dict[Cut, Rendered | NotRendered] = {}
        self._whole = Whole("", special.pattern)
        self.full = ""
        """Rendering of the whole conversation, once `find` has returned."""

    def find(self, messages: Mapping[int, Iterable[str]]) -> list[AnswerSpan]:
        """Finds the spans of these messages.

        Args:
            messages: Numbers of messages, ascending, each with the texts of the message itself.

        Raises:
            DataError: An answer cannot be found, or is not what the model would have to write.
        """
        # one request for all renderings that are nearly always needed
        self._fetch([cut for number in messages for cut in (Cut(number, True), Cut(number + 1, False))])
        full = self._found[Cut(self._num_messages, False)]
        if isinstance(full, NotRendered):
            raise refused(full)
        self.full, self._whole = full.rest, Whole(full.rest, self._special.pattern)
        found = [self._span(number) for number in messages]
        for span in found:
            self._check_header(span, messages[span.message])
        for earlier, later in pairwise(found):
            if earlier.end > later.start:
                raise _not_found(later.message, "it begins before the answer before it ends")
        return found

    def _check_header(self, span: AnswerSpan, texts: Iterable[str]) -> None:
        """Refuses a header in the loss, where the template has no beginning of an answer that could tell it apart."""
        places = [self.full.find(text.strip(), span.start, span.end) for text in texts if text.strip()]
        before = self.full[span.start : min((place for place in places if place >= 0), default=span.end)]
        if not _ROLE.search(before):
            return
        cuts = (Cut(span.message, prompt) for prompt in (True, False))
        if len({self._rendered(cut, span.message) for cut in cuts}) == 1:
            raise _not_found(span.message, "add_generation_prompt changes nothing, so its header would be in the loss")

    def _fetch(self, cuts: Iterable[Cut]) -> None:
        whole = Cut(self._num_messages, False)
        missing = [cut for cut in dict.fromkeys(cuts) if cut not in self._found and cut != whole]
        if missing or whole not in self._found:
            self._found.update(zip([whole, *missing], self._compare([whole, *missing]), strict=True))

    def _rendered(self, cut: Cut, answer: int) -> Rendered:
        if cut not in self._found:
            self._fetch([cut])
        found = self._found[cut]
        if isinstance(found, NotRendered):
            what = f"the first {cut.num_messages} messages alone" if cut.num_messages else "a prompt without messages"
            raise _not_found(answer, f"the template does not render {what} ({found.why})")
        return found

    def _span(self, number: int) -> AnswerSpan:
        start = self._start(number)
        end = self._end(number, start)
        if not self.full[start:end].strip():
            raise _not_found(number, "the template writes nothing for it")
        return self._with_stop(number, start, end)

    def _start(self, number: int) -> int:
        prompt = self._whole.align(self._rendered(Cut(number, True), number))
        if not prompt.left:
            return prompt.end
        if self._whole.align(self._rendered(Cut(number, False), number)).left:
            raise DataError(
                f"the template writes the messages before messages[{number}] in another way when later ones follow, so "
                f"the model would not see them like this when it answers; {_WAY_ON}"
            )
        raise _not_found(number, "it does not begin as add_generation_prompt does")

    def _end(self, number: int, start: int) -> int:
        if number == self._num_messages - 1:
            return len(self.full)
        answered = self._whole.align(self._rendered(Cut(number + 1, False), number))
        if answered.end >= start and self._is_markup(answered.left):
            return answered.end
        raise DataError(
            f"the template changes the answer messages[{number}] when later ones follow, for instance drops its "
            f"reasoning, so the model would learn another answer than it has to give; {_WAY_ON}"
        )

    def _is_markup(self, text: str) -> bool:
        return not self._special.pattern.sub("", text).strip()

    def _with_stop(self, number: int, start: int, end: int) -> AnswerSpan:
        text = self.full[start:end]
        last = max((match.end() for match in self._special.pattern.finditer(text)), default=None)
        if last is not None and not text[last:].strip():
            return AnswerSpan(number, start, start + last, True)
        following = self._special.pattern.match(self.full, end)
        if following is not None and following.group() != self._special.bos:
            return AnswerSpan(number, start, following.end(), True)
        return AnswerSpan(number, start, end, False)


def refused(refusal: NotRendered) -> DataError:
    """Builds the error of a template that refuses the conversation."""
    return DataError(f"the template refuses the conversation: {refusal.why}; change the line, or leave it out")


def _not_found(number: int, why: str) -> DataError:
    return DataError(
        f"the answer messages[{number}] cannot be found in what the template writes: {why}; mark answers by "
        "{% generation %} in a template of your own (data.chat_template), or leave the line out"
    )
