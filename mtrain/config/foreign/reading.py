"""Reads other programs' command lines, after their launchers, and files into one mapping of settings."""

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mtrain.base.errors import ConfigError
from mtrain.config.foreign.keys import refuse_other
from mtrain.config.foreign.translation import Translation
from mtrain.config.foreign.values import scalar
from mtrain.config.load import read_mapping
from mtrain.config.messages import SCRIPTS, not_a_script

ENDINGS = (".yaml", ".yml", ".json", ".toml")
_REFERENCE = re.compile(r"\$\{([\w.]+)\}")
_MISSING = "???"
"""Value that OmegaConf and Hydra refuse until it is replaced."""
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


class Given(NamedTuple):
    """Input of a program: its files and its command line."""

    command: list[str]
    """Words of the launcher, up to the program's name."""
    settings: dict[str, Any]
    """Settings of files and arguments, by name; later ones take precedence."""
    aside: dict[str, Any]
    """Content of files that configure the launcher."""


class Form(NamedTuple):
    """How a program takes its settings."""

    switches: Collection[str]
    """Settings that `--no_NAME` turns off."""
    commands: Collection[str] = ()
    """Names of the program's own commands, such as sft."""
    file_options: Collection[str] = ("config",)
    """Names of arguments whose value is a file of settings."""
    whole: Collection[str] | None = None
    """Dotted names of mappings that are one setting; None: every section is one setting."""
    is_aside: Callable[[Mapping[str, Any]], bool] = lambda content: False
    """Says whether a file configures the launcher."""


def read_settings(config: Translation, words: Sequence[str], form: Form) -> Given:
    """Reads files, arguments `--name value` and `name=value`; skips a launcher, and reports words that it cannot read.

    Raises:
        ConfigError: A file cannot be read, or the command line is empty.
    """
    whole = form.whole
    command, words = after_launcher(words, form.commands)
    by_name, before = options([word for word in words if word != "-"], lambda name: name.replace("-", "_"))
    settings: dict[str, Any] = {}
    aside: dict[str, Any] = {}
    for word in [*before, *(path for name in form.file_options for path in by_name.pop(name, []))]:
        content = _of_word(config, word, whole)
        (aside if form.is_aside(content) else settings).update(content)
    for name, values in by_name.items():
        pairs = [value for value in values[1:] if _is_pair(value)]  # words KEY=VALUE after the value of an argument
        for pair in pairs:
            settings.update(_of_word(config, pair, whole))
        values = [value for value in values if value not in pairs]
        if variables := [value for value in values if is_variable(value)]:
            config.wrong.append(f"--{name} {' '.join(variables)}: this is a shell variable; write its value")
            continue
        *parents, last = name.split(".")
        positive = ".".join([*parents, last.removeprefix("no_")])
        is_off = not values and name != positive and name not in form.switches and positive in form.switches
        settings[positive if is_off else name] = _argument(values) if values else not is_off
    if not settings and not config.wrong:
        raise ConfigError(f"neither a file nor an argument of {config.program} is given; give one")
    if whole is not None:
        settings = {name: _resolved(value, settings) for name, value in settings.items()}
    return Given(command, settings, aside)


def read_of(path: Path, program: str) -> dict[Any, Any]:
    """Reads a file of settings of `program`.

    Raises:
        ConfigError: The file cannot be read, or it is another program's.
    """
    content = read_mapping(path)
    if (message := refuse_other(path, content, program)) is not None:
        raise ConfigError(message)
    return content


def _is_pair(word: str) -> bool:
    return re.match(r"[a-z_][\w.]*=", word) is not None


def _argument(values: list[str]) -> Any:
    parsed = [scalar(value) if value[:1] in "{[" else value for value in values]
    return parsed[0] if len(parsed) == 1 else parsed


def _of_word(config: Translation, word: str, whole: Collection[str] | None) -> dict[str, Any]:
    """Reads a file, or one word `name=value`."""
    if word.endswith(ENDINGS) and not _is_pair(word):
        content = read_of(Path(word), config.program)
        return content if whole is None else dict(leaves(content, whole))
    name, separator, value = word.lstrip("+").partition("=")
    if separator and sets_environment(word):
        config.without_effect.append(name)
    elif is_variable(_REFERENCE.sub("", word)) or is_variable(_REFERENCE.sub("", value)):
        config.wrong.append(f"{word}: this is a shell variable; write its value")
    elif separator:
        return {name: scalar(value)} if whole is None else dict(leaves({name: scalar(value)}, whole))
    else:
        config.wrong.append(
            f"{word}: this is neither a file of settings ({', '.join(ENDINGS)}) nor an argument; fix it"
        )
    return {}


def leaves(section: Mapping[str, Any], whole: Collection[str], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields dotted names with their values; mappings in `whole` are values."""
    for name, value in section.items():
        if isinstance(value, Mapping) and value and f"{prefix}{name}" not in whole:
            yield from leaves(value, whole, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _resolved(value: Any, settings: Mapping[str, Any]) -> Any:
    """Resolves a value that is only a reference to another setting."""
    match = _REFERENCE.fullmatch(value) if isinstance(value, str) else None
    return value if match is None else settings.get(match[1], value)


def without_unknown(config: Translation, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings whose values are known; reports the others."""
    known: dict[str, Any] = {}
    for name, value in settings.items():
        if value == _MISSING:
            config.lost.append(f"{name}={value}: no value is given yet; write it")
        elif isinstance(value, str) and "${" in value:
            config.lost.append(f"{name}={value}: this refers to another value; write the value itself")
        else:
            known[name] = value
    return known


def comma_list(value: Any) -> list[Any]:
    """Returns the elements of a list, or of a text with commas between them."""
    if isinstance(value, list):
        return value
    return [part.strip() for part in str(value).split(",") if part.strip()]


def json_or_yaml(path: Path) -> Mapping[str, Any]:
    """Reads a file that another file names, such as DeepSpeed's; empty if it is missing.

    Raises:
        ConfigError: The file exists, but cannot be read.
    """
    return read_mapping(path) if path.is_file() else {}
