"""A configuration that comes from another program: its keys with their origins, and what could not be carried over."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from mtrain.base.errors import MtrainError
from mtrain.base.yaml_text import read_yaml
from mtrain.config.load import Given


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

    def put(self, key: str, value: Any, origin: str) -> None:
        """Sets a dotted key.

        Args:
            key: Key in our configuration.
            value: Value; None leaves the key out.
            origin: Text for the comment next to the key.
        """
        if value is None:
            return
        *parents, name = key.split(".")
        place = self.content
        for parent in parents:
            place = place.setdefault(parent, {})
        earlier, known = place.get(name), self.origins.get(key, origin)
        is_grown = isinstance(earlier, dict) and isinstance(value, dict) and earlier.items() <= value.items()
        place[name], self.origins[key] = value, origin
        if known != origin and (earlier == value or is_grown):
            self.origins[key] = f"{known}; {origin}"
        elif known != origin:
            self.lost.append(f"{known}: {origin} gives another {key}, which is kept")

    def drop(self, key: str) -> None:
        """Takes a key or a section out, and names what gave it among what has no effect."""
        *parents, name = key.split(".")
        place = self.content
        for parent in parents:
            place = place.get(parent, {})
        if place.pop(name, None) is not None:
            gone = [each for each in self.origins if each == key or each.startswith(f"{key}.")]
            self.without_effect += [self.origins.pop(each) for each in gone]
            if parents and not place:
                self.drop(".".join(parents))

    def state(self) -> tuple[dict[str, str], int, int, int]:
        """Returns the origins and the numbers of lines, which change when anything is kept of a value."""
        return dict(self.origins), len(self.lost), len(self.notes), len(self.without_effect)

    def lines(self) -> Iterator[str]:
        """Yields the lines of the YAML file, each key with its origin, after what could not be carried over."""
        yield f"# Translated from {self.program} by `mtrain from`; `mtrain check` says what it makes of it."
        if self.lost:
            yield "# Not carried over:"
            yield from (f"#   {line}" for line in self.lost)
        if self.notes:
            yield "# Differs:"
            yield from (f"#   {line}" for line in self.notes)
        if self.without_effect:
            yield f"# Without effect on what is trained: {', '.join(self.without_effect)}"
        if missing := self.faults():
            yield "# To be completed:"
            yield from (f"#   {line}" for line in missing)
        yield from self._section(self.content, "", "")

    def _section(self, section: Mapping[str, Any], indent: str, prefix: str) -> Iterator[str]:
        for name, value in section.items():
            key = f"{prefix}{name}"
            if isinstance(value, dict) and key not in self.origins:
                yield f"{indent}{name}:"
                yield from self._section(value, f"{indent}  ", f"{key}.")
            else:
                yield f"{indent}{name}: {json.dumps(value, ensure_ascii=False)}  # {self.origins[key]}"

    def faults(self) -> list[str]:
        """Lists what the translated configuration still lacks, or cannot be."""
        try:
            Given(self.content, ()).config()
        except MtrainError as error:
            return str(error).splitlines()
        return []


Put = Callable[[Translation, Any, str], None]
"""Function that puts the value of one foreign key."""


def to(key: str, change: Callable[[Any], Any] = lambda value: value) -> Put:
    """Returns the function that puts a value under `key`, changed by `change`."""
    return lambda found, value, name: found.put(key, change(value), name)


def constant(key: str, values: Mapping[Any, Any]) -> Put:
    """Returns the function that puts what a table has for the value; other values are lost."""

    def put(found: Translation, value: Any, name: str) -> None:
        if value in values:
            found.put(key, values[value], f"{name}={value}")
        else:
            found.lost.append(f"{name}={value}: {key} takes {', '.join(str(each) for each in values.values())}")

    return put


def lost(why: str) -> Put:
    """Returns the function that names a key that nothing corresponds to."""
    return lambda found, value, name: found.lost.append(f"{name}={value}: {why}")


def no_effect(found: Translation, value: Any, name: str) -> None:
    """Names a key that does not change what is trained."""
    found.without_effect.append(name)


def scalar(text: str) -> Any:
    """Reads the value of a command-line argument as YAML does: a number, true, null or a text."""
    try:
        return read_yaml(text).content
    except ValueError:
        return text


def shares(text: str) -> list[float]:
    """Turns "949,50,1" into shares of 1, three of them."""
    numbers = [float(each) for each in text.split(",")]
    numbers += [0.0] * (3 - len(numbers))
    return [number / sum(numbers) for number in numbers]
