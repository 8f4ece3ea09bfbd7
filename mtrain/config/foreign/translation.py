"""A configuration translated from another program, with the origin of every key, what was lost and what is missing."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from mtrain.base.errors import ConfigError
from mtrain.config.foreign.faults import find_faults, keys_in, value_at
from mtrain.config.foreign.values import boolean, default_of, fitting, is_same
from mtrain.config.load import Resolve

_VISION = "model.vision"
_SAME_WITHOUT = ("layout.shard", "train.overlap_param_gather", "train.compile", "train.recompute")
"""Keys without which a run computes the same; their defaults can be combined with everything."""


@dataclass
class Translation:
    """Keys of a configuration, translated from the settings of `program`."""

    program: str
    content: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    """Dotted key -> origin of its value."""
    lost: list[str] = field(default_factory=list)
    """Lines on settings that could not be carried over."""
    notes: list[str] = field(default_factory=list)
    """Lines on keys whose meaning or default differs."""
    without_effect: list[str] = field(default_factory=list)
    """Names of settings that do not affect training."""
    wrong: list[str] = field(default_factory=list)
    """Lines on settings that the program itself would refuse."""
    missing: list[str] = field(default_factory=list)
    """Lines on keys that the configuration still lacks; `checked` finds them."""
    given: tuple[str, ...] = ()
    """Names of the settings that the user gave."""
    saved_in_tower: dict[str, str] = field(default_factory=dict)
    """Key of `model.vision` that freezes a part -> setting that trains it in full next to adapters."""

    def put(self, key: str, value: Any, origin: str) -> None:
        """Sets a dotted key; a default of the program does not override a setting.

        Args:
            value: Value of the key; None leaves the key unset.
            origin: Text of the comment next to the key.

        Raises:
            ValueError: The key's type does not accept the value.
        """
        if value is None:
            return
        value = fitting(key, value)
        *parents, name = key.split(".")
        section = self.content
        for parent in parents:
            section = section.setdefault(parent, {})
        earlier, known = section.get(name), self.origins.get(key, origin)
        is_grown = isinstance(earlier, dict) and isinstance(value, dict) and earlier.items() <= value.items()
        is_grown |= isinstance(earlier, list) and isinstance(value, list) and value[: len(earlier)] == earlier
        if known != origin and self.is_default(origin) and not is_grown:
            return
        section[name], self.origins[key] = value, origin
        if known == origin or (self.is_default(known) and not is_grown):
            return
        if earlier == value or is_grown:
            self.origins[key] = f"{known}; {origin}"
        else:
            self.lost.append(f"{known}: {origin} gives another {key}, which is used")

    def get(self, key: str) -> Any:
        """Returns the value of a dotted key, or None."""
        return value_at(self.content, key)

    def is_default(self, origin: str) -> bool:
        """Says whether an origin is a default of the program rather than a setting."""
        return origin.startswith(f"{self.program}'s default")

    def drop(self, key: str, *, is_named: bool = True) -> None:
        """Drops a key or section; `is_named` adds its origins to `without_effect`."""
        *parents, name = key.split(".")
        section = self.content
        for parent in parents:
            section = section.get(parent, {})
        if section.pop(name, None) is not None:
            dropped = [dotted for dotted in self.origins if dotted == key or dotted.startswith(f"{key}.")]
            explicit = [origin for origin in map(self.origins.pop, dropped) if not self.is_default(origin)]
            self.without_effect += explicit if is_named else []
            if parents and not section:
                self.drop(".".join(parents))

    def drop_same_defaults(self) -> None:
        """Drops the program's defaults that equal mtrain's."""
        for key, origin in list(self.origins.items()):
            # model.vision is a section only if one of its keys is written
            is_needed = key.startswith("model.vision.")
            if self.is_default(origin) and not is_needed and is_same(self.get(key), default_of(key)):
                self.drop(key)

    def report_unmentioned(self, explicit: Mapping[str, Any]) -> None:
        """Adds settings that no origin or line mentions to `without_effect`."""
        text = "\n".join([*self.origins.values(), *self.lost, *self.notes, *self.wrong, *self.without_effect])
        self.without_effect += [name for name in explicit if not _mentions(text, name)]

    def carried(self) -> list[str]:
        """Returns the settings that keys of the configuration come from."""
        origins = "\n".join(self.origins.values())
        return [name for name in self.given if _mentions(origins, name)]

    def lines(self) -> Iterator[str]:
        """Yields the lines of the YAML file: comments on the translation, then each key with its origin."""
        yield f"# Translated from {self.program} by `mtrain from`; `mtrain check` shows the resulting run."
        if carried := self.carried():
            yield f"# Carried over: {', '.join(map(one_line, carried))}"
        yield from _listed("Not carried over", self.lost)
        yield from _listed("Differs", self.notes)
        if self.without_effect:
            yield f"# No effect on training: {', '.join(map(one_line, self.without_effect))}"
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
        """Returns the translation, without defaults that equal mtrain's.

        Args:
            resolve: Fills in keys from folders that the configuration names.

        Raises:
            ConfigError: The program would refuse its input, or `mtrain check` would refuse the result; one line per
                reason.
        """
        self.drop_same_defaults()
        self.missing, faults = find_faults(self.content, resolve)
        while self._drops_one_of(faults):
            self.missing, faults = find_faults(self.content, resolve)
        wrong = [self._with_origins(line) for line in faults]
        if reasons := list(dict.fromkeys((*self.wrong, *wrong))):
            raise ConfigError("\n".join(reasons))
        return self

    def _drops_one_of(self, faults: list[str]) -> bool:
        """Drops a key that cannot be combined with others and that the run does not need; says whether there was one.

        A vision tower is not needed if only the model, and no setting, implies it.
        """
        lines = [
            line
            for line in faults
            if "cannot be combined with" in line or _VISION in line or line.startswith("train.overlap_param_gather=")
        ]
        for line, key in ((line, key) for key in _SAME_WITHOUT for line in lines):
            if key in self.origins and key in keys_in(line):
                self.lost.append(f"{self.origins[key]}: {line}")
                self.drop(key, is_named=False)
                return True
        images = [key for key in self.origins if key.startswith((f"{_VISION}.", "data.images."))]
        refused = next((line for line in lines if _VISION in line), None)
        if refused is None or not images or not all(map(self._has_default, images)):
            return False
        self.lost.append(f"{_VISION}: {refused}")
        self.notes = [line for line in self.notes if _VISION not in line]
        self.drop(_VISION, is_named=False)
        self.drop("data.images", is_named=False)
        return True

    def _has_default(self, key: str) -> bool:
        return self.is_default(self.origins[key])

    def _with_origins(self, line: str) -> str:
        named = keys_in(line)
        keys = [key for key in named if key in self.origins]
        if _VISION in named:
            keys += [key for key in self.origins if key.startswith(f"{_VISION}.") and not self._has_default(key)]
        origins = dict.fromkeys(one_line(self.origins[key]) for key in keys)
        return f"{line} (from {', '.join(origins)})" if origins else line


def _mentions(text: str, name: str) -> bool:
    return re.search(rf"(?<![\w.-]){re.escape(name)}(?![\w.-]*\w)", text) is not None


def _listed(title: str, lines: list[str]) -> Iterator[str]:
    if lines:
        yield f"# {title}:"
        yield from (f"#   {one_line(line)}" for line in lines)


def one_line(text: str) -> str:
    """Replaces unprintable characters, including newlines, with spaces, for a comment."""
    return "".join(char if char.isprintable() else " " for char in text)


Put = Callable[[Translation, Any, str], None]
"""Function that sets keys from a setting (translation, value, name); ValueError or TypeError mean an illegal value."""


@dataclass(frozen=True)
class Row:
    """Translation of one setting of another program."""

    put: Put
    default: Any = None
    """Default in the other program; None: nothing is set."""
    null: Any = None
    """Value that null means; None: null means nothing."""


Table = Mapping[str, Row]
"""Setting of another program -> its translation."""


def to(key: str, default: Any = None, change: Callable[[Any], Any] = lambda value: value) -> Row:
    """Returns a row that sets `key` to `change` of the value; None leaves the key unset."""
    return Row(lambda config, value, name: config.put(key, change(fitting(key, value)), name), default)


def choice(key: str, values: Mapping[Any, Any], default: Any = None) -> Row:
    """Returns a row that sets `key` to the counterpart of the value in `values`; None leaves the key unset.

    Other values are reported as lost.
    """

    is_switch = values.keys() == {True, False}

    def put(config: Translation, value: Any, name: str) -> None:
        value = boolean(value) if is_switch else value
        if isinstance(value, str | bool) and value in values:
            config.put(key, values[value], name if config.is_default(name) else f"{name}={value}")
        else:
            known = ", ".join(
                dict.fromkeys(str(choice_value) for choice_value in values.values() if choice_value is not None)
            )
            config.lost.append(f"{name}={value}: {key} takes {known}")

    return Row(put, default)


def lost(why: str, *neutral: Any) -> Row:
    """Returns a row of a setting without equivalent: reports it, unless it has a neutral value, by default false."""

    def put(config: Translation, value: Any, name: str) -> None:
        if not any(is_same(value, each) for each in neutral or (False,)):
            config.lost.append(f"{name}={value}: {why}")

    return Row(put)


def deferred(check: Callable[[Any], Any], default: Any = None) -> Row:
    """Returns a row of a setting that code after the table combines with others; `check` refuses illegal values."""
    return Row(lambda config, value, name: check(value) and None, default)


def above_0(value: Any) -> Any:
    """Returns a number above 0; None for 0 and negative numbers, which mean off."""
    return value if value > 0 else None


def unless_0(value: Any) -> Any:
    """Returns a number; None for 0."""
    return value or None


def no_effect(config: Translation, value: Any, name: str) -> None:
    """Sets nothing, for a setting that does not affect training; the head of the written file names it."""


UNUSED = Row(no_effect)
"""Row of a setting that does not affect training."""


def rows_of(content: Mapping[str, Any], functions: Mapping[str, Callable[..., Any]]) -> dict[str, Row]:
    """Builds the rows of a table in `mtrain/config/tables`.

    Args:
        content: `rows` by name; `read`, a check -> names of settings that are combined with others; `unused` names;
            `lost`, a list of reasons (`why`), each with `names` of settings whose neutral value is false, `neutral`,
            other settings -> their neutral value, and `any_of`, settings -> their neutral values.
        functions: Functions by their names in the table.
    """
    rows = {name: _row(entry, functions) for name, entry in content.get("rows", {}).items()}
    for check, names in content.get("read", {}).items():
        rows |= dict.fromkeys(names.split(), deferred(functions[check]))
    for group in content.get("lost", ()):
        rows |= dict.fromkeys(group.get("names", "").split(), lost(group["why"]))
        rows |= {name: lost(group["why"], neutral) for name, neutral in group.get("neutral", {}).items()}
        rows |= {name: lost(group["why"], *values) for name, values in group.get("any_of", {}).items()}
    return rows | dict.fromkeys(content.get("unused", "").split(), UNUSED)


def _row(entry: str | Mapping[str, Any], functions: Mapping[str, Callable[..., Any]]) -> Row:
    if isinstance(entry, str):
        return to(entry)
    if "null" in entry:
        return replace(_row({key: entry[key] for key in entry if key != "null"}, functions), null=entry["null"])
    default = entry.get("default")
    match entry:
        case {"lost": why}:
            return lost(why, entry.get("neutral", False))
        case {"read": check}:
            return deferred(functions[check], default)
        case {"put": name, "of": argument}:
            return Row(functions[name](argument), default)
        case {"put": name}:
            return Row(functions[name], default)
        case {"to": key, "switch": value}:
            return choice(key, {True: value, False: None}, default)
        case {"to": key, "one_of": list(names)}:
            return choice(key, dict(zip(names, names)), default)
        case {"to": key, "one_of": names}:
            return choice(key, {name: value or None for name, value in names.items()}, default)
        case {"to": key, "change": name}:
            return to(key, default, functions[name])
        case {"to": key}:
            return to(key, default)
    raise AssertionError(f"{entry} is not a row")


@dataclass(frozen=True)
class Settings:
    """Settings of a program, explicit or default."""

    program: str
    explicit: Mapping[str, Any]
    """Settings that the user gave, without empty and wrong ones."""
    defaults: Mapping[str, Any]

    def __getitem__(self, name: str) -> Any:
        return self.explicit.get(name, self.defaults.get(name))

    def origin(self, *names: str) -> str:
        """Returns the origin of a value that follows from several settings: the explicit ones, or the defaults."""
        explicit = [name for name in names if name in self.explicit]
        return ", ".join(explicit) if explicit else f"{self.program}'s default of {', '.join(names)}"

    def described(self, *names: str) -> str:
        """Returns the explicit settings among `names` with their values; without any, their `origin`."""
        explicit = [f"{name}={self.explicit[name]}" for name in names if name in self.explicit]
        return ", ".join(explicit) if explicit else self.origin(*names)


def is_nothing(value: Any) -> bool:
    """Says whether a value is empty: null, or an empty text, list or mapping."""
    return value is None or (isinstance(value, str | list | dict) and not value)


def translated(config: Translation, settings: Mapping[str, Any], table: Table) -> Settings:
    """Translates every setting, then the program's defaults; returns both, without wrong settings."""
    explicit: dict[str, Any] = {}
    config.given = tuple(settings)
    for name, value in settings.items():
        row = table.get(name)
        if value is None and row is not None and row.null is not None:
            value = row.null
        if is_nothing(value):
            _put_nothing(config, name, value, row)
            continue
        if row is None:
            config.lost.append(f"{name}={value}: no key here corresponds")
        if row is None or try_put(config, row.put, value, name):
            explicit[name] = value
    defaults = {name: row.default for name, row in table.items() if row.default is not None and name not in explicit}
    for name, value in defaults.items():
        table[name].put(config, value, f"{config.program}'s default of {name}")
    return Settings(config.program, explicit, defaults)


def _put_nothing(config: Translation, name: str, value: Any, row: Row | None) -> None:
    """Reports an empty value that stands for the program's default, or has no effect."""
    if row is None or row.default is None:
        config.without_effect.append(name)
    else:
        shown = "null" if value is None else repr(value)
        config.notes.append(f"{name}={shown}: the default of {config.program}, {row.default}, is used; write a value")


def try_put(config: Translation, put: Put, value: Any, name: str) -> bool:
    """Sets keys from a value, or reports the value as wrong; returns whether it is legal."""
    try:
        put(config, value, name)
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError):
        config.wrong.append(f"{name}={value!r} is not a value that {config.program} accepts; fix it")
        return False
    return True
