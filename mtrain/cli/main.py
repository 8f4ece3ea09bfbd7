"""The command line: parses, calls one function, and turns errors into one message and an exit code."""

import json
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mtrain.base.environment import RankEnvironment
from mtrain.base.errors import MtrainError
from mtrain.cli.check import print_plan
from mtrain.config import Config
from mtrain.config.load import load_config
from mtrain.config.renamed import RenamedKeyWarning
from mtrain.config.schema.bounds import can_be_a_path
from mtrain.launch.local import launch_local
from mtrain.plan.layout import Layout
from mtrain.verify.planted.inject import NAMES
from mtrain.verify.resume.inject import RESUME_NAMES

if TYPE_CHECKING:
    from mtrain.verify.core.result import Report

app = typer.Typer(
    help="Pretrains and finetunes language models on Megatron-Core; the layout does not change the run.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
launch_app = typer.Typer(help="Starts the ranks of a run.", no_args_is_help=True)
app.add_typer(launch_app, name="launch")
verify_app = typer.Typer(help="Checks the promise on your own configuration.", no_args_is_help=True)
app.add_typer(verify_app, name="verify")

ConfigArguments = Annotated[
    list[str],
    typer.Argument(
        metavar="CONFIG... [section.key=value...]",
        help="YAML files, merged left to right, then single values.",
        show_default=False,
    ),
]


@app.command()
def train(arguments: ConfigArguments) -> None:
    """Trains as one rank: under torchrun, under srun, or alone."""
    with one_message(), prefixed_traceback():
        paths, overrides = split_arguments(arguments)
        world_size = RankEnvironment.from_environ(os.environ).world_size
        config = _loaded(paths, overrides)
        Layout.from_config(config, world_size)
        from mtrain.training.trainer import (
            train as run_training,  # loads torch, after the configuration is known to be right
        )

        run_training(config)


@app.command()
def check(
    arguments: ConfigArguments,
    world_size: Annotated[int, typer.Option(min=1, help="Ranks that the run will have.", show_default=False)],
) -> None:
    """Checks a configuration and prints layout, batch, parameters, FLOPs and memory; loads no torch."""
    with one_message():
        paths, overrides = split_arguments(arguments)
        print_plan(_loaded(paths, overrides), world_size)


@launch_app.command()
def local(
    arguments: ConfigArguments,
    num_ranks: Annotated[int, typer.Option("-n", "--num-ranks", min=1, help="Ranks to start.", show_default=False)],
) -> None:
    """Trains with several ranks on this machine."""
    with one_message():
        paths, overrides = split_arguments(arguments)
        code = launch_local(num_ranks, paths, overrides)
    raise typer.Exit(code)


@app.command()
def compare(
    run_a: Annotated[Path, typer.Argument(metavar="RUN_A", help="Run folder.", show_default=False)],
    run_b: Annotated[Path, typer.Argument(metavar="RUN_B", help="The other one.", show_default=False)],
    rtol: Annotated[
        float | None,
        typer.Option(
            help="Relative difference that counts as equal; by default 1e-5, more in bf16 and fp16.", show_default=False
        ),
    ] = None,
    output: Annotated[Path, typer.Option(help="Folder for compare.html and compare.png.")] = Path(),
) -> None:
    """Compares two runs: what differs, and from which step and quantity on; exit 0 equal, 1 divergent."""
    with one_message():
        from mtrain.compare.report import report_comparison

        is_equal = report_comparison(run_a, run_b, rtol, output)
    raise typer.Exit(0 if is_equal else 1)


def _listing(names: Sequence[str]) -> Callable[[bool], None]:
    def list_names(wanted: bool) -> None:
        if wanted:
            print(*names, sep="\n")
            raise typer.Exit

    return list_names


LayoutsOption = Annotated[
    str | None, typer.Option(metavar="tp2cp2,pp4,...", help="Layouts instead of the derived ones.")
]
MaxRanksOption = Annotated[int, typer.Option(min=1, help="Most ranks of a layout; on GPUs, one each.")]
InjectOption = Annotated[str | None, typer.Option(metavar="NAME", help="Plants a known fault, to see it found.")]


@verify_app.command()
def parity(
    arguments: ConfigArguments,
    layouts: LayoutsOption = None,
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps of each layout.")] = 3,
    max_ranks: MaxRanksOption = 8,
    output: Annotated[
        Path | None, typer.Option(help="Folder for parity.json and parity.html; by default run.dir/parity.")
    ] = None,
    inject: InjectOption = None,
    list_injections: Annotated[
        bool,
        typer.Option("--list-injections", is_eager=True, callback=_listing(NAMES), help="Names for --inject."),
    ] = False,
) -> None:
    """Runs a small copy of the model under many layouts against one process in float64; exit 0 pass, 1 fail."""

    def run(config: Config) -> "Report":
        from mtrain.verify.parity.run import Request, verify_parity  # loads torch

        return verify_parity(config, Request(layouts, steps, max_ranks, inject, _command_line()), _tell)

    _verify("parity", arguments, output, run)


@verify_app.command()
def resume(
    arguments: ConfigArguments,
    layouts: LayoutsOption = None,
    steps: Annotated[int, typer.Option(min=2, help="Optimizer steps of the straight run.")] = 6,
    at: Annotated[int, typer.Option(min=1, help="Steps after which the run stops.")] = 3,
    max_ranks: MaxRanksOption = 8,
    output: Annotated[
        Path | None, typer.Option(help="Folder for resume.json and resume.html; by default run.dir/resume.")
    ] = None,
    inject: InjectOption = None,
    list_injections: Annotated[
        bool,
        typer.Option("--list-injections", is_eager=True, callback=_listing(RESUME_NAMES), help="Names for --inject."),
    ] = False,
) -> None:
    """Stops a small copy of the run and resumes it, after a crash and on other layouts too; exit 0 pass, 1 fail."""

    def run(config: Config) -> "Report":
        from mtrain.verify.resume.run import ResumeRequest, verify_resume  # loads torch

        return verify_resume(config, ResumeRequest(layouts, steps, max_ranks, inject, _command_line(), at), _tell)

    _verify("resume", arguments, output, run)


@verify_app.command()
def hf(
    arguments: ConfigArguments,
    folder: Annotated[
        Path, typer.Option("--hf", help="Folder with config.json and *.safetensors; instead of model.hf.")
    ],
    layouts: LayoutsOption = None,
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps of each run.")] = 5,
    max_ranks: MaxRanksOption = 8,
    output: Annotated[Path | None, typer.Option(help="Folder for hf.json and hf.html; by default run.dir/hf.")] = None,
    inject: InjectOption = None,
    list_injections: Annotated[
        bool,
        typer.Option("--list-injections", is_eager=True, callback=_listing(NAMES), help="Names for --inject."),
    ] = False,
) -> None:
    """Trains the whole model in transformers and here from the same weights; exit 0 pass, 1 fail."""

    def run(config: Config) -> "Report":
        from mtrain.verify.hf.run import verify_hf  # loads torch
        from mtrain.verify.parity.run import Request

        return verify_hf(config, Request(layouts, steps, max_ranks, inject, _command_line()), _tell)

    start = (f"model.hf={json.dumps(str(folder))}", "checkpoint.initialize_from=null")
    _verify("hf", arguments, output, run, start)


def _verify(
    verb: str,
    arguments: Sequence[str],
    output: Path | None,
    run: Callable[[Config], "Report"],
    last_overrides: Sequence[str] = (),
) -> None:
    """Reads the configuration, runs a verification, writes and prints its report; exit 0 pass, 1 fail."""
    with one_message(), prefixed_traceback():
        paths, overrides = split_arguments(arguments)
        config = _loaded(paths, [*overrides, *last_overrides])
        from mtrain.verify.report.print import console, print_report, write_report  # loads torch

        folder = Path(config.run.dir) / verb if output is None else output
        report = run(config)
        write_report(report, folder)
        print_report(report, folder, console())
    raise typer.Exit(0 if report.passed else 1)


def _command_line() -> str:
    return " ".join(["mtrain", *sys.argv[1:]])


def _tell(line: str) -> None:
    print(line, flush=True)


@launch_app.callback()
def _launch() -> None:
    """Keeps `local` a verb of its own, though it is the only one."""


def split_arguments(arguments: Sequence[str]) -> tuple[list[Path], list[str]]:
    """Tells files from overrides: an override holds `=` and names no existing file."""
    overrides = [text for text in arguments if "=" in text and not (can_be_a_path(text) and Path(text).exists())]
    return [Path(text) for text in arguments if text not in overrides], overrides


def _loaded(paths: Sequence[Path], overrides: Sequence[str]) -> Config:
    """The configuration; its old names are noted on the first rank."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", RenamedKeyWarning)
        config = load_config(paths, overrides)
    if _rank() == 0:
        for warning in caught:
            print(f"note: {warning.message}", file=sys.stderr, flush=True)
    return config


@contextmanager
def one_message() -> Iterator[None]:
    """Ends the program with the error's exit code, and its message where this rank is the one to show it."""
    try:
        yield
    except MtrainError as error:
        rank = _rank()
        if rank == 0 or not error.on_every_rank:
            print(f"error: {'' if rank == 0 else f'[rank {rank}] '}{error}", file=sys.stderr, flush=True)
        raise typer.Exit(error.exit_code) from None
    except KeyboardInterrupt:
        raise typer.Exit(128 + signal.SIGINT) from None


@contextmanager
def prefixed_traceback() -> Iterator[None]:
    """Shows the traceback of what was not foreseen, each line with the rank, since the ranks' lines may mix."""
    try:
        yield
    except MtrainError:
        raise
    except Exception:
        lines = traceback.format_exc().splitlines()
        print("\n".join(f"[rank {_rank()}] {line}" for line in lines), file=sys.stderr, flush=True)
        raise typer.Exit(1) from None


def _rank() -> int:
    """This rank for messages, even where the environment is not fit for a run."""
    text = os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0"))
    return int(text) if text.isdecimal() else 0
