"""Spelling of texts: what a misspelt name means, and nouns that agree with a number."""

from collections.abc import Iterable

_SHORT = 4
"""Length of words up to which a replaced letter counts as another word, such as text and test."""


def meant(name: str, names: Iterable[str]) -> str | None:
    """Returns the only one of `names` that differs from `name` by case, hyphens, underscores or a single typo, if any.

    Ambiguous or more distant names give None: warmup_step means warmup_steps, but every_steps does not mean
    keep_every_steps, and beta3 does not mean beta2.
    """
    known = list(dict.fromkeys(names))
    same = [candidate for candidate in known if _squeezed(candidate) == _squeezed(name)]
    near = same or [candidate for candidate in known if _is_slip(plain(name), plain(candidate))]
    return near[0] if len(near) == 1 else None


def plain(name: str) -> str:
    """Returns a name in lower case, with underscores for hyphens."""
    return name.strip("- ").replace("-", "_").lower()


def _squeezed(name: str) -> str:
    return plain(name).replace("_", "")


def _is_slip(typed: str, intended: str) -> bool:
    """Says whether one letter is missing, added or replaced, or two neighbours are swapped."""
    start = 0
    while start < min(len(typed), len(intended)) and typed[start] == intended[start]:
        start += 1
    end = 0
    while end < min(len(typed), len(intended)) - start and typed[-1 - end] == intended[-1 - end]:
        end += 1
    extra, missing = typed[start : len(typed) - end], intended[start : len(intended) - end]
    if any(char.isdigit() for char in extra + missing):
        return False
    if start and (extra + missing) == intended[start - 1] and min(len(typed), len(intended)) > 1:
        return True  # a letter typed twice or once too rarely, which is a typo even in short words
    word = intended[intended.rfind("_", 0, start) + 1 :].partition("_")[0]
    if len(extra) == len(missing) == 1:
        return len(word) > _SHORT
    is_swap = len(extra) == 2 and missing == extra[::-1]
    return len(word) >= _SHORT and (is_swap or len(extra) + len(missing) == 1)


def counted(number: int, noun: str, form: str = "") -> str:
    """Returns a number with its noun, such as 1 rank or 2 ranks.

    Args:
        noun: Noun in the singular, possibly after adjectives; its plural is regular.
        form: Format of the number, such as `,`.
    """
    ending = "es" if noun.endswith(("ch", "sh", "s", "x")) else "s"
    return f"{number:{form}} {noun}{'' if number == 1 else ending}"
