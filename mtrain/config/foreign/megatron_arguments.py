"""Arguments of a start of Megatron-LM, and their treatment (`mtrain/config/tables/megatron_lm.toml`)."""

from collections.abc import Mapping, Sequence
from typing import Any

from mtrain.base.spelling import meant
from mtrain.config.foreign.command_lines import after_launcher, is_variable, options
from mtrain.config.foreign.translation import Translation
from mtrain.config.foreign.values import scalar
from mtrain.config.tables import table

TABLE = table("megatron_lm")
REFUSED, WITHOUT_EFFECT = frozenset(TABLE["refused"].split()), frozenset(TABLE["without_effect"].split())
FLAGS = frozenset((*TABLE["switches"], *TABLE["flags"].split()))
"""Translated arguments without a value."""
_SECTIONS = ("rows", "latent_attention", "delta_net", "experts")
TRANSLATED = FLAGS.union(TABLE["read"].split(), *(TABLE[section] for section in _SECTIONS))
_EVERY = TRANSLATED | REFUSED | WITHOUT_EFFECT


def given_arguments(found: Translation, arguments: Sequence[str]) -> dict[str, list[str]]:
    """Returns the values of each argument, empty for flags; reports wrong ones."""
    given, before = options(after_launcher(arguments)[1], str)
    for word in before:
        found.wrong.append(f"{word}: an argument of Megatron-LM begins with --; remove what comes before it")
    for name, values in given.items():
        if name not in _EVERY:
            near = meant(name, _EVERY)
            hint = f"did you mean --{near}?" if near else "remove it"
            found.wrong.append(f"--{name} is no argument of Megatron-LM (August 2026); {hint}")
        if variables := [value for value in values if is_variable(value)]:
            found.wrong.append(f"--{name} {' '.join(variables)}: this is a variable of the shell; write its value")
        if name in FLAGS and values:
            found.wrong.append(f"--{name} {' '.join(values)}: --{name} takes no value; remove it")
    return given


class Arguments:
    def __init__(self, given: Mapping[str, list[str]], found: Translation) -> None:
        self._given, self._found = given, found
        self._read: set[str] = set()

    def _values(self, name: str) -> list[str] | None:
        self._read.add(name)
        return self._given.get(name)

    def _text(self, name: str) -> str | None:
        values = self._values(name)
        if values is None or len(values) == 1:
            return None if values is None else values[0]
        self._refuse(f"--{name} needs one value, but has {len(values)}; fix it")
        return None

    def _refuse(self, line: str) -> None:
        name = line.split()[0]
        if not any(each.split()[0] == name for each in self._found.wrong):  # one reason for each argument
            self._found.wrong.append(line)

    def _value(self, name: str, default: Any = None) -> Any:
        text = self._text(name)
        return default if text is None else scalar(text)

    def _number(self, name: str, default: int | None = None) -> int | None:
        value = self._value(name, default)
        if value is None or (isinstance(value, int) and not isinstance(value, bool)):
            return value
        self._refuse(f"--{name} needs a whole number, but has {value!r}; fix it")
        return default

    def _degree(self, name: str) -> int:
        """Returns a degree of parallelism; 1 if absent or illegal, which the rules of `layout` then report."""
        found = self._number(name)
        return 1 if found is None else max(1, found)

    def _is_on(self, name: str) -> bool:
        return self._values(name) is not None

    def _origin(self, *names: str) -> str:
        given = [f"--{name}" for name in names if name in self._given]
        return ", ".join(given) if given else f"Megatron-LM's default of --{', --'.join(names)}"

    def _put(self, name: str, key: str, default: Any = None) -> None:
        """Puts a given value, else Megatron-LM's default, if any."""
        self._put_value(key, self._value(name, default), name)

    def _put_value(self, key: str, value: Any, *names: str) -> None:
        """Puts a value that follows from arguments, or refuses an illegal one."""
        try:
            self._found.put(key, value, self._origin(*names))
        except (ValueError, ArithmeticError):
            self._refuse(
                f"--{names[0]} {' '.join(self._values(names[0]) or [])} is not a value that Megatron-LM takes; fix it"
            )

    def _put_all(self, section: str) -> None:
        """Puts the arguments of a section of the table."""
        for name, row in TABLE[section].items():
            if isinstance(row, str):
                self._put(name, row)
            else:
                self._put(name, row["to"], row.get("default"))

    def _switch(self, name: str, key: str) -> None:
        if self._is_on(name):
            self._put_value(key, True, name)

    def _unused(self, *names: str) -> None:
        self._found.without_effect += [f"--{name}" for name in names if self._is_on(name)]

    def _lost(self, name: str, why: str) -> None:
        """Reports an argument without equivalent, if it is given."""
        values = self._values(name)
        if values is not None:
            self._found.lost.append(f"--{name} {' '.join(values)}: {why}")
