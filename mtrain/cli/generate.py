"""`mtrain generate`: a look at what a model has learned."""

import os
from pathlib import Path
from typing import Annotated

import typer

from mtrain.base.ground import require_ground
from mtrain.cli.arguments import ModelArgument
from mtrain.cli.messages import one_message, this_rank


def generate(
    model: ModelArgument,
    prompt: Annotated[list[str] | None, typer.Option(help="Text to continue; repeatable.", show_default=False)] = None,
    prompts_file: Annotated[
        Path | None,
        typer.Option(help="One prompt per line; of .jsonl: objects with prompt or messages.", show_default=False),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Largest number of tokens to add.")] = 64,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 takes the likeliest token.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Draw from the likeliest tokens that reach this probability.")] = 1.0,
    top_k: Annotated[int, typer.Option(min=0, help="Number of the likeliest tokens to draw from; 0: all.")] = 0,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the sampling.")] = 0,
    chat: Annotated[
        bool, typer.Option("--chat", help="The prompt is what a user says, in the model's chat template.")
    ] = False,
) -> None:
    """Continues prompts, or answers them.

    Under torchrun or srun the model is spread over the ranks by the layout of its run.
    """
    if not prompt and prompts_file is None:
        raise typer.BadParameter("there is none; give --prompt TEXT, or --prompts-file FILE", param_hint="--prompt")
    if not 0 < top_p <= 1:
        raise typer.BadParameter(f"{top_p} must be above 0 and at most 1; 1: all tokens", param_hint="--top-p")
    with one_message(this_rank()):
        require_ground()
        from mtrain.base.environment import RankEnvironment
        from mtrain.training.sampling.generate import generate_text  # loads torch
        from mtrain.training.sampling.params import SamplingParams
        from mtrain.training.sampling.prompts import read_prompts, shown

        questions = [*(prompt or []), *(read_prompts(prompts_file) if prompts_file is not None else [])]
        sampling = SamplingParams(max_new_tokens, temperature, top_p, top_k, seed)
        texts = generate_text(model, questions, sampling, chat)
        if RankEnvironment.from_environ(os.environ).rank > 0:
            return
    for question, answer in zip(questions, texts):
        typer.echo(f"\n> {shown(question)}\n{answer}")
