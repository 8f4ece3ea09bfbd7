"""Arguments that verbs share (configuration, model, text files), and the layout of help pages."""

import functools
import inspect
import os
import re
import sys
import tomllib
import warnings
from collections.abc import Callable, Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from mtrain.base.spelling import meant, plain

if TYPE_CHECKING:
    from mtrain.config import Config

EXAMPLES: dict[str, str] = tomllib.loads(Path(__file__).with_name("examples.toml").read_text(encoding="utf-8"))
"""Verb or subcommand -> a shell line that calls it."""
TAKES_KEYS = "[section.key=value...]"
"""End of the metavar of an argument that takes `section.key=value`."""


def offered(incomplete: str) -> list[str]:
    """Returns the completions of an argument: YAML files, folders, and keys up to the next dot."""
    from mtrain.config.keys import described_keys  # here, because it loads the whole schema

    folder, _, begin = incomplete.rpartition("/")
    prefix = incomplete.removesuffix(begin)
    inside = Path(folder if folder or not prefix else prefix)
    entries = sorted(inside.iterdir()) if inside.is_dir() else []
    named = [entry for entry in entries if entry.name.startswith(begin) and (begin or not entry.name.startswith("."))]
    paths = [f"{prefix}{entry.name}/" for entry in named if entry.is_dir()]
    paths += [f"{prefix}{entry.name}" for entry in named if entry.suffix in (".yaml", ".yml")]
    keys = []
    for key in described_keys():
        if key.name.startswith(incomplete) and not re.search(r"\[\]|\bNAME\b", key.name):
            next_part, dot, _ = key.name[len(incomplete) :].partition(".")
            keys.append(f"{incomplete}{next_part}{'.' if dot or key.is_section else '='}")
    return [*paths, *dict.fromkeys(keys)]


ConfigArguments = Annotated[
    list[str],
    typer.Argument(
        metavar=f"CONFIG... {TAKES_KEYS}",
        help="YAML files, merged left to right, then individual values.",
        show_default=False,
        autocompletion=offered,
    ),
]


def folder_of(path: Path | None) -> Path | None:
    """Returns the folder of a config.json, since users may give the file instead; any other path as it is."""
    return path.parent if path is not None and path.name == "config.json" and path.is_file() else path


ModelArgument = Annotated[
    Path,
    typer.Argument(
        metavar="MODEL",
        help="A run folder, a checkpoint, an import, or a Hugging Face folder.",
        show_default=False,
        callback=folder_of,
    ),
]
TextInputs = Annotated[
    list[Path], typer.Argument(metavar="INPUT...", help="Text files, .jsonl files, folders.", show_default=False)
]
GlobOption = Annotated[str, typer.Option(help="Which files of a folder are read.")]
TextKeyOption = Annotated[str, typer.Option(help="Key of the text in JSONL.")]


def with_options(kind: type[Any], *names: str, **defaults: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Returns a decorator that replaces a verb's parameter `options` with command-line options for a data class's
    fields.

    If `names` are given, only these fields become options; `defaults` override the defaults of the data class.
    """

    def spread(verb: Callable[..., None]) -> Callable[..., None]:
        parameters = [item for item in inspect.signature(verb).parameters.values() if item.name != "options"]
        by_name, shared = inspect.Parameter.KEYWORD_ONLY, []
        for item in fields(kind):
            if names and item.name not in names:
                continue
            default = inspect.Parameter.empty if item.default is MISSING else defaults.get(item.name, item.default)
            shared.append(inspect.Parameter(item.name, by_name, default=default, annotation=item.type))

        @functools.wraps(verb)
        def called(**values: Any) -> None:
            verb(options=kind(**{option.name: values.pop(option.name) for option in shared}), **values)

        # typer reads the options from here, and calls by keyword, so the order does not matter
        keywords = [parameter.replace(kind=by_name) for parameter in parameters]
        called.__signature__ = inspect.Signature([*keywords, *shared])  # type: ignore[attr-defined]
        return called

    return spread


class Verbs(TyperGroup):
    """Command group that suggests a known verb for an unknown one, and lists its verbs by their first sentence."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        rows = [(name, verb.get_short_help_str(limit=1000)) for name, verb in self.commands.items()]
        with formatter.section("Commands"):
            formatter.write_dl(rows)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Resolves the verb; `args` follows the options of the group and is never empty."""
        name = args[0]
        if name not in self.commands and not name.startswith("-"):
            suggestions = [f"mtrain {verb}" for verb in EXAMPLES if verb.endswith(f" {name}")]
            if not suggestions and (near := meant(name, self.commands)):
                suggestions = [repr(near)]
            hint = f" Did you mean {' or '.join(suggestions)}?" if suggestions else ""
            ctx.fail(f"No such command {name!r}.{hint}")
        return super().resolve_command(ctx, args)


def split_arguments(arguments: Sequence[str]) -> tuple[list[Path], list[str]]:
    """Separates files from overrides: an override contains `=` and is not the path of an existing file."""
    from mtrain.config.schema.bounds import can_be_a_path  # here, because it loads the whole schema

    overrides = [text for text in arguments if "=" in text and not (can_be_a_path(text) and Path(text).exists())]
    return [Path(text) for text in arguments if text not in overrides], overrides


def loaded_config(
    arguments: Sequence[str], last_overrides: Sequence[str] = (), rank: int = 0, counts_epochs: bool = False
) -> "Config":
    """Loads the configuration of a command line; rank 0 reports old names of keys.

    With train.device=cpu, GPUs are hidden from this process and its children.

    Args:
        last_overrides: Overrides that the verb sets; they take precedence over the user's.
        counts_epochs: Whether to derive train.num_steps from train.num_epochs, which reads the data.
    """
    from mtrain.config.renamed import RenamedKeyWarning
    from mtrain.hf.configuration import load_config

    paths, overrides = split_arguments(arguments)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", RenamedKeyWarning)
        config = load_config(paths, [*overrides, *last_overrides])
    if rank == 0:
        for warning in caught:
            print(f"note: {warning.message}", file=sys.stderr, flush=True)
    if config.train.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # megatron-core would use a visible GPU; CUDA reads it when it starts
    if counts_epochs and config.train.num_epochs is not None:
        from mtrain.data.sources import with_num_steps  # here, because it loads numpy

        return with_num_steps(config)
    return config


class SectionedCommand(TyperCommand):
    """Lists options by their `rich_help_panel`, in plain lines; options without a panel come first.

    Explains how to write an option that is a key of the configuration.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        words = list(args)  # the parser empties the list
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            takes_keys = any(str(parameter.metavar).endswith(TAKES_KEYS) for parameter in self.params)
            option = getattr(error, "option_name", None)
            if not takes_keys or type(error).__name__ != "NoSuchOption" or option is None:
                raise
            if values := _as_values(option, words):
                ctx.fail(f"No such option: {option}; write {' or '.join(values)}")
            raise

    def format_options(self, ctx: Any, formatter: Any) -> None:
        sections: dict[str, list[Any]] = {"Arguments": [], "Options": []}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)  # None for a hidden option
            title = "Arguments" if parameter.param_type_name == "argument" else "Options"
            if record is not None:
                sections.setdefault(getattr(parameter, "rich_help_panel", None) or title, []).append(record)
        for title, records in sections.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)


def _as_values(option: str, arguments: Sequence[str]) -> list[str]:
    """Returns `section.key=value` for each key with an option's name, or a similar one; empty if no key matches."""
    from mtrain.config.keys import described_keys  # here, because it loads the whole schema

    at = next(index for index, argument in enumerate(arguments) if argument.startswith(option))
    name, has_value, value = arguments[at].partition("=")
    if not has_value:
        follower = next(iter(arguments[at + 1 :]), "")
        is_value = follower and not follower.startswith("--") and "=" not in follower and not Path(follower).is_file()
        value = follower if is_value else "..."
    key = plain(name)
    names = [each.name for each in described_keys() if not each.is_section and "[]" not in each.name]
    matching = [each for each in names if each == key or each.rpartition(".")[2] == key]
    if not matching and (near := meant(key, (each.rpartition(".")[2] for each in names))):
        matching = [each for each in names if each.rpartition(".")[2] == near]
    return [f"{each}={value}" for each in matching]
