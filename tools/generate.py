"""Continues prompts with the weights of a run: python tools/generate.py runs/a --prompt "def f(x)" """

from pathlib import Path
from typing import Annotated

import typer

from mtrain.cli.main import one_message
from mtrain.config.load import load_config
from mtrain.runs.folder import RunFolder


def main(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.", show_default=False)],
    prompt: Annotated[list[str], typer.Option(help="Text to continue; may be given again.", show_default=False)],
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Most tokens to add.")] = 64,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 takes the likeliest token.")] = 0.0,
    seed: Annotated[int, typer.Option(min=0, help="Of the sampling.")] = 0,
) -> None:
    """Prints each prompt and what the newest checkpoint of the run makes of it."""
    with one_message():
        config = load_config([RunFolder(run).config], [])
        from mtrain.training.generate import generate_text  # loads torch

        texts = generate_text(config, run, prompt, max_new_tokens, temperature, seed)
    for question, answer in zip(prompt, texts):
        typer.echo(f"\n> {question}\n{answer}")


if __name__ == "__main__":
    typer.run(main)
