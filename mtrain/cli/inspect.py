"""`mtrain inspect`: inspects checkpoints of mtrain, Megatron-LM and Megatron-Bridge."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mtrain.base.errors import DataError
from mtrain.base.log import output_console
from mtrain.base.spelling import counted
from mtrain.cli.arguments import Verbs, folder_of
from mtrain.cli.messages import one_message

if TYPE_CHECKING:
    from rich.table import Table

    from mtrain.data.ledger import Ledger


class _ShowUnlessNamed(Verbs):
    """Command group with the default verb `show`, if the first argument is a path."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Resolves the verb; `args` follows the options of the group and is never empty."""
        return super().resolve_command(ctx, args if args[0] in self.commands else ["show", *args])


inspect_app = typer.Typer(
    cls=_ShowUnlessNamed,
    help="Inspects checkpoints of mtrain, Megatron-LM and Megatron-Bridge. PATH is a checkpoint, or a run folder for "
    "its newest good checkpoint. PATH without a command means show PATH.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
_MOST_LINES = 20

PathArgument = Annotated[Path, typer.Argument(metavar="PATH", show_default=False, callback=folder_of)]


@inspect_app.command()
def show(path: PathArgument) -> None:
    """Shows the contents; the command can be omitted."""
    with one_message():
        from mtrain.checkpoint.store.diff import contents_of, described, size_bytes, totals  # loads torch

        contents = contents_of(path)
        for warning in contents.warnings:
            print(f"warning: {warning}", file=sys.stderr)
        for name, value in described(contents).items():
            print(f"{name:<15}{value}")
        for (group, dtype), total in totals(contents).items():
            shown = (
                f"{counted(total.num_tensors, 'tensor')}, {total.num_elements:,} elements, {_size(total.size_bytes)}"
            )
            print(f"{group:<15}{dtype}: {shown}")
        table = _table("tensor", "dtype", "shape", "size", "slices")
        for key, tensor in sorted(contents.tensors.tensors.items()):
            shape = " x ".join(map(str, tensor.shape)) or "scalar"
            dtype = str(tensor.dtype).removeprefix("torch.")
            table.add_row(key, dtype, shape, _size(size_bytes(tensor)), str(len(tensor.slices)))
        output_console().print(table)


@inspect_app.command()
def diff(
    a: Annotated[Path, typer.Argument(metavar="A", show_default=False)],
    b: Annotated[Path, typer.Argument(metavar="B", show_default=False)],
    worst: Annotated[int, typer.Option(min=1, help="Tensors to list.")] = 20,
) -> None:
    """Compares two checkpoints, which any layouts may have saved."""
    with one_message():
        from mtrain.checkpoint.store.diff import contents_of, differences

        result = differences(contents_of(a), contents_of(b))
        for key in result.missing:
            print(f"only in {a}: {key}")
        for key in result.extra:
            print(f"only in {b}: {key}")
        for key, ours, theirs in result.misshaped:
            print(f"shapes differ: {key}: {list(ours)} and {list(theirs)}")
        for key in result.left_out:
            print(f"not compared: {key}, which belongs to another number of ranks")
        table = _table("tensor", "dtypes", "differing", "largest difference", "relative")
        differing = [tensor for tensor in result.compared if tensor.num_differing or len({*tensor.dtypes}) > 1]
        for tensor in differing[:worst]:
            share = f"{tensor.num_differing:,} of {tensor.num_elements:,}"
            dtypes = ", ".join(dict.fromkeys(tensor.dtypes))
            table.add_row(tensor.key, dtypes, share, f"{tensor.largest_difference:.3e}", f"{tensor.relative:.3e}")
        if table.row_count:
            output_console().print(table)
        same = sum(tensor.num_differing == 0 for tensor in result.compared)
        print(
            f"{'equal' if result.is_equal else 'different'}: {same} of "
            f"{counted(len(result.compared), 'common tensor')} {'is' if same == 1 else 'are'} equal"
        )
    raise typer.Exit(0 if result.is_equal else 1)


@inspect_app.command()
def verify(path: PathArgument) -> None:
    """Reads every file and compares it with the manifest."""
    with one_message():
        from mtrain.checkpoint.store.diff import contents_of
        from mtrain.checkpoint.store.directory import CheckpointEntry, verify_files

        contents = contents_of(path)
        if contents.manifest is None:
            raise DataError(f"{contents.folder} was written by another program and has no checksums to compare with")
        files = contents.manifest.files
        verify_files(CheckpointEntry(contents.folder, contents.manifest), files, os.cpu_count() or 1)
        size = _size(sum(facts.size_bytes for facts in files.values()))
        print(f"verified {contents.folder}: {counted(len(files), 'file')}, {size}, every byte as saved")


@inspect_app.command()
def data(
    run: Annotated[Path, typer.Argument(metavar="RUN", show_default=False)],
    step: Annotated[int | None, typer.Option(min=1, help="List the samples of one step.")] = None,
    source: Annotated[str | None, typer.Option(help="Path of the only source of data.train to list.")] = None,
) -> None:
    """Lists a run's samples, by source and epoch or of one step, and whether any was repeated or lost."""
    with one_message():
        from mtrain.data.ledger import Ledger  # loads numpy
        from mtrain.runs.folder import RunFolder

        ledger = Ledger(RunFolder(run).ledger)
        is_sound = _print_step(ledger, step, source) if step is not None else _print_epochs(ledger, source)
    raise typer.Exit(0 if is_sound else 1)


def _print_step(ledger: Ledger, step: int, source: str | None) -> bool:
    from mtrain.config.derived import phase_number
    from mtrain.data.ledger import ranges

    entry, start = ledger.step(step), ledger.start_of(step)
    names = start.sources
    print(
        f"step {step}: digest of the trained samples {entry.digest:016x}, read by "
        f"{counted(len(ledger.steps[step]), 'rank')}"
    )
    if number := phase_number(start.phases, step):
        print(f"phase {number} of the curriculum, {start.phases[number - 1]}")
    if entry.skipped:
        print("the step was skipped: it made no update")
    for part in entry.sources:
        if source in (None, names[part.source]):
            counts = (
                f"{counted(len(part.ids), 'sample')}, {counted(part.tokens, 'token', ',')}, {part.loss_tokens:,} in "
                "the loss"
            )
            print(f"{names[part.source]}, epoch {part.epoch}: {counts}\n  {ranges(part.ids)}")
    return True


def _print_epochs(ledger: Ledger, source: str | None) -> bool:
    for number, phase in enumerate(ledger.phase_totals(), start=1):
        total = sum(phase.samples.values())
        print(
            f"phase {number}, steps {phase.phase.from_step + 1} to {phase.last_step}: {counted(total, 'sample', ',')}"
        )
        for name in sorted(phase.phase.shares.keys() | phase.samples.keys()):
            count, share = phase.samples.get(name, 0), phase.phase.shares.get(name, 0.0)
            print(f"  {name}: {count:,}, {count / max(1, total):.2%} of them; {share:.2%} requested")
    epochs = [epoch for epoch in ledger.epochs() if source in (None, epoch.source)]
    table = _table("source", "epoch", "samples", "of", "tokens", "in the loss", "repeated", "lost")
    for epoch in epochs:
        counts = (epoch.samples, epoch.size, epoch.tokens, epoch.loss_tokens, len(epoch.repeated), epoch.lost)
        table.add_row(epoch.source, str(epoch.epoch), *("-" if count is None else f"{count:,}" for count in counts))
    output_console().print(table)
    incomplete = ledger.incomplete_steps()
    for number, words in [*incomplete.items()][:_MOST_LINES]:
        print(f"step {number} {words}")
    if skipped := ledger.skipped_steps():
        shown = ", ".join(map(str, skipped[:_MOST_LINES])) + (", ..." if len(skipped) > _MOST_LINES else "")
        print(f"read and skipped, without an update: steps {shown}")
    for epoch in epochs:
        if epoch.repeated:
            print(f"{epoch.source}, epoch {epoch.epoch}: repeated {list(epoch.repeated[:_MOST_LINES])}")
    if unread := ledger.unread_of_window():
        print(f"windows span the ends of epochs: {counted(unread, 'sample', ',')} of the last window still to be read")
    is_sound = not incomplete and not any(epoch.repeated or epoch.lost for epoch in epochs)
    verdict = "each sample of an epoch once" if is_sound else "samples were repeated or lost"
    print(f"{counted(max(ledger.steps), 'step')}: {verdict}")
    return is_sound


def _table(*columns: str) -> Table:
    from rich.table import Table

    table = Table(*columns, pad_edge=False)
    if not output_console().is_terminal:
        table.box = None
    return table


def _size(size_bytes: int) -> str:
    units = ("B", "kB", "MB", "GB", "TB")
    power = next(power for power in range(len(units)) if size_bytes < 1000 ** (power + 1) or power == len(units) - 1)
    return f"{size_bytes / 1000**power:.3g} {units[power]}"
