"""`mtrain from`: translates configurations of other programs."""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mtrain.cli.arguments import Verbs
from mtrain.cli.messages import one_message

if TYPE_CHECKING:
    from mtrain.config.foreign.translation import Translation

from_app = typer.Typer(
    cls=Verbs,
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Translates configurations of other programs, and lists what could not be carried over.",
)
_OfOthers = {"ignore_unknown_options": True, "allow_interspersed_args": False}
_Output = Annotated[
    Path | None,
    typer.Option(help="File to write, which must not exist; by default, the result is printed.", show_default=False),
]
_Arguments = Annotated[list[str], typer.Argument(metavar="ARGS...", help="Arguments of its command line.")]
_FilesAndArguments = Annotated[
    list[str],
    typer.Argument(metavar="FILE|ARGS...", help="Files and command-line arguments of the program; later ones win."),
]


@from_app.command("megatron-lm", context_settings=_OfOthers)
def megatron_lm(arguments: _Arguments, output: _Output = None) -> None:
    """Translates the arguments of Megatron-LM's pretrain_gpt.py, including defaults that differ; lists arguments that
    could not be carried over or have no effect."""
    from mtrain.config.foreign.megatron_lm import from_megatron_lm

    _write_words(from_megatron_lm, arguments, output)


@from_app.command("ms-swift", context_settings=_OfOthers)
def ms_swift(arguments: _Arguments, output: _Output = None) -> None:
    """Translates the arguments of ms-swift's `megatron sft`."""
    from mtrain.config.foreign.ms_swift import from_ms_swift

    _write_words(from_ms_swift, arguments, output)


@from_app.command("axolotl", context_settings=_OfOthers)
def axolotl(arguments: _FilesAndArguments, output: _Output = None) -> None:
    """Translates a configuration file of axolotl, and arguments that override it."""
    from mtrain.config.foreign.axolotl import from_axolotl

    _write_words(from_axolotl, arguments, output)


@from_app.command("verl", context_settings=_OfOthers)
def verl(
    arguments: Annotated[
        list[str], typer.Argument(metavar="FILE|KEY=VALUE...", help="Its YAML files and arguments; later ones win.")
    ],
    output: _Output = None,
) -> None:
    """Translates files and arguments of verl's SFT trainer, or of the actor of its RL loops."""
    from mtrain.config.foreign.verl import from_verl

    _write_words(from_verl, arguments, output)


@from_app.command("llamafactory", context_settings=_OfOthers)
def llamafactory(arguments: _FilesAndArguments, output: _Output = None) -> None:
    """Translates files (YAML, JSON) and arguments of LLaMA-Factory; reads dataset_info.json if it is in dataset_dir."""
    from mtrain.config.foreign.llamafactory import from_llamafactory

    _write_words(from_llamafactory, arguments, output)


@from_app.command("trl", context_settings=_OfOthers)
def trl(arguments: _FilesAndArguments, output: _Output = None) -> None:
    """Translates files (YAML, JSON) and arguments of TRL's trainers sft, dpo, kto, reward, orpo, cpo (SimPO) and grpo,
    or of transformers' Trainer (trainer). The trainer's name comes first; a file of accelerate can follow."""
    from mtrain.config.foreign.trl import from_trl

    _write_words(from_trl, arguments, output)


@from_app.command("megatron-bridge", context_settings=_OfOthers)
def megatron_bridge(arguments: _FilesAndArguments, output: _Output = None) -> None:
    """Translates a recipe of Megatron-Bridge, given by its name, YAML files that override its ConfigContainer, and
    arguments section.key=value."""
    from mtrain.config.foreign.megatron_bridge import from_megatron_bridge

    _write_words(from_megatron_bridge, arguments, output)


@from_app.command("torchtitan", context_settings=_OfOthers)
def torchtitan(arguments: _FilesAndArguments, output: _Output = None) -> None:
    """Translates TOML files and arguments of torchtitan up to version 0.2."""
    from mtrain.config.foreign.torchtitan import from_torchtitan

    _write_words(from_torchtitan, arguments, output)


def _write_words(translate: Callable[[Sequence[str]], "Translation"], words: list[str], output: Path | None) -> None:
    """Writes a translation of words, which may contain --output; none of the programs has such an argument."""
    if "--output" in words[:-1]:
        index = words.index("--output")
        words, output = [*words[:index], *words[index + 2 :]], Path(words[index + 1])
    _write(lambda: translate(words), output)


def _write(translate: Callable[[], "Translation"], output: Path | None) -> None:
    with one_message():
        from mtrain.base.errors import ConfigError
        from mtrain.base.files import disk_faults, write_atomically
        from mtrain.hf.configuration import resolved

        if output is not None and output.exists():
            raise ConfigError(f"{output} already exists; name another file")
        translation = translate().checked(resolved)
        text = "".join(f"{line}\n" for line in translation.lines())
        if output is None:
            typer.echo(text, nl=False)
            return
        with disk_faults(f"write {output}"):
            write_atomically(output, text)
    for line in (*translation.lost, *translation.notes):
        print(f"note: {line}", file=sys.stderr)
    for line in translation.missing:
        print(f"to be completed: {line}", file=sys.stderr)
    print(f"wrote {output}; read it, then run: mtrain check {output} --world-size N", flush=True)
