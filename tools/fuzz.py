"""Searches for inputs that break a promise: python tools/fuzz.py config --examples 5000 --seed 1"""

import sys
from pathlib import Path
from typing import Annotated

import typer

sys.path.insert(0, str(Path(__file__).parents[1]))  # the framework belongs to the tests, which are not installed

from tests.fuzz.fuzzing import Finding, fuzz, keep_input
from tests.fuzz.target import Outcome, target_names


def main(
    target: Annotated[str, typer.Argument(help=f"What is fuzzed: {', '.join(target_names())}.", show_default=False)],
    examples: Annotated[int, typer.Option(min=1, help="Mutated inputs.")] = 1000,
    seed: Annotated[int, typer.Option(help="Another one gives other inputs.")] = 0,
    first: Annotated[int, typer.Option(min=0, help="Number of the first input, to repeat a finding.")] = 0,
    keep: Annotated[Path | None, typer.Option(help="Folder for one input of each kind of finding.")] = None,
) -> None:
    """Mutates valid inputs; each must be accepted, or refused by one message; ends with 1 where one is not."""
    if target not in target_names():
        raise typer.BadParameter(f"{target} is none of {', '.join(target_names())}")
    causes: dict[str, list[Finding]] = {}

    def tell(index: int, outcome: Outcome) -> None:
        if outcome.kind == "finding":
            finding = Finding(index, outcome.text)
            causes.setdefault(finding.cause, []).append(finding)
            if len(causes[finding.cause]) == 1:
                typer.echo(f"\n{target} --seed {seed} --first {index} --examples 1\n{outcome.text}")
                if keep is not None:
                    keep_input(target, seed, index, keep / str(index))
        elif examples == 1:
            typer.echo(f"{outcome.kind}: {outcome.text}")

    total = fuzz(target, examples, seed, first, tell)
    typer.echo(f"\n{target}: {total.accepted} accepted, {total.refused} refused, {len(total.found)} findings")
    for cause, found in sorted(causes.items(), key=lambda item: -len(item[1])):
        typer.echo(f"{len(found):6} x {cause} (first: {found[0].number})")
    raise typer.Exit(1 if causes else 0)


if __name__ == "__main__":
    typer.run(main)
