"""The name that a misspelt one means."""

from collections.abc import Iterable

_SHORT = 4
"""Number of letters up to which a changed letter makes another word, such as text and test."""


def meant(name: str, names: Iterable[str]) -> str | None:
    """Returns the one of `names` that `name` misspells: by case, hyphens, underscores or a single typo.

    Ambiguous or more distant names do not count: warmup_step is warmup_steps, but every_steps is not keep_every_steps,
    and beta3 is not beta2.
    """
    known = list(dict.fromkeys(names))
    same = [each for each in known if _squeezed(each) == _squeezed(name)]
    near = same or [each for each in known if _is_slip(plain(name), plain(each))]
    return near[0] if len(near) == 1 else None


def plain(name: str) -> str:
    """Returns a name in lower case, with underscores for hyphens."""
    return name.strip("- ").replace("-", "_").lower()


def _squeezed(name: str) -> str:
    return plain(name).replace("_", "")


def _is_slip(given: str, wanted: str) -> bool:
    """Says whether one letter was left out, added or replaced, or two neighbours were swapped."""
    start = 0
    while start < min(len(given), len(wanted)) and given[start] == wanted[start]:
        start += 1
    end = 0
    while end < min(len(given), len(wanted)) - start and given[-1 - end] == wanted[-1 - end]:
        end += 1
    extra, missing = given[start : len(given) - end], wanted[start : len(wanted) - end]
    if any(each.isdigit() for each in extra + missing):
        return False
    if start and (extra + missing) == wanted[start - 1] and min(len(given), len(wanted)) > 1:
        return True  # a letter was typed twice or not twice, which no other word of a few letters explains
    word = wanted[wanted.rfind("_", 0, start) + 1 :].partition("_")[0]
    if len(extra) == len(missing) == 1:
        return len(word) > _SHORT
    is_swap = len(extra) == 2 and missing == extra[::-1]
    return len(word) >= _SHORT and (is_swap or len(extra) + len(missing) == 1)
