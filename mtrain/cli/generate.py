"""`mtrain generate`: a look at what a run has learned."""

from pathlib import Path
from typing import Annotated

import typer

from mtrain.cli.messages import one_message


def generate(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.", show_default=False)],
    prompt: Annotated[list[str], typer.Option(help="Text to continue; may be given again.", show_default=False)],
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Most tokens to add.")] = 64,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 takes the likeliest token.")] = 0.0,
    seed: Annotated[int, typer.Option(min=0, help="Of the sampling.")] = 0,
    chat: Annotated[
        bool, typer.Option("--chat", help="The prompt is what a user says, in the run's chat template.")
    ] = False,
) -> None:
    """Continues prompts with the newest checkpoint of a run."""
    with one_message():
        from mtrain.config.load import load_config
        from mtrain.runs.folder import RunFolder

        config = load_config([RunFolder(run).config], [])
        from mtrain.training.generate import generate_text  # loads torch

        texts = generate_text(config, run, prompt, max_new_tokens, temperature, seed, chat)
    for question, answer in zip(prompt, texts):
        typer.echo(f"\n> {question}\n{answer}")
