"""`mtrain verify`: checks the promise on a user's configuration, machine, rollouts and layers of other libraries."""

import enum
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mtrain.base.environment import RankEnvironment
from mtrain.base.errors import ConfigError, UnfinishedError
from mtrain.base.files import disk_faults
from mtrain.base.ground import require_ground
from mtrain.base.log import output_console
from mtrain.cli.arguments import (
    TAKES_KEYS,
    ConfigArguments,
    ModelArgument,
    SectionedCommand,
    Verbs,
    loaded_config,
    offered,
    with_options,
)
from mtrain.cli.messages import one_message, one_verdict, this_rank

if TYPE_CHECKING:
    from mtrain.config import Config
    from mtrain.verify.core.result import Report
    from mtrain.verify.parity import Request

verify_app = typer.Typer(cls=Verbs, help="Checks the promise on your own configuration.", no_args_is_help=True)


class MachineDevice(enum.StrEnum):
    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


class RolloutDtype(enum.StrEnum):
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


def _list_injections(context: typer.Context, is_given: bool) -> None:
    """Prints the names of the verb's plantable faults, and exits."""
    if not is_given:
        return
    from mtrain.verify.planted.inject import BACKEND_FAULTS, FAULTS, MACHINE_FAULTS, PREEMPT_FAULTS, RESUME_FAULTS

    by_verb = {
        "backend": BACKEND_FAULTS,
        "machine": MACHINE_FAULTS,
        "preempt": PREEMPT_FAULTS,
        "resume": RESUME_FAULTS,
    }
    print(*(fault.name for fault in by_verb.get(context.info_name or "", FAULTS)), sep="\n")
    raise typer.Exit


@dataclass(frozen=True)
class VerifyOptions:
    """Options that all checks of runs share; each field is a command-line option."""

    layouts: Annotated[
        str | None, typer.Option(metavar="tp2cp2,pp4,...", help="Layouts instead of the derived ones.")
    ] = None
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps of each run.")] = 3
    max_ranks: Annotated[
        int, typer.Option(min=1, help="Largest number of ranks of a layout; each needs a GPU unless on CPUs.")
    ] = 8
    output: Annotated[
        Path | None,
        typer.Option(help="Folder for the report as JSON and HTML; by default the verb's name below run.dir."),
    ] = None
    inject: Annotated[
        str | None, typer.Option(metavar="NAME", help="Plant a known fault, which the check must find.")
    ] = None
    list_injections: Annotated[
        bool,
        typer.Option(
            "--list-injections", is_eager=True, callback=_list_injections, help="List the names for --inject."
        ),
    ] = False

    def request(self, at: int = 0) -> "Request":
        """Returns the request for a check; `at` is the update after which `verify resume` stops."""
        from mtrain.verify.parity import Request  # loads torch

        return Request(self.layouts, self.steps, self.max_ranks, self.inject, _command(), at)


@verify_app.command(cls=SectionedCommand)
@with_options(VerifyOptions, steps=3)
def parity(arguments: ConfigArguments, options: VerifyOptions) -> None:
    """Compares a small copy of the model under many layouts with one process in float64; exit 0 pass, 1 fail."""

    def run(config: "Config") -> "Report":
        from mtrain.verify.parity import verify_parity  # loads torch

        return verify_parity(config, options.request(), _show)

    _verify("parity", arguments, options, run)


@verify_app.command(cls=SectionedCommand)
@with_options(VerifyOptions, steps=6)
def resume(
    arguments: ConfigArguments,
    options: VerifyOptions,
    at: Annotated[int, typer.Option(min=1, help="Steps after which the run stops; fewer than --steps.")] = 3,
) -> None:
    """Stops and resumes a small copy of the run, also after a crash and on other layouts; exit 0 pass, 1 fail."""

    def run(config: "Config") -> "Report":
        from mtrain.verify.resume.run import verify_resume  # loads torch

        return verify_resume(config, options.request(at), _show)

    _verify("resume", arguments, options, run)


@verify_app.command(cls=SectionedCommand)
@with_options(VerifyOptions, steps=6)
def preempt(arguments: ConfigArguments, options: VerifyOptions) -> None:
    """Starts a small copy of the run in real processes and stops it by signals in every phase; exit 0 pass, 1 fail."""

    def run(config: "Config") -> "Report":
        from mtrain.verify.preempt import verify_preempt  # loads torch

        return verify_preempt(config, options.request(), _show)

    _verify("preempt", arguments, options, run)


@verify_app.command(cls=SectionedCommand)
@with_options(VerifyOptions, steps=5)
def hf(
    arguments: ConfigArguments,
    options: VerifyOptions,
    folder: Annotated[
        Path, typer.Option("--hf", help="Folder with config.json and *.safetensors, instead of model.hf.")
    ],
) -> None:
    """Trains the whole model in transformers and here from the same weights; exit 0 pass, 1 fail."""

    def run(config: "Config") -> "Report":
        from mtrain.verify.hf import verify_hf  # loads torch

        return verify_hf(config, options.request(), _show)

    start = (f"model.hf={json.dumps(str(folder))}", "checkpoint.initialize_from=null")
    _verify("hf", arguments, options, run, start)


@verify_app.command(cls=SectionedCommand)
@with_options(VerifyOptions, "output", "inject", "list_injections")
def backend(
    arguments: ConfigArguments,
    options: VerifyOptions,
    device: Annotated[str | None, typer.Option(help="auto, cpu or cuda instead of train.device.")] = None,
    certificates: Annotated[
        Path | None,
        typer.Option(
            help="Folder of the certificate; by default MTRAIN_CERTIFICATES, or certificates in the user's cache."
        ),
    ] = None,
    unless_certified: Annotated[
        bool,
        typer.Option("--unless-certified", help="End at once if these layers have a certificate for this machine."),
    ] = False,
) -> None:
    """Compares layers of TransformerEngine and torch.compile with ours and certifies them; exit 0 pass, 1 fail."""

    def run(config: "Config") -> "Report":
        from mtrain.base.certificate import certificate_folder
        from mtrain.verify.backend.run import known_certificate, verify_backend  # loads torch

        folder = certificate_folder() if certificates is None else certificates
        if unless_certified and (name := known_certificate(config, folder)):
            _show(f"certificate: {folder / name} covers these layers on this machine")
            raise typer.Exit
        outcome = verify_backend(config, options.request(), _show)
        if options.inject is None and outcome.certificate.candidates:
            _show(f"certificate: {outcome.certificate.save(folder)}")
        return outcome.report

    start = () if device is None else (f"train.device={device}",)
    _verify("backend", arguments, options, run, start)


@verify_app.command(cls=SectionedCommand)
@with_options(VerifyOptions, "inject", "list_injections")
def machine(
    options: VerifyOptions,
    device: Annotated[MachineDevice, typer.Option(help="Device of the ranks.")] = MachineDevice.AUTO,
    ranks: Annotated[
        int | None,
        typer.Option(min=2, max=16, help="Number of ranks; by default one for each GPU, up to 8, or 4 on CPUs."),
    ] = None,
    families: Annotated[
        str | None,
        typer.Option(metavar="NAME,...", help="Models of configs/model; by default one of each kind of layer."),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Check one model and fewer layouts.")] = False,
    output: Annotated[Path, typer.Option(help="Folder for the report as JSON and HTML.")] = Path("machine"),
) -> None:
    """Checks collectives, layouts and resuming on the GPUs of this node, and measures links; exit 0 pass, 1 fail."""
    with one_message(this_rank()), one_verdict(machine.__name__) as target:
        target.folder = output
        require_ground()
        if RankEnvironment.from_environ(os.environ).world_size > 1:
            raise ConfigError(
                "verify machine starts a rank for each GPU itself; call it once, without torchrun or srun"
            )
        with disk_faults(f"write {output}"):  # fails now instead of after minutes of checks
            output.mkdir(parents=True, exist_ok=True)
        if device is MachineDevice.CPU:
            os.environ["CUDA_VISIBLE_DEVICES"] = (
                ""  # megatron-core would use a visible GPU; CUDA reads it when it starts
            )
        from mtrain.verify.machine.run import MachineRequest, verify_machine  # loads torch

        report = verify_machine(MachineRequest(device.value, ranks, families, quick, options.inject), _show)
        _show_report(report, output)
    raise typer.Exit(report.exit_code)


@verify_app.command(cls=SectionedCommand)
def rollout(
    model: ModelArgument,
    rollouts: Annotated[
        Path, typer.Option(help="JSON lines with prompts, token ids and log-probabilities of the inference engine.")
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar=TAKES_KEYS,
            help="Changes to the run's configuration, such as layout.ep=1.",
            show_default=False,
            autocompletion=offered,
        ),
    ] = None,
    dtype: Annotated[RolloutDtype | None, typer.Option(help="Precision of the engine; by default the run's.")] = None,
    weights: Annotated[
        list[Path] | None,
        typer.Option(help="Another model whose weights the engine may have used; repeatable."),
    ] = None,
    first: Annotated[int, typer.Option(min=1, help="Number of rollouts to compare, from the first.")] = 64,
    max_ranks: Annotated[int, typer.Option(min=1, help="Largest number of ranks of the layout.")] = 8,
    output: Annotated[
        Path | None, typer.Option(help="Folder for the report; by default verify-rollout next to the rollouts.")
    ] = None,
) -> None:
    """Compares log-probabilities of an inference engine and the trainer with float64; exit 0 pass, 1 fail."""
    folder = rollouts.parent / "verify-rollout" if output is None else output
    with one_message(), one_verdict(rollout.__name__) as target:
        target.folder = folder
        require_ground()
        from mtrain.verify.rollout.report import lines_of, write_rollout_report  # loads torch
        from mtrain.verify.rollout.run import RolloutRequest, verify_rollout

        settings = (model, rollouts, overrides or [], None if dtype is None else dtype.value, weights or [], first)
        report = verify_rollout(RolloutRequest(*settings, max_ranks=max_ranks, command=_command()), _show)
        write_rollout_report(report, folder)
        for line in lines_of(report, folder):
            _show(line)
    raise typer.Exit(0 if report.passed else 1)


def _verify(
    verb: str,
    arguments: Sequence[str],
    options: VerifyOptions,
    run: Callable[["Config"], "Report"],
    last_overrides: Sequence[str] = (),
) -> None:
    """Loads the configuration, runs a check, writes and prints its report, and exits with 0 pass or 1 fail."""
    with one_message(), one_verdict(verb) as target:
        require_ground()
        config = loaded_config(arguments, last_overrides)
        if config.train.num_epochs is not None:
            from mtrain.data.sources import with_num_steps  # here, because it loads numpy
            from mtrain.verify.core.shrink import has_files

            config = with_num_steps(config, counts=has_files(config.data))
        if verb != backend.__name__:
            config = on_several_ranks(config, options.max_ranks)
        target.folder = folder = Path(config.run.dir) / verb if options.output is None else options.output
        report = run(config)
        _show_report(report, folder)
    raise typer.Exit(report.exit_code)


def _show_report(report: "Report", folder: Path) -> None:
    """Writes and prints a report; raises UnfinishedError if it has no verdict."""
    from mtrain.verify.report.print import print_report, write_report  # loads torch

    write_report(report, folder)
    print_report(report, folder, output_console(260))
    if report.exit_code > 1:
        unfinished = UnfinishedError(f"{report.unfinished}; {folder / report.text.json_name} says why")
        unfinished.exit_code = report.exit_code
        raise unfinished


def on_several_ranks(config: "Config", max_ranks: int) -> "Config":
    """Moves a check to CPUs on a machine with one GPU: train.device=auto would use it with one rank, and no layouts
    would be compared."""
    if config.train.device != "auto" or max_ranks == 1:
        return config
    import torch

    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # counts GPUs without starting CUDA
    if torch.cuda.device_count() != 1:
        return config
    _show("note: ranks run on CPUs, since a single GPU has only one rank; train.device=cuda checks that rank")
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    return config.model_copy(update={"train": config.train.model_copy(update={"device": "cpu"})})


def _command() -> str:
    return " ".join(["mtrain", *sys.argv[1:]])


def _show(line: str) -> None:
    print(line, flush=True)
