"""Arguments of Megatron-LM: their names, their values on a command line, and how they set keys."""

from collections.abc import Mapping, Sequence
from typing import Any

from mtrain.base.spelling import meant
from mtrain.config.foreign.reading import after_launcher, is_variable, options
from mtrain.config.foreign.translation import Translation
from mtrain.config.foreign.values import scalar
from mtrain.config.tables import table

TABLE = table("megatron_lm")
REFUSED, WITHOUT_EFFECT = frozenset(TABLE["refused"].split()), frozenset(TABLE["without_effect"].split())
FLAGS = frozenset((*TABLE["switches"], *TABLE["flags"].split()))
"""Translated arguments that take no value."""
_SECTIONS = ("rows", "rope", "yarn", "latent_attention", "delta_net", "experts")
TRANSLATED = FLAGS.union(TABLE["read"].split(), *(TABLE[section] for section in _SECTIONS))
_EVERY = TRANSLATED | REFUSED | WITHOUT_EFFECT


def read_arguments(config: Translation, words: Sequence[str]) -> "Arguments":
    """Reads a command line, after its launcher if it has one; reports wrong arguments and those without equivalent."""
    by_name, before = options(after_launcher(words)[1], str)
    config.given = tuple(f"--{name}" for name in by_name)
    for word in before:
        config.wrong.append(f"{word}: an argument of Megatron-LM begins with --; remove this word")
    for name, values in by_name.items():
        if name not in _EVERY:
            near = meant(name, _EVERY)
            hint = f"did you mean --{near}?" if near else "remove it"
            config.wrong.append(f"--{name} is not an argument of Megatron-LM (August 2026); {hint}")
        if variables := [value for value in values if is_variable(value)]:
            config.wrong.append(f"--{name} {' '.join(variables)}: this is a shell variable; write its value")
        if name in FLAGS and values:
            config.wrong.append(f"--{name} {' '.join(values)}: --{name} takes no value; remove it")
        if name in WITHOUT_EFFECT:
            config.without_effect.append(f"--{name}")
        if name in REFUSED:
            config.lost.append(f"{' '.join([f'--{name}', *values])}: it changes training, and has no equivalent here")
    return Arguments(by_name, config)


class Arguments:
    """Arguments of one command line; remembers which of them were read.

    Attributes:
        config: The translation, whose keys they set.
    """

    def __init__(self, by_name: Mapping[str, list[str]], config: Translation) -> None:
        self.config, self._by_name = config, by_name
        self._read: set[str] = set()

    def values(self, name: str) -> list[str] | None:
        """Returns the values of an argument, empty for a flag; None if it is absent."""
        self._read.add(name)
        return self._by_name.get(name)

    def text(self, name: str) -> str | None:
        values = self.values(name)
        if values is None or len(values) == 1:
            return None if values is None else values[0]
        self.refuse(f"--{name} needs one value, but has {len(values)}; fix it")
        return None

    def refuse(self, line: str) -> None:
        """Reports an argument, the first word of `line`, as one that Megatron-LM would refuse."""
        name = line.split()[0]
        if not any(earlier.split()[0] == name for earlier in self.config.wrong):  # one reason for each argument
            self.config.wrong.append(line)

    def value(self, name: str, default: Any = None) -> Any:
        """Returns the only value of an argument, read as YAML."""
        text = self.text(name)
        return default if text is None else scalar(text)

    def number(self, name: str, default: int | None = None) -> int | None:
        """Returns a whole number; the default if it is absent or illegal."""
        value = self.value(name, default)
        if value is None or (isinstance(value, int) and not isinstance(value, bool)):
            return value
        self.refuse(f"--{name} needs a whole number, but has {value!r}; fix it")
        return default

    def degree(self, name: str) -> int:
        """Returns a degree of parallelism; 1 if absent or illegal, which the rules of `layout` then report."""
        degree = self.number(name)
        return 1 if degree is None else max(1, degree)

    def is_given(self, name: str) -> bool:
        return self.values(name) is not None

    def origin(self, *names: str) -> str:
        """Returns the origin of a value that follows from several arguments: the explicit ones, or the defaults."""
        explicit = [f"--{name}" for name in names if name in self._by_name]
        return ", ".join(explicit) if explicit else f"Megatron-LM's default of --{', --'.join(names)}"

    def put(self, name: str, key: str, default: Any = None) -> None:
        """Sets `key` from an argument, otherwise from Megatron-LM's default, if any."""
        self.put_value(key, self.value(name, default), name)

    def put_value(self, key: str, value: Any, *names: str) -> None:
        """Sets `key` to a value that follows from arguments, or refuses an illegal value."""
        try:
            self.config.put(key, value, self.origin(*names))
        except (ValueError, ArithmeticError):
            self.refuse(
                f"--{names[0]} {' '.join(self.values(names[0]) or [])} is not a value that Megatron-LM accepts; fix it"
            )

    def put_all(self, section: str) -> None:
        """Sets the keys of a section of the table."""
        for name, row in TABLE[section].items():
            self.put(name, row["to"], row.get("default"))

    def switch(self, name: str, key: str) -> None:
        """Sets `key` to true if a flag is given."""
        if self.is_given(name):
            self.put_value(key, True, name)

    def unused(self, *names: str) -> None:
        """Reports arguments, if they are given, as ones without effect."""
        self.config.without_effect += [f"--{name}" for name in names if self.is_given(name)]

    def lost(self, name: str, why: str) -> None:
        """Reports an argument without an equivalent, if it is given."""
        values = self.values(name)
        if values is not None:
            self.config.lost.append(f"--{name} {' '.join(values)}: {why}")

    def report_unread(self) -> None:
        """Reports translated arguments that no other one uses; called at the end."""
        self.config.lost += [
            f"{' '.join([f'--{name}', *values])}: no other argument uses it"
            for name, values in self._by_name.items()
            if name in TRANSLATED and name not in self._read
        ]
