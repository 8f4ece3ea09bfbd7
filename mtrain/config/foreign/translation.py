"""A configuration from another program: its keys with their origins, and what could not be carried over."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from mtrain.base.errors import ConfigError
from mtrain.config.foreign.completeness import found_faults, keys_in, value_at
from mtrain.config.foreign.values import boolean, default_of, fitting, is_same
from mtrain.config.load import Resolve


@dataclass
class Translation:
    """Translated keys, in our terms."""

    program: str
    content: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    """Dotted key -> origin of its value."""
    lost: list[str] = field(default_factory=list)
    """Lines on settings that could not be carried over."""
    notes: list[str] = field(default_factory=list)
    """Lines on keys with another meaning or default."""
    without_effect: list[str] = field(default_factory=list)
    """Names of settings that do not change what is trained."""
    wrong: list[str] = field(default_factory=list)
    """Lines on what the program itself would refuse."""
    missing: list[str] = field(default_factory=list)
    """Lines on what the configuration still lacks; `checked` finds them."""

    def put(self, key: str, value: Any, origin: str) -> None:
        """Sets a dotted key; a default of the program gives way to a value given under another name.

        Args:
            value: Value; None omits the key.
            origin: Text for the comment next to the key.

        Raises:
            ValueError: A key of this type does not take the value.
        """
        if value is None:
            return
        value = fitting(key, value)
        *parents, name = key.split(".")
        place = self.content
        for parent in parents:
            place = place.setdefault(parent, {})
        earlier, known = place.get(name), self.origins.get(key, origin)
        is_grown = isinstance(earlier, dict) and isinstance(value, dict) and earlier.items() <= value.items()
        is_grown |= isinstance(earlier, list) and isinstance(value, list) and value[: len(earlier)] == earlier
        if known != origin and self.is_default(origin) and not is_grown:
            return
        place[name], self.origins[key] = value, origin
        if known == origin or (self.is_default(known) and not is_grown):
            return
        if earlier == value or is_grown:
            self.origins[key] = f"{known}; {origin}"
        else:
            self.lost.append(f"{known}: {origin} gives another {key}, which is kept")

    def get(self, key: str) -> Any:
        """Returns the value of a dotted key, if any."""
        return value_at(self.content, key)

    def is_default(self, origin: str) -> bool:
        """Says whether an origin is a default of the program instead of a given value."""
        return origin.startswith(f"{self.program}'s default")

    def drop(self, key: str, *, is_named: bool = True) -> None:
        """Drops a key or section; `is_named` reports its origin among what has no effect."""
        *parents, name = key.split(".")
        place = self.content
        for parent in parents:
            place = place.get(parent, {})
        if place.pop(name, None) is not None:
            gone = [each for each in self.origins if each == key or each.startswith(f"{key}.")]
            given = [each for each in map(self.origins.pop, gone) if not self.is_default(each)]
            self.without_effect += given if is_named else []
            if parents and not place:
                self.drop(".".join(parents))

    def drop_same_defaults(self) -> None:
        """Drops the program's defaults that equal ours."""
        for key, origin in list(self.origins.items()):
            if self.is_default(origin) and is_same(self.get(key), default_of(key)):
                self.drop(key)

    def names_all_of(self, given: Mapping[str, Any]) -> None:
        """Reports given keys that appear nowhere among what has no effect."""
        text = "\n".join([*self.origins.values(), *self.lost, *self.notes, *self.wrong, *self.without_effect])
        self.without_effect += [
            name for name in given if not re.search(rf"(?<![\w.-]){re.escape(name)}(?![\w.-]*\w)", text)
        ]

    def lines(self) -> Iterator[str]:
        """Yields the lines of the YAML file: what was lost, then each key with its origin."""
        yield f"# Translated from {self.program} by `mtrain from`; `mtrain check` says what it makes of it."
        yield from _listed("Not carried over", self.lost)
        yield from _listed("Differs", self.notes)
        if self.without_effect:
            yield f"# Without effect on what is trained: {', '.join(map(one_line, self.without_effect))}"
        yield from _listed("To be completed", self.missing)
        yield from self._section(self.content, "", "")

    def _section(self, section: Mapping[str, Any], indent: str, prefix: str) -> Iterator[str]:
        for name, value in section.items():
            key = f"{prefix}{name}"
            if isinstance(value, dict) and key not in self.origins:
                yield f"{indent}{name}:"
                yield from self._section(value, f"{indent}  ", f"{key}.")
            else:
                yield f"{indent}{name}: {json.dumps(value)}  # {one_line(self.origins[key])}"

    def checked(self, resolve: Resolve) -> Translation:
        """Returns the translation, without defaults that equal ours.

        Args:
            resolve: Fills in what folders say that the configuration names.

        Raises:
            ConfigError: The program would refuse its input, or `mtrain check` the result; one line per reason.
        """
        self.drop_same_defaults()
        self.missing, faults = found_faults(self.content, resolve)
        wrong = [self._with_origins(line) for line in faults]
        if reasons := list(dict.fromkeys((*self.wrong, *wrong))):
            raise ConfigError("\n".join(reasons))
        return self

    def _with_origins(self, line: str) -> str:
        origins = dict.fromkeys(one_line(self.origins[key]) for key in keys_in(line) if key in self.origins)
        return f"{line} (from {', '.join(origins)})" if origins else line


def _listed(title: str, lines: list[str]) -> Iterator[str]:
    if lines:
        yield f"# {title}:"
        yield from (f"#   {one_line(line)}" for line in lines)


def one_line(text: str) -> str:
    """Returns a text on one line of printable characters, for a comment."""
    return "".join(each if each.isprintable() else " " for each in text)


Put = Callable[[Translation, Any, str], None]
"""Puts the value of a foreign key; raises ValueError or TypeError for illegal values."""


@dataclass(frozen=True)
class Row:
    """Treatment of one key of another program."""

    put: Put
    default: Any = None
    """The program's default; None: no consequence."""


Table = Mapping[str, Row]
"""Key of another program -> treatment."""


def to(key: str, default: Any = None, change: Callable[[Any], Any] = lambda value: value) -> Row:
    """Puts the value under `key`, changed by `change`, which returns None for nothing."""
    return Row(lambda found, value, name: found.put(key, change(fitting(key, value)), name), default)


def choice(key: str, values: Mapping[Any, Any], default: Any = None) -> Row:
    """Puts what `values` has for the value, nothing for None; other values are lost."""

    is_switch = values.keys() == {True, False}

    def put(found: Translation, value: Any, name: str) -> None:
        value = boolean(value) if is_switch else value
        if isinstance(value, str | bool) and value in values:
            found.put(key, values[value], name if found.is_default(name) else f"{name}={value}")
        else:
            known = ", ".join(dict.fromkeys(str(each) for each in values.values() if each is not None))
            found.lost.append(f"{name}={value}: {key} takes {known}")

    return Row(put, default)


def lost(why: str, default: Any = False) -> Row:
    """Reports a key without equivalent, unless it has its neutral value `default`."""

    def put(found: Translation, value: Any, name: str) -> None:
        if not is_same(value, default):
            found.lost.append(f"{name}={value}: {why}")

    return Row(put)


def later(check: Callable[[Any], Any], default: Any = None) -> Row:
    """Row of a key that is read together with others after the table; `check` refuses illegal values."""
    return Row(lambda found, value, name: check(value) and None, default)


def above_0(value: Any) -> Any:
    """Returns a number above 0; None for 0 and negative numbers, which switch something off."""
    return value if value > 0 else None


def unless_0(value: Any) -> Any:
    """Returns a number; None for 0."""
    return value or None


def no_effect(found: Translation, value: Any, name: str) -> None:
    """Leaves a key that does not change what is trained; the file's head names it."""


UNUSED = Row(no_effect)
"""Row of a key that does not change what is trained."""


@dataclass(frozen=True)
class Settings:
    """Settings of a program: given ones and defaults."""

    program: str
    given: Mapping[str, Any]
    """Given settings, without empty and wrong ones."""
    defaults: Mapping[str, Any]

    def __getitem__(self, name: str) -> Any:
        return self.given.get(name, self.defaults.get(name))

    def origin(self, *names: str) -> str:
        """Names the given ones of several keys that a value follows from."""
        given = [name for name in names if name in self.given]
        return ", ".join(given) if given else f"{self.program}'s default of {', '.join(names)}"

    def said(self, *names: str) -> str:
        """Returns `origin` with the given values."""
        given = [f"{name}={self.given[name]}" for name in names if name in self.given]
        return ", ".join(given) if given else self.origin(*names)


def is_nothing(value: Any) -> bool:
    """Says whether a value is empty: null, or an empty text, list or mapping."""
    return value is None or (isinstance(value, str | list | dict) and not value)


def translated(found: Translation, given: Mapping[str, Any], table: Table) -> Settings:
    """Puts every given value, then the program's defaults; returns both, without wrong ones."""
    kept: dict[str, Any] = {}
    for name, value in given.items():
        row = table.get(name)
        if is_nothing(value):
            continue
        if row is None:
            found.lost.append(f"{name}={value}: no key here corresponds")
        if row is None or tried(found, row.put, value, name):
            kept[name] = value
    defaults = {name: row.default for name, row in table.items() if row.default is not None and name not in kept}
    for name, value in defaults.items():
        table[name].put(found, value, f"{found.program}'s default of {name}")
    return Settings(found.program, kept, defaults)


def tried(found: Translation, put: Put, value: Any, name: str) -> bool:
    """Puts a value, or reports it as wrong; says whether it is legal."""
    try:
        put(found, value, name)
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError):
        found.wrong.append(f"{name}={value!r} is not a value that {found.program} takes; fix it")
        return False
    return True
