"""Options of other programs' command lines, without launchers."""

import re
from collections.abc import Callable, Collection, Iterable, Sequence

_LAUNCHERS = frozenset(("torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch"))
_VARIABLE = re.compile(r"[A-Z_][A-Z0-9_]*=")
_OPERATOR = re.compile(r"\d?>{1,2}(&\d|\S*)|&>{1,2}\S*|\|{1,2}|&{1,2}|;")
"""Words after which a shell begins something else, such as `2>&1 | tee log`."""
_OF_A_SHELL = re.compile(r"\$[\w{(@*]|^`")


def after_launcher(words: Iterable[str], commands: Collection[str] = ()) -> tuple[list[str], list[str]]:
    """Splits a command line where the arguments of the program begin; drops line continuations of a shell.

    Args:
        words: Words of a shell or script: `torchrun ... -m MODULE` or `VARIABLE=... python pretrain.py`, then
            arguments.
        commands: Names of the program's own commands, such as sft.

    Returns:
        Words that start the program, and its arguments.
    """
    kept = [word.strip() for word in words]
    kept = [word for word in kept if word and word != "\\"]
    ends = [number for number, word in enumerate(kept) if _OPERATOR.fullmatch(word)]
    kept = kept[: ends[0]] if ends else kept
    if not kept or not _is_of_launcher(kept[0], commands):
        return [], kept
    for number, word in enumerate(kept):
        is_module = number > 0 and kept[number - 1] == "-m" and word not in _LAUNCHERS
        is_script = word.endswith(".py") and not word.startswith("-") and "=" not in word
        if is_module or is_script or word in commands:
            return kept[: number + 1], kept[number + 1 :]
    return [], kept


def _is_of_launcher(word: str, commands: Collection[str]) -> bool:
    """Says whether the first word may begin a command, and is neither an argument nor a file of arguments."""
    is_argument = word.startswith("-") or word.endswith((".yaml", ".yml", ".json"))
    return word in commands or not (is_argument or ("=" in word and not is_of_environment(word)))


def is_of_environment(word: str) -> bool:
    """Says whether a word sets an environment variable, as in `CUDA_VISIBLE_DEVICES=0`."""
    return _VARIABLE.match(word) is not None


def is_variable(text: str) -> bool:
    """Says whether a word holds a shell's variable or command, whose value is unknown."""
    return _OF_A_SHELL.search(text) is not None


def options(words: Sequence[str], name_of: Callable[[str], str]) -> tuple[dict[str, list[str]], list[str]]:
    """Reads `--name value ...`, `--name=value` and `--name`; later ones take precedence.

    Args:
        name_of: Normalises the text after the hyphens to a name.

    Returns:
        Values by name, and the words before the first option.
    """
    given: dict[str, list[str]] = {}
    before: list[str] = []
    values = before
    for word in words:
        if word.startswith("--"):
            name, separator, value = word[2:].partition("=")
            values = given[name_of(name)] = [value] if separator else []
        else:
            values.append(word)
    return given, before
