"""`mtrain show-batch`: shows the samples of a step, token by token."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mtrain.cli.arguments import ConfigArguments, loaded_config
from mtrain.cli.messages import one_message

if TYPE_CHECKING:
    from rich.text import Text

    from mtrain.data.shown import ShownSample, ShownStep

_UNTRAINED = "dim"
_STYLES = ("black on green", "black on cyan", "black on yellow", "black on magenta")
"""Styles of weights, by descending frequency; all further weights share the last style."""


def show_batch(
    arguments: ConfigArguments,
    step: Annotated[int, typer.Option(min=1, help="Step, counted from 1 as in metrics.jsonl.")] = 1,
    samples: Annotated[int, typer.Option(min=1, help="Number of samples to show.")] = 8,
    html: Annotated[Path | None, typer.Option(help="Also write a page with the weight of every token.")] = None,
) -> None:
    """Shows the samples of a step: trained tokens, their weights, and where documents begin; does not load torch."""
    with one_message():
        from rich.console import Console

        from mtrain.data.shown import as_text, headline, shown_step
        from mtrain.data.sources import Sources

        config = loaded_config(arguments, counts_epochs=True)
        sources, console = Sources(config), Console()
        shown = shown_step(config, sources.training(), sources.tokenizer, step, samples)
        for note in sources.notes():
            print(f"note: {note}", flush=True)
        if console.is_terminal:
            console.print(shown.headline, markup=False)
            styles = styles_of(shown)
            for weight, style in styles.items():
                console.print(f"  weight {weight:.6g} ", style=style, markup=False)
            for sample in shown.samples:
                console.rule(headline(sample), align="left")
                console.print(coloured(sample, styles), soft_wrap=True)
        else:  # marks replace colours in a file
            print(as_text(shown), end="", flush=True)
        if html is not None:
            from mtrain.report.pages.html import render, write_page

            write_page(html, render("batch.html", shown=shown, headline=headline))
            print(f"wrote {html}", flush=True)


def styles_of(shown: ShownStep) -> dict[float, str]:
    """Assigns a style to each of the most frequent weights."""
    from collections import Counter

    counts = Counter(token.weight for sample in shown.samples for token in sample.tokens if token.weight > 0)
    return {weight: style for (weight, _), style in zip(counts.most_common(), _STYLES)}


def coloured(sample: ShownSample, styles: dict[float, str]) -> Text:
    """Returns the text of a sample, coloured by weight."""
    from rich.text import Text

    text = Text()
    for token in sample.tokens:
        if token.begins_document:
            text.append("┃", style="bold red")
        text.append(token.text, style=styles.get(token.weight, _STYLES[-1]) if token.weight > 0 else _UNTRAINED)
    return text
