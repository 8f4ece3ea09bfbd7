"""Arguments that several verbs share: the configuration of a run, a model, text files; sections of a help page."""

import functools
import inspect
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from mtrain.base.spelling import meant
from mtrain.cli.examples import EXAMPLES

if TYPE_CHECKING:
    from mtrain.config import Config

ConfigArguments = Annotated[
    list[str],
    typer.Argument(
        metavar="CONFIG... [section.key=value...]",
        help="YAML files, merged left to right, then single values.",
        show_default=False,
    ),
]
ModelArgument = Annotated[
    Path,
    typer.Argument(
        metavar="MODEL",
        help="A run folder, a checkpoint, an import, or a Hugging Face folder.",
        show_default=False,
    ),
]
TextInputs = Annotated[
    list[Path], typer.Argument(metavar="INPUT...", help="Text files, .jsonl files, folders.", show_default=False)
]
GlobOption = Annotated[str, typer.Option(help="Which files of a folder are read.")]
TextKeyOption = Annotated[str, typer.Option(help="Key of the text in JSONL.")]


def with_options(kind: type[Any], *names: str, **defaults: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Turns the fields of a data class into options of the command line, replacing a verb's parameter `options`.

    Only the fields in `names` become options if any are given; `defaults` override those of the data class.
    """

    def spread(verb: Callable[..., None]) -> Callable[..., None]:
        own = [each for each in inspect.signature(verb).parameters.values() if each.name != "options"]
        by_name, shared = inspect.Parameter.KEYWORD_ONLY, []
        for each in fields(kind):
            if names and each.name not in names:
                continue
            default = inspect.Parameter.empty if each.default is MISSING else defaults.get(each.name, each.default)
            shared.append(inspect.Parameter(each.name, by_name, default=default, annotation=each.type))

        @functools.wraps(verb)
        def called(**given: Any) -> None:
            verb(options=kind(**{each.name: given.pop(each.name) for each in shared}), **given)

        # typer reads the options from here; Python itself only calls by keyword, so the order does not matter to it
        called.__signature__ = inspect.Signature([*(each.replace(kind=by_name) for each in own), *shared])  # type: ignore[attr-defined]
        return called

    return spread


class Verbs(TyperGroup):
    """Command group that suggests the meant verb for an unknown one."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Resolves the verb; `args` follows the options of the group and is never empty."""
        name = args[0]
        if name not in self.commands and not name.startswith("-"):
            inner = [each for each in EXAMPLES if each.endswith(f" {name}")]
            known = [f"mtrain {each}" for each in inner] or [
                repr(near) for near in [meant(name, self.commands)] if near
            ]
            ctx.fail(f"No such command {name!r}." + (f" Did you mean {' or '.join(known)}?" if known else ""))
        return super().resolve_command(ctx, args)


def split_arguments(arguments: Sequence[str]) -> tuple[list[Path], list[str]]:
    """Separates files from overrides: an override contains `=` and names no existing file."""
    from mtrain.config.schema.bounds import can_be_a_path  # loads the whole schema, which `--help` does not need

    overrides = [text for text in arguments if "=" in text and not (can_be_a_path(text) and Path(text).exists())]
    return [Path(text) for text in arguments if text not in overrides], overrides


def loaded_config(
    arguments: Sequence[str], last_overrides: Sequence[str] = (), rank: int = 0, counts_epochs: bool = False
) -> "Config":
    """Loads the configuration of a command line; the first rank reports old names of keys.

    Under train.device=cpu GPUs are hidden from this process and its children.

    Args:
        last_overrides: Values that a verb sets itself; they override the user's.
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
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # megatron-core takes a GPU that it sees; read when CUDA starts
    if counts_epochs and config.train.num_epochs is not None:
        from mtrain.data.sources import with_num_steps  # numpy, which most configurations do without

        return with_num_steps(config)
    return config


class SectionedCommand(TyperCommand):
    """Lists options by their `rich_help_panel`, in plain lines; those without one come first."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        sections: dict[str, list[Any]] = {"Arguments": [], "Options": []}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)  # None if it is hidden
            title = "Arguments" if parameter.param_type_name == "argument" else "Options"
            if record is not None:
                sections.setdefault(getattr(parameter, "rich_help_panel", None) or title, []).append(record)
        for title, records in sections.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)
