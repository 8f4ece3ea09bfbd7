"""A configuration translated from another program, with the origin of every key, what was lost and what is missing."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from mtrain.base.errors import ConfigError, MtrainError
from mtrain.config.foreign.values import boolean, default_of, fitting, is_same
from mtrain.config.kinds import merged
from mtrain.config.load import MergedContent, Resolve
from mtrain.config.schema.root import Config

_MAX_ROUNDS = 40
"""Limit of the search for faults that hide each other, far above what a person's file needs."""
_KEY = re.compile(r"[a-z_]\w*(?:\.\w+)*")
_FOLDER = "model.hf"
_STAND_INS: Mapping[str, Any] = {
    "run": {"dir": "run"},
    "train": {"global_batch_size": 1, "num_steps": 1_000_000},
    "optimizer": {"lr": 1.0},
    "data": {"seq_length": 65536, "tokenizer": "tokenizer", "train": [{"path": "corpus"}]},
    "loss": {"norm_length": 1024},
}
"""Values for keys that the user may still have to add, so that all others can be checked."""


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
            if self.is_default(origin) and is_same(self.get(key), default_of(key)):
                self.drop(key)

    def report_unmentioned(self, explicit: Mapping[str, Any]) -> None:
        """Adds settings that no origin or line mentions to `without_effect`."""
        text = "\n".join([*self.origins.values(), *self.lost, *self.notes, *self.wrong, *self.without_effect])
        self.without_effect += [
            name for name in explicit if not re.search(rf"(?<![\w.-]){re.escape(name)}(?![\w.-]*\w)", text)
        ]

    def lines(self) -> Iterator[str]:
        """Yields the lines of the YAML file: comments on the translation, then each key with its origin."""
        yield f"# Translated from {self.program} by `mtrain from`; `mtrain check` shows the resulting run."
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
        if refused := [line for line in faults if "with layout.shard=weights" in line]:  # the run is the same without
            self.lost.append(f"{self.origins['layout.shard']}: {refused[0]}")
            self.drop("layout.shard", is_named=False)
            self.missing, faults = find_faults(self.content, resolve)
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


def lost(why: str, default: Any = False) -> Row:
    """Returns a row of a setting without equivalent: reports it, unless it has its neutral value `default`."""

    def put(config: Translation, value: Any, name: str) -> None:
        if not is_same(value, default):
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
        content: `rows` by name; `read`, a check -> names of settings that are combined with others; `unused` names.
        functions: Functions by their names in the table.
    """
    rows = {name: _row(entry, functions) for name, entry in content["rows"].items()}
    for check, names in content.get("read", {}).items():
        rows |= dict.fromkeys(names.split(), deferred(functions[check]))
    return rows | dict.fromkeys(content.get("unused", "").split(), UNUSED)


def _row(entry: str | Mapping[str, Any], functions: Mapping[str, Callable[..., Any]]) -> Row:
    if isinstance(entry, str):
        return to(entry)
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
    for name, value in settings.items():
        row = table.get(name)
        if is_nothing(value):
            continue
        if row is None:
            config.lost.append(f"{name}={value}: no key here corresponds")
        if row is None or try_put(config, row.put, value, name):
            explicit[name] = value
    defaults = {name: row.default for name, row in table.items() if row.default is not None and name not in explicit}
    for name, value in defaults.items():
        table[name].put(config, value, f"{config.program}'s default of {name}")
    return Settings(config.program, explicit, defaults)


def try_put(config: Translation, put: Put, value: Any, name: str) -> bool:
    """Sets keys from a value, or reports the value as wrong; returns whether it is legal."""
    try:
        put(config, value, name)
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError):
        config.wrong.append(f"{name}={value!r} is not a value that {config.program} accepts; fix it")
        return False
    return True


class Faults(NamedTuple):
    missing: list[str]
    """Messages on keys without a value, and on a model that is not downloaded."""
    wrong: list[str]


def find_faults(content: Mapping[str, Any], resolve: Resolve) -> Faults:
    """Finds every fault of sections, by repairing a copy until no fault hides another.

    Args:
        content: Sections with their keys; not changed.
        resolve: Fills in keys from folders that the sections name.
    """
    sections: dict[str, Any] = copy.deepcopy(dict(content))
    faults = Faults([], [])
    known: set[str] = set()
    is_stand_in = False
    for _ in range(_MAX_ROUNDS):
        try:
            MergedContent(sections, ()).config(resolve)
            break
        except MtrainError as error:
            lines = str(error).splitlines()
        keys = [_key_of(line) for line in lines]
        for key, line in zip(keys, lines):
            is_known = not known.isdisjoint((key, *keys_in(line)))
            if not is_known and not (is_stand_in and _names_stand_in(content, line)):
                _record(sections, key, line, faults)
        is_stand_in |= _FOLDER in keys
        repaired = [_repair(sections, key, line) for key, line in zip(keys, lines)]
        if not any(repaired):
            break
        known.update(keys)
    return faults


def keys_in(line: str) -> list[str]:
    """Returns the dotted keys that a message names."""
    return [key for key in _KEY.findall(line) if key.partition(".")[0] in Config.model_fields]


def _key_of(line: str) -> str:
    """Returns the key at the beginning of a message; `model.hf` if the message begins with a file of that folder."""
    match = _KEY.match(line)
    return match[0] if match is not None and match[0] in keys_in(line) else _FOLDER


def _names_stand_in(content: Mapping[str, Any], line: str) -> bool:
    """Says whether a message names a size of the model that only a stand-in gives."""
    return any(key.startswith("model.") and value_at(content, key) is None for key in keys_in(line))


def _is_missing(sections: Mapping[str, Any], key: str) -> bool:
    if key == _FOLDER:
        return not Path(str(value_at(sections, key))).exists()
    return value_at(sections, key) is None and _stand_in(sections, key) is not None


def _record(sections: Mapping[str, Any], key: str, line: str, faults: Faults) -> None:
    lines = faults.missing if _is_missing(sections, key) else faults.wrong
    if line not in lines:
        lines.append(line)


def _repair(sections: dict[str, Any], key: str, line: str) -> bool:
    if key == _FOLDER:
        model = {name: value for name, value in sections.get("model", {}).items() if name != "hf"}
        is_new = model != sections.get("model")
        sections["model"] = merged(_model_for(sections), model)
        return is_new
    if _is_missing(sections, key):
        return _fill(sections, key)
    candidates = [key, *(other for other in keys_in(line) if "." in other)]
    return any(_remove(sections, candidate) for candidate in candidates)


def value_at(sections: Mapping[str, Any], key: str) -> Any:
    """Returns the value of a dotted key, or None."""
    value: Any = sections
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _stand_in(sections: Mapping[str, Any], key: str) -> Any:
    return value_at({**_STAND_INS, "model": _model_for(sections)}, key)


def _fill(sections: dict[str, Any], key: str) -> bool:
    section, _, name = key.partition(".")
    stand_in = copy.deepcopy(_stand_in(sections, key))
    sections[section] = {**sections.get(section, {}), name: stand_in} if name else stand_in
    return True


def _remove(sections: dict[str, Any], key: str) -> bool:
    *parents, name = key.split(".")
    section = value_at(sections, ".".join(parents)) if parents else sections
    if not isinstance(section, dict) or section.pop(name, None) is None:
        return False
    if parents[:1] == ["model"] and "hf" not in sections["model"]:
        sections["model"] = merged(_model_for(sections), sections["model"])
    return True


def _model_for(sections: Mapping[str, Any]) -> dict[str, Any]:
    layout = sections.get("layout", {})
    tp, pp, vpp, cp, ep, etp = (_size(layout.get(name)) for name in ("tp", "pp", "vpp", "cp", "ep", "etp"))
    ends = [_size(layout[name]) for name in ("first_stage_layers", "last_stage_layers") if layout.get(name)]
    heads = 8 * tp * cp
    model: dict[str, Any] = {
        "num_layers": sum(ends) + 8 * max(0, pp * vpp - len(ends)),
        "hidden_size": 64 * heads,
        "ffn_hidden_size": 128 * heads,
        "num_attention_heads": heads,
        "vocab_size": 100_000,
    }
    has_experts = ep > 1 or etp > 1 or "router" in sections.get("loss", {})
    if has_experts or "experts" in sections.get("model", {}):
        sizes = {"ffn_hidden_size": 64 * etp, "shared_ffn_hidden_size": 64 * tp}
        model["experts"] = {"num_experts": 8 * ep, "top_k": 2, "first_dense_layers": 1, **sizes}
    return model


def _size(value: Any) -> int:
    return value if isinstance(value, int) and value > 0 else 1
