"""Command line and its verbs. A verb's module is imported only when the verb is called, so help is fast."""

from dataclasses import dataclass
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.main import get_command

from mtrain.base.log import show_lines
from mtrain.base.version import __version__
from mtrain.cli.arguments import EXAMPLES, SectionedCommand, Verbs


@dataclass(frozen=True)
class Verb:
    target: str
    """`module:name` below `mtrain.cli`: a function, or a typer application if the verb has subcommands."""
    summary: str
    """Line of `mtrain --help`; `mtrain VERB --help` shows the docstring."""


VERBS = {
    "Runs": {
        "init": Verb("init:init", "Copies the shipped configurations, launch scripts and examples."),
        "plan": Verb("plan:plan", "Ranks the layouts that fit by predicted step time."),
        "config": Verb("config:config", "Explains keys, or prints merged files with the origin of each value."),
        "check": Verb("check:check", "Checks a configuration; prints layout, parameters and memory."),
        "train": Verb("ranks:train", "Trains as one rank: under torchrun, under srun, or alone."),
        "serve": Verb("ranks:serve", "Serves a model to clients that train it and sample from it."),
        "launch": Verb("launch.app:launch_app", "Starts the ranks of a run: here, on Slurm or on Kubernetes."),
        "status": Verb("pages:status", "Shows the state of running and finished runs."),
        "report": Verb("pages:report", "Writes one HTML file on a run."),
        "plot": Verb("pages:plot", "Draws losses and the gradient norm over steps."),
    },
    "Checks": {
        "compare": Verb("pages:compare", "Shows where runs differ, and from which step."),
        "verify": Verb("verify:verify_app", "Checks the promise on your own configuration."),
        "show-batch": Verb("show_batch:show_batch", "Shows the samples of a step, token by token."),
    },
    "From elsewhere": {
        "from": Verb("migrate:from_app", "Translates configurations of other programs."),
    },
    "Text": {
        "stdlib-corpus": Verb("text:stdlib_corpus", "Builds a small corpus to try training on."),
        "train-tokenizer": Verb("text:train_tokenizer", "Trains a tokenizer that can encode every text."),
        "tokenize": Verb("text:tokenize", "Writes Megatron's .bin/.idx pair from text."),
    },
    "Weights": {
        "convert": Verb("convert:convert_app", "Converts between Hugging Face models and checkpoints."),
        "inspect": Verb("inspect:inspect_app", "Inspects, compares and verifies checkpoints."),
        "generate": Verb("ranks:generate", "Continues prompts, or answers them."),
        "eval": Verb("ranks:evaluate", "Evaluates a model on tasks of lm-eval."),
    },
}
"""Group of the help page -> its verbs."""


class _Program(Verbs):
    """Command group that imports only the called verb, and lists verbs in groups."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands: Any = {name: verb for verbs in VERBS.values() for name, verb in verbs.items()}

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in self.commands:
            return None
        module, _, attribute = self.commands[cmd_name].target.partition(":")
        loaded = getattr(import_module(f"mtrain.cli.{module}"), attribute)
        alone = _plain_app()
        alone.callback()(lambda: None)  # otherwise typer would make the only command the program itself
        if isinstance(loaded, typer.Typer):
            alone.add_typer(loaded, name=cmd_name)
        else:
            alone.command(cmd_name, cls=SectionedCommand)(loaded)
        group: Any = get_command(alone)
        _show_examples(group.commands[cmd_name], cmd_name)
        return group.commands[cmd_name]

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        widest = max(map(len, self.commands))
        for title, verbs in VERBS.items():
            with formatter.section(title):
                # the same width in all groups
                formatter.write_dl([(name.ljust(widest), verb.summary) for name, verb in verbs.items()])


def _show_examples(command: Any, name: str) -> None:
    """Ends the help of a verb, and of its subcommands, with an example."""
    inner = getattr(command, "commands", {})
    example = EXAMPLES[f"{name} {next(iter(inner))}" if inner else name]
    command.epilog = f"Example:\n\n\b\n{example}"  # on one line of any length, to be copied
    for verb in inner:
        _show_examples(inner[verb], f"{name} {verb}")


def _plain_app(add_completion: bool = False, **settings: Any) -> typer.Typer:
    """Returns an app with help and errors in plain lines, since importing rich takes longer than everything else."""
    return typer.Typer(rich_markup_mode=None, add_completion=add_completion, pretty_exceptions_enable=False, **settings)


app = _plain_app(
    add_completion=True,
    cls=_Program,
    no_args_is_help=True,
    epilog="mtrain VERB --help shows an example.",
    context_settings={"help_option_names": ["-h", "--help"]},  # verbs inherit them
)


def _print_version(is_given: bool) -> None:
    if is_given:
        typer.echo(f"mtrain {__version__}")
        raise typer.Exit


_Version = Annotated[
    bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
]


@app.callback()
def _program(version: _Version = False) -> None:
    """Pretrains and finetunes language models on Megatron-Core; the layout does not change the run."""
    show_lines()
