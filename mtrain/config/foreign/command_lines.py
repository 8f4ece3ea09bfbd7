"""Parsing of other programs' command lines: launchers are skipped, options are read."""

import re
from collections.abc import Callable, Collection, Iterable, Sequence

from mtrain.base.errors import ConfigError
from mtrain.config.messages import SCRIPTS, not_a_script

_LAUNCHERS = frozenset(("torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch"))
_VARIABLE = re.compile(r"[A-Z_][A-Z0-9_]*=")
_OPERATOR = re.compile(r"\d?>{1,2}(&\d|\S*)|&>{1,2}\S*|\|{1,2}|&{1,2}|;")
"""Shell operators, which end the arguments, as in `2>&1 | tee log`."""
_EXPANSION = re.compile(r"\$[\w{(@*]|^`")


def after_launcher(words: Iterable[str], commands: Collection[str] = ()) -> tuple[list[str], list[str]]:
    """Splits a command line into launcher and arguments; drops a shell's line continuations.

    Args:
        words: Words of a shell or script: `torchrun ... -m MODULE` or `VARIABLE=... python pretrain.py`, then
            arguments.
        commands: Names of the program's own commands, such as sft.

    Returns:
        Words up to the program's name, empty without a launcher; and the arguments.

    Raises:
        ConfigError: The words name a shell script, which is not executed here.
    """
    cleaned = [word.strip() for word in words]
    cleaned = [word for word in cleaned if word and word != "\\"]
    ends = [number for number, word in enumerate(cleaned) if _OPERATOR.fullmatch(word)]
    cleaned = cleaned[: ends[0]] if ends else cleaned
    if not cleaned or not _begins_launcher(cleaned[0], commands):
        return [], cleaned
    for number, word in enumerate(cleaned):
        is_module = number > 0 and cleaned[number - 1] == "-m" and word not in _LAUNCHERS
        is_script = word.endswith(".py") and not word.startswith("-") and "=" not in word
        if is_module or is_script or word in commands:
            return cleaned[: number + 1], cleaned[number + 1 :]
    for word in cleaned:
        if word.endswith(SCRIPTS):
            raise ConfigError(not_a_script(word))
    return [], cleaned


def _begins_launcher(word: str, commands: Collection[str]) -> bool:
    """Says whether the first word may begin a command, rather than being an argument or a file of arguments."""
    is_argument = word.startswith("-") or word.endswith((".yaml", ".yml", ".json", ".toml"))
    return word in commands or not (is_argument or ("=" in word and not sets_environment(word)))


def sets_environment(word: str) -> bool:
    """Says whether a word sets an environment variable, as in `CUDA_VISIBLE_DEVICES=0`."""
    return _VARIABLE.match(word) is not None


def environment(command: Iterable[str]) -> dict[str, str]:
    """Returns the environment variables that a launcher's words set."""
    return {name: value for name, _, value in (word.partition("=") for word in command if sets_environment(word))}


def is_variable(text: str) -> bool:
    """Says whether a word contains a shell variable or command substitution, whose value is unknown."""
    return _EXPANSION.search(text) is not None


def options(words: Sequence[str], name_of: Callable[[str], str]) -> tuple[dict[str, list[str]], list[str]]:
    """Reads `--name value ...`, `--name=value` and `--name`; the last occurrence of a name counts.

    Args:
        name_of: Normalises the text after the hyphens.

    Returns:
        Values by name, and the words before the first option.
    """
    by_name: dict[str, list[str]] = {}
    before: list[str] = []
    values = before
    for word in words:
        if word.startswith("--"):
            name, separator, value = word[2:].partition("=")
            values = by_name[name_of(name)] = [value] if separator else []
        else:
            values.append(word)
    return by_name, before
