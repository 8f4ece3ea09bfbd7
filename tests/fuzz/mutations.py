"""Seeded mutations of a valid input: of its tree of values, and of its bytes.

The same `Random` gives the same mutation, so a finding is repeated by its target, seed and number.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable
from random import Random
from typing import Any

Path = tuple[int | str, ...]
"""Keys and indices from the root of a tree to one of its values."""

HUGE = (2**31, 2**63 - 1, 2**63, 2**64, 10**12, 10**30, 10**300, -(2**63), -(10**30))
FLOATS = (math.nan, math.inf, -math.inf, 1e39, 1e-46, 1e308, 5e-324, -0.0, 1e-320)
TEXTS = (
    "",
    " ",
    "\0",
    "a\0b",
    "\ud800",
    "\x1b[31m",
    "a\nb",
    "é漢🙂",
    "${x}",
    "???",
    "12:30",
    "1_000",
    "0x10",
    "1e3",
    "nan",
    "64",
    "true",
    "null",
    "/dev/zero",
    "/",
    "..",
    "../../x",
    "x" * 300,
    "x" * 70_000,
)
TOKENS = (
    b"1" * 5000,
    b"0x" + b"f" * 5000,
    b"1e400",
    b"1e-400",
    b".nan",
    b"NaN",
    b"-Infinity",
    b"12:30",
    b"12:30:45.5",
    b"2026-01-01",
    b"010",
    b"1_000",
    b"0b11",
    b"-0",
    b"yes",
    b"~",
    b'"64"',
    b'"\\ud800"',
    b'"\\0"',
    b"'",
    b'"',
    b"{",
    b"}",
    b"[",
    b"]",
    b"[" * 3000,
    b'{"a":' * 3000,
    b"- " * 3000,
    b"&a [*a]",
    b"*a",
    b"<<: {a: 1}",
    b"? ",
    b": ",
    b"\t",
    b"#",
    b"---\n",
    b"%YAML 9.9\n",
    b"!!binary aGFsbG8=",
    b"!!set {a, b}",
    b"!!timestamp 2026-01-01",
    b"!!int 10",
    b"!!python/object:os.system x",
    b"${oc.env:HOME}",
    b"???",
    b"\0",
    b"\xff\xfe",
    b"\xef\xbb\xbf",
    b"\xed\xa0\x80",
)
"""Replacements of a number or word in a text."""

_TOKEN = re.compile(rb"[\w.+-]+")


def mutated_tree(content: Any, random: Random) -> Any:
    """Returns a copy of nested dicts, lists and plain values with one to three mutations.

    Args:
        content: Tree that is left unchanged; keys of dicts are texts.
    """
    root = {"root": copy.deepcopy(content)}  # so that the whole content has a place, too
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        random.choice(_TREE_MUTATIONS)(root, random)
    return root.get("root")


def mutated_bytes(data: bytes, random: Random) -> bytes:
    """Returns the bytes with one to three mutations, of bytes or of a word of a text."""
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        data = random.choice(_BYTE_MUTATIONS)(data, random)
    return data


def _paths(tree: Any, at: Path = ()) -> list[Path]:
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    return [found for key, value in items for found in ((*at, key), *_paths(value, (*at, key)))]


def _at(tree: Any, path: Path) -> Any:
    for key in path:
        tree = tree[key]
    return tree


def _place(root: Any, random: Random) -> tuple[Any, Any]:
    """Returns a container and the key of one of its values."""
    paths = _paths(root)
    path = random.choice(paths) if paths else ("root",)
    return _at(root, path[:-1]), path[-1]


def _delete(root: Any, random: Random) -> None:
    holder, key = _place(root, random)
    holder.pop(key, None) if isinstance(holder, dict) else holder.pop(key)


def _duplicate(root: Any, random: Random) -> None:
    holder, key = _place(root, random)
    if isinstance(holder, dict):
        holder[random.choice((f"{key}_", f"{key}s", str(key)[:-1] or "x"))] = copy.deepcopy(holder.get(key))
    else:
        holder[key:key] = [copy.deepcopy(holder[key]) for _ in range(random.choice((1, 2, 300)))]


def _replace(root: Any, random: Random, change: Callable[[Any], Any]) -> None:
    holder, key = _place(root, random)
    holder[key] = change(holder.get(key) if isinstance(holder, dict) else holder[key])


def _retype(root: Any, random: Random) -> None:
    def other(value: Any) -> Any:
        of_it = (str(value), [value], {"a": value})
        others: tuple[Any, ...] = (None, True, False, 0, 1, 1.5, "", [], {}, [1, 2], [[]], [{}])
        return random.choice((*of_it, *others))

    _replace(root, random, other)


def _huge(root: Any, random: Random) -> None:
    _replace(root, random, lambda value: random.choice((*HUGE, *FLOATS)))


def _number(root: Any, random: Random) -> None:
    """Changes a number to a small, negative or near one, which is wrong only by its meaning."""

    def other(value: Any) -> Any:
        near = value if isinstance(value, int | float) else 1
        return random.choice((0, -1, 1, 2, 3, 7, -near, near + 1, near - 1, near * 2, near * 1000, near / 2))

    _replace(root, random, other)


def _text(root: Any, random: Random) -> None:
    _replace(root, random, lambda value: random.choice(TEXTS))


def _nest(root: Any, random: Random) -> None:
    def nested(value: Any) -> Any:
        in_lists = random.random() < 0.5
        for _ in range(random.choice((1, 3, 40))):
            value = [value] if in_lists else {"a": value}
        return value

    _replace(root, random, nested)


def _unknown_key(root: Any, random: Random) -> None:
    holders = [holder for path in [(), *_paths(root)] if isinstance(holder := _at(root, path), dict)]
    random.choice(holders)[random.choice((*TEXTS, "unknown", "num_layer", "Model"))] = random.choice((1, "x", {}, []))


def _rename(root: Any, random: Random) -> None:
    holder, key = _place(root, random)
    if isinstance(holder, dict) and key in holder:
        holder[random.choice((*TEXTS, str(key).upper(), f" {key}", f"{key}.x"))] = holder.pop(key)


def _swap(root: Any, random: Random) -> None:
    (one, key), (other, other_key) = _place(root, random), _place(root, random)
    values = copy.deepcopy((one[key], other[other_key])) if root else (None, None)
    one[key], other[other_key] = values[1], values[0]


_TREE_MUTATIONS: tuple[Callable[[Any, Random], None], ...] = (
    _delete,
    _duplicate,
    _retype,
    _retype,
    _huge,
    _huge,
    _number,
    _number,
    _text,
    _nest,
    _unknown_key,
    _rename,
    _swap,
)


def _position(data: bytes, random: Random) -> int:
    return random.randrange(len(data)) if data else 0


def _flip(data: bytes, random: Random) -> bytes:
    if not data:
        return data
    changed = bytearray(data)
    changed[_position(data, random)] ^= 1 << random.randrange(8)
    return bytes(changed)


def _truncate(data: bytes, random: Random) -> bytes:
    return data[: _position(data, random)]


def _insert(data: bytes, random: Random) -> bytes:
    at = _position(data, random)
    return data[:at] + random.choice((*TOKENS, random.randbytes(random.choice((1, 2, 8, 64))))) + data[at:]


def _cut(data: bytes, random: Random) -> bytes:
    at = _position(data, random)
    return data[:at] + data[at + random.choice((1, 2, 8, 64)) :]


def _repeat(data: bytes, random: Random) -> bytes:
    at = _position(data, random)
    return data[:at] + data[at : at + random.choice((1, 8, 64))] * random.choice((2, 3, 100)) + data[at:]


def _overwrite(data: bytes, random: Random) -> bytes:
    at, size = _position(data, random), random.choice((1, 2, 4, 8))
    filling = random.choice((b"\0" * size, b"\xff" * size, b"\x7f" + b"\xff" * (size - 1), random.randbytes(size)))
    return data[:at] + filling + data[at + size :]


def _token(data: bytes, random: Random) -> bytes:
    """Replaces a word or number of a text by another."""
    places = [match.span() for match in _TOKEN.finditer(data)]
    if not places:
        return _insert(data, random)
    first, last = random.choice(places)
    return data[:first] + random.choice(TOKENS) + data[last:]


_BYTE_MUTATIONS: tuple[Callable[[bytes, Random], bytes], ...] = (
    _flip,
    _truncate,
    _insert,
    _cut,
    _repeat,
    _overwrite,
    _token,
    _token,
)
