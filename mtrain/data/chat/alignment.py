"""Alignment of a rendering of the first messages with that of the whole conversation, without regard to empty thoughts.

Templates write an empty thought, such as <think></think>, into the beginning of an answer or into the last answer, and
leave it out of earlier ones, or the other way round. To the model it says that no thought follows, so it does not count
as a difference. Everything else does.
"""

# ruff: noqa: RUF001 - DeepSeek writes its tokens with another bar than the others

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

from mtrain.data.chat.sandbox import Rendered

_DELIMITER = r"[<\[◁]/?[|｜]?/?[^\s<>\[\]◁▷|｜/]+[|｜]?[>\]▷]"
_OPENED = re.compile(rf"(?P<open>{_DELIMITER})(?P<label>\w*)\s*(?=(?P<close>{_DELIMITER}))")
"""Pattern of two delimiters with nothing but a label between them. The second one is not consumed: it may be the first
one of the next pair."""
_THOUGHT = re.compile("think|thought|reason", re.IGNORECASE)
_BEGIN = re.compile(r"^(begin|start|open)|(begin|start|open)$")
_END = re.compile(r"^(end|stop|close)|(end|stop|close)$")
_FILLING = re.compile(r"(?:^|[\W_])of(?=[\W_]|$)|[\W_]|\d+$", re.IGNORECASE)
_SPACE = re.compile(r"\s*")
_BRACKETS = "<[◁|｜>]▷"
_LONGEST = 256
"""Number of characters of an empty pair with the white space around it, at most."""


class Gap(NamedTuple):
    """Consecutive empty pairs with the white space around them."""

    start: int
    end: int
    first: int
    """Place at which the first pair begins."""
    last: int
    """Place at which the last pair ends."""
    opened: str
    """Text that opens the last pair."""

    def moved(self, by: int) -> Gap:
        """Returns the same gap in a text with `by` more characters before it."""
        return Gap(self.start + by, self.end + by, self.first + by, self.last + by, self.opened)


class Aligned(NamedTuple):
    """Extent to which a text agrees with the whole conversation."""

    left: str
    """Rest of the text from the first difference on."""
    end: int
    """Place in the whole conversation at which they part."""


def gaps(text: str) -> list[Gap]:
    """Finds the empty pairs of a text, in ascending order.

    A pair is two tags of one name (`<x></x>`, `<|x></x|>`, `<|x><x|>`), with or without a label that speaks of thoughts
    (`<|channel>thought\\n<channel|>`), or a beginning and an end of thoughts (`[BEGIN_THINK][END_THINK]`).
    """
    found: list[Gap] = []
    for match in _OPENED.finditer(text):
        if not _is_pair(match["open"], match["label"], match["close"]):
            continue
        before, last = found[-1].end if found else 0, match.end("close")
        start = match.start()
        while start > before and text[start - 1].isspace():
            start -= 1
        end = _after_space(text, last)
        if found and start == before:
            found[-1] = found[-1]._replace(end=end, last=last, opened=match["open"])
        else:
            found.append(Gap(start, end, match.start(), last, match["open"]))
    return found


def _is_pair(opened: str, label: str, closed: str) -> bool:
    name, other = opened.strip(_BRACKETS), closed.strip(_BRACKETS)
    if name.startswith("/") or (label and not _THOUGHT.search(label)):
        return False
    if other.startswith("/"):
        return other.lstrip("/|｜") == name
    if name == other:  # <|x> and <x|>, but not the same one twice
        return opened[1] in "|｜" and opened[-2] not in "|｜" and closed[1] not in "|｜" and closed[-2] in "|｜"
    bare, other_bare = (_FILLING.sub("", each).lower() for each in (name, other))
    core, other_core = _BEGIN.sub("", bare), _END.sub("", other_bare)
    if core != other_core:
        return False
    # a turn has a beginning and an end, too; and delimiters with a number alone say nothing by themselves
    return _THOUGHT.search(core if core != bare and other_core != other_bare else label) is not None


def _after_space(text: str, position: int) -> int:
    match = _SPACE.match(text, position)
    assert match is not None, "it may be empty"
    return match.end()


class Whole:
    """Rendering of a whole conversation, with which those of its beginnings are compared."""

    def __init__(self, text: str, special: re.Pattern[str]) -> None:
        """
        Args:
            text: Rendering of the conversation.
            special: Pattern of a special token.
        """
        self.text, self._special = text, special
        self._gaps = gaps(text)

    def align(self, rendered: Rendered) -> Aligned:
        """Finds how far the text of a beginning agrees with the whole.

        A special token agrees as a whole, or not at all. Where the text ends with an empty pair that the whole lacks,
        but the whole opens one that holds something, the text does not agree to its end.
        """
        if not rendered.rest:
            return Aligned("", rendered.common)
        start = max(0, rendered.common - _LONGEST)
        around = bisect_left(self._gaps, start, key=lambda gap: gap.end)
        if around < len(self._gaps) and self._gaps[around].start < start:
            start = self._gaps[around].start
        text = self.text[start : rendered.common] + rendered.rest
        return self._aligned(text, start, self._gaps[around:])

    def _aligned(self, text: str, position: int, later: Sequence[Gap]) -> Aligned:
        """Compares from one gap to the next.

        Args:
            text: Text that is compared.
            position: Place in the whole at which the text begins.
            later: Gaps of the whole from there on.
        """
        here, ours, theirs = 0, [*gaps(text)], [*later]
        while True:
            own = ours[0] if ours else None
            other = theirs[0] if theirs else None
            length = min(
                (len(text) if own is None else own.start) - here,
                (len(self.text) if other is None else other.start) - position,
            )
            if text[here : here + length] != self.text[position : position + length]:
                length = self._num_common(text, here, position, length)
                return Aligned(text[here + length :], position + length)
            here, position = here + length, position + length
            own = ours.pop(0) if own is not None and own.start == here else None
            other = theirs.pop(0) if other is not None and other.start == position else None
            if own is None and other is None:
                return Aligned(text[here:], position)
            # white space around an empty pair belongs to the pair
            after = own.end if own is not None else _after_space(text, here)
            if after == len(text):
                return self._at_end(text[here:], own and own.moved(-here), position, other)
            here, position = after, other.end if other is not None else _after_space(self.text, position)

    def _at_end(self, text: str, own: Gap | None, position: int, other: Gap | None) -> Aligned:
        """Ends the comparison where one gap, or only white space, is left of the text.

        Args:
            text: Rest of the text.
            own: Gap that the rest is; None where it is only white space.
            position: Place in the whole at which the rest begins.
            other: Gap of the whole that begins there; None where there is none.
        """
        if own is None:
            return Aligned("", position + _num_common(text, self.text[position : position + len(text)]))
        if other is not None:
            after = self.text[other.last : other.end]
            return Aligned("", other.last + _num_common(text[own.last :], after))
        after = self.text[position : _after_space(self.text, position)]
        end = position + _num_common(text[: own.first] or text[own.last :], after)
        goes_on = self.text.startswith(own.opened, position + len(after))
        return Aligned(text[own.first :] if goes_on else "", end)

    def _num_common(self, text: str, here: int, position: int, length: int) -> int:
        """Returns the length of the common beginning of two pieces; special tokens count as a whole or not at all."""
        common = _num_common(text[here : here + length], self.text[position : position + length])
        for piece, start in ((text, here), (self.text, position)):
            for match in self._special.finditer(piece, max(start, start + common - _LONGEST)):
                if match.start() >= start + common:
                    break
                if match.end() > start + common:
                    common = match.start() - start
        return common


def _num_common(one: str, other: str) -> int:
    return next((place for place, (a, b) in enumerate(zip(one, other)) if a != b), min(len(one), len(other)))
