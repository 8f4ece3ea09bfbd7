"""A configuration that comes from another program: its keys with their origins, and what could not be carried over."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from mtrain.base.errors import ConfigError
from mtrain.config.foreign.completeness import found_faults, keys_in
from mtrain.config.foreign.values import boolean, default_of, fitting, is_same
from mtrain.config.load import Resolve


@dataclass
class Translation:
    """Keys that were found, in our terms."""

    program: str
    """Program that the configuration comes from."""
    content: dict[str, Any] = field(default_factory=dict)
    """Sections with the keys that were translated."""
    origins: dict[str, str] = field(default_factory=dict)
    """Dotted key -> where its value comes from."""
    lost: list[str] = field(default_factory=list)
    """Lines on what was given and could not be carried over."""
    notes: list[str] = field(default_factory=list)
    """Lines on what is the same key with another meaning or default."""
    without_effect: list[str] = field(default_factory=list)
    """Names of what was given and does not change what is trained."""
    wrong: list[str] = field(default_factory=list)
    """Lines on what the program itself would refuse, so that there is nothing to translate."""
    missing: list[str] = field(default_factory=list)
    """Lines on what the translated configuration still lacks; `checked` finds them."""

    def put(self, key: str, value: Any, origin: str) -> None:
        """Sets a dotted key; a default of the program gives way to what is given under another name.

        Args:
            key: Key in our configuration.
            value: Value; None leaves the key out.
            origin: Text for the comment next to the key.

        Raises:
            ValueError: The value is none that a key of this type takes.
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
        """Returns the value of a dotted key; None where there is none."""
        place: Any = self.content
        for part in key.split("."):
            place = place.get(part) if isinstance(place, dict) else None
        return place

    def is_default(self, origin: str) -> bool:
        """Says whether an origin is a default of the program, and not something that was given."""
        return origin.startswith(f"{self.program}'s default")

    def drop(self, key: str, *, is_named: bool = True) -> None:
        """Takes a key or a section out; `is_named` says whether what gave it is named among what has no effect."""
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
        """Takes out the defaults of the program that are ours as well."""
        for key, origin in list(self.origins.items()):
            if self.is_default(origin) and is_same(self.get(key), default_of(key)):
                self.drop(key)

    def names_all_of(self, given: Mapping[str, Any]) -> None:
        """Names what is given and shows nowhere, among what has no effect."""
        text = "\n".join([*self.origins.values(), *self.lost, *self.notes, *self.wrong, *self.without_effect])
        self.without_effect += [
            name for name in given if not re.search(rf"(?<![\w.-]){re.escape(name)}(?![\w.-]*\w)", text)
        ]

    def lines(self) -> Iterator[str]:
        """Yields the lines of the YAML file, each key with its origin, after what could not be carried over."""
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
        """Returns the translation, without defaults that are ours.

        Args:
            resolve: Fills in what folders say that the configuration names.

        Raises:
            ConfigError: The program would refuse what is given, or `mtrain check` would refuse what it becomes; one
                line for each reason.
        """
        self.drop_same_defaults()
        self.missing, faults = found_faults(self.content, resolve)
        wrong = [self._with_origins(line) for line in faults]
        if reasons := list(dict.fromkeys((*self.wrong, *wrong))):
            raise ConfigError("\n".join(reasons))
        return self

    def _with_origins(self, line: str) -> str:
        """Returns a message on keys of ours with what they come from."""
        origins = dict.fromkeys(one_line(self.origins[key]) for key in keys_in(line) if key in self.origins)
        return f"{line} (from {', '.join(origins)})" if origins else line


def _listed(title: str, lines: list[str]) -> Iterator[str]:
    if lines:
        yield f"# {title}:"
        yield from (f"#   {one_line(line)}" for line in lines)


def one_line(text: str) -> str:
    """Returns a text on one line of printable characters, as a comment needs it."""
    return "".join(each if each.isprintable() else " " for each in text)


Put = Callable[[Translation, Any, str], None]
"""Function that puts the value of one foreign key; it raises ValueError or TypeError for what is no value of it."""


@dataclass(frozen=True)
class Row:
    """What becomes of one key of another program."""

    put: Put
    """Function that puts its value."""
    default: Any = None
    """Value that the program takes where none is given; None: nothing follows then."""


Table = Mapping[str, Row]
"""Name of a key in another program -> what becomes of it."""


def to(key: str, default: Any = None, change: Callable[[Any], Any] = lambda value: value) -> Row:
    """Returns the row whose value goes under `key`, changed by `change`, which makes None of what is no value."""
    return Row(lambda found, value, name: found.put(key, change(fitting(key, value)), name), default)


def choice(key: str, values: Mapping[Any, Any], default: Any = None) -> Row:
    """Returns the row that puts what a table has for the value; None there means nothing. Other values are lost."""

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
    """Returns the row of a key that nothing corresponds to, where its value is not the one that changes nothing."""

    def put(found: Translation, value: Any, name: str) -> None:
        if not is_same(value, default):
            found.lost.append(f"{name}={value}: {why}")

    return Row(put)


def later(check: Callable[[Any], Any], default: Any = None) -> Row:
    """Returns the row of a key that is read together with others, after the table; `check` refuses what is no value."""
    return Row(lambda found, value, name: check(value) and None, default)


def above_0(value: Any) -> Any:
    """Returns a number above 0; None for 0 and what switches something off by a number below."""
    return value if value > 0 else None


def unless_0(value: Any) -> Any:
    """Returns a number; None for 0, which is as good as no number."""
    return value or None


def no_effect(found: Translation, value: Any, name: str) -> None:
    """Leaves a key that does not change what is trained; the head names it."""


UNUSED = Row(no_effect)
"""Row of a key that does not change what is trained."""


@dataclass(frozen=True)
class Settings:
    """What a program runs with: what is given, and its defaults."""

    program: str
    given: Mapping[str, Any]
    """What is given, without what means nothing and what is wrong."""
    defaults: Mapping[str, Any]
    """Defaults of the other keys."""

    def __getitem__(self, name: str) -> Any:
        return self.given.get(name, self.defaults.get(name))

    def origin(self, *names: str) -> str:
        """Returns what a value that follows from several keys comes from: those of them that are given."""
        given = [name for name in names if name in self.given]
        return ", ".join(given) if given else f"{self.program}'s default of {', '.join(names)}"

    def said(self, *names: str) -> str:
        """Returns the same with the values that are given."""
        given = [f"{name}={self.given[name]}" for name in names if name in self.given]
        return ", ".join(given) if given else self.origin(*names)


def is_nothing(value: Any) -> bool:
    """Says whether a value is as good as none: null, an empty text, list or mapping."""
    return value is None or (isinstance(value, str | list | dict) and not value)


def translated(found: Translation, given: Mapping[str, Any], table: Table) -> Settings:
    """Puts every value that is given, and then the defaults of the program; returns both, without what is wrong."""
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
    """Puts a value, or names it as wrong; says whether it is right."""
    try:
        put(found, value, name)
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError):
        found.wrong.append(f"{name}={value!r} is not a value that {found.program} takes; fix it")
        return False
    return True
