"""`mtrain train`, `serve`, `generate` and `eval`: verbs that run as one rank, or as ranks under torchrun or srun."""

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mtrain.base.environment import RankEnvironment
from mtrain.base.ground import require_ground
from mtrain.base.imports import without_collections
from mtrain.cli.arguments import ConfigArguments, ModelArgument, loaded_config
from mtrain.cli.messages import one_message, prefixed_traceback, this_rank

if TYPE_CHECKING:
    from mtrain.config import Config


def _rank_config(arguments: list[str]) -> "tuple[Config, RankEnvironment]":
    """Loads the configuration and the environment of this rank, and checks the layout."""
    from mtrain.arch.layout import Layout

    require_ground()
    environment = RankEnvironment.from_environ(os.environ)
    config = loaded_config(arguments, rank=environment.rank)
    Layout.from_config(config, environment.world_size)
    return config, environment


def train(arguments: ConfigArguments) -> None:
    """Trains as one rank: under torchrun, under srun, or alone."""
    with one_message(this_rank()), prefixed_traceback():
        from mtrain.watch.rank import watched

        config, environment = _rank_config(arguments)
        with watched(config, environment):
            # torch is loaded after the configuration is checked, and under the watchdog
            with without_collections():
                from mtrain.training.trainer import train as run_training

            run_training(config)


def serve(
    arguments: ConfigArguments,
    host: Annotated[str, typer.Option(help="Address that rank 0 listens on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0: any free port.")] = 8000,
    token_file: Annotated[
        Path | None,
        typer.Option(help="File with the clients' key; needed except on loopback.", show_default=False),
    ] = None,
) -> None:
    """Serves a model to clients that train it and sample from it, such as the tinker SDK.

    One rank alone, or all ranks of a layout under torchrun or srun.
    """
    with one_message(this_rank()), prefixed_traceback():
        from mtrain.serve.checked import check_libraries, read_token

        config, _ = _rank_config(arguments)
        token = None if token_file is None else read_token(token_file)
        check_libraries()
        with without_collections():
            from mtrain.serve.run import serve as run_service
            from mtrain.serve.served import Served

        run_service(Served(config), host, port, token)


def generate(
    model: ModelArgument,
    prompt: Annotated[list[str] | None, typer.Option(help="Text to continue; repeatable.", show_default=False)] = None,
    prompts_file: Annotated[
        Path | None,
        typer.Option(help="One prompt per line; .jsonl: objects with prompt or messages.", show_default=False),
    ] = None,
    image: Annotated[
        list[Path] | None,
        typer.Option(help="Image before the text of each --prompt, as in a chat; repeatable.", show_default=False),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Largest number of tokens to add.")] = 64,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 takes the likeliest token.")] = 0.0,
    top_p: Annotated[
        float, typer.Option(help="Total probability of the likeliest tokens to sample from; 1: all.")
    ] = 1.0,
    top_k: Annotated[int, typer.Option(min=0, help="Number of the likeliest tokens to sample from; 0: all.")] = 0,
    seed: Annotated[int, typer.Option(min=0, help="Seed of sampling.")] = 0,
    chat: Annotated[
        bool, typer.Option("--chat", help="Treat the prompt as a user message in the model's chat template.")
    ] = False,
) -> None:
    """Continues prompts, or answers them.

    Under torchrun or srun, the layout of the model's run divides it over the ranks.
    """
    if not prompt and prompts_file is None:
        raise typer.BadParameter("no prompt is given; add --prompt TEXT, or --prompts-file FILE", param_hint="--prompt")
    if image and not prompt:
        raise typer.BadParameter("an image needs a question; add --prompt TEXT", param_hint="--image")
    if not 0 < top_p <= 1:
        raise typer.BadParameter(f"{top_p} must be above 0 and at most 1; 1: all tokens", param_hint="--top-p")
    with one_message(this_rank()):
        require_ground()
        from mtrain.training.sampling.generate import generate_text  # loads torch
        from mtrain.training.sampling.params import SamplingParams
        from mtrain.training.sampling.prompts import after_images, read_prompts, shown

        asked = after_images(prompt or [], image or [])
        questions = [*asked, *(read_prompts(prompts_file) if prompts_file is not None else [])]
        folder = Path() if prompts_file is None else prompts_file.parent
        sampling = SamplingParams(max_new_tokens, temperature, top_p, top_k, seed)
        texts = generate_text(model, questions, sampling, chat, folder)
        if RankEnvironment.from_environ(os.environ).rank > 0:
            return
    for question, answer in zip(questions, texts):
        typer.echo(f"\n> {shown(question)}\n{answer}")


def evaluate(
    model: ModelArgument,
    tasks: Annotated[str, typer.Option(help="Tasks of lm-eval, separated by commas: names, groups, tags, patterns.")],
    include_path: Annotated[
        Path | None, typer.Option(help="Folder with YAML files of your own tasks.", show_default=False)
    ] = None,
    num_fewshot: Annotated[
        int | None, typer.Option(min=0, help="Solved examples before each question; default: each task's own number.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Number of questions of each task, from the first.")] = None,
    max_length: Annotated[
        int | None,
        typer.Option(min=2, help="Tokens that the model reads; default: that of config.json, else data.seq_length."),
    ] = None,
    apply_chat_template: Annotated[
        bool, typer.Option("--apply-chat-template", help="Send questions as user messages, with the chat template.")
    ] = False,
    fewshot_as_multiturn: Annotated[
        bool | None,
        typer.Option(help="Send solved examples as turns; default: with --apply-chat-template.", show_default=False),
    ] = None,
    system_instruction: Annotated[
        str | None, typer.Option(help="Text before the description of each task.", show_default=False)
    ] = None,
    output: Annotated[Path | None, typer.Option(help="JSON file for all results.", show_default=False)] = None,
) -> None:
    """Evaluates a model on tasks of lm-eval.

    Under torchrun or srun, the layout of the model's run divides the model over the ranks; no layout changes the
    results by more than rounding.
    """
    with one_message(this_rank()):
        require_ground()
        from mtrain.base.files import write_atomically
        from mtrain.config.schema.train import EvalSection
        from mtrain.training.tasks.harness import table  # loads torch
        from mtrain.training.tasks.run import evaluate_model

        section = EvalSection(
            tasks=tuple(name for name in tasks.split(",") if name),
            include_path=None if include_path is None else str(include_path),
            num_fewshot=num_fewshot,
            limit=limit,
            apply_chat_template=apply_chat_template,
            fewshot_as_multiturn=fewshot_as_multiturn,
            system_instruction=system_instruction,
        )
        if not section.tasks:
            raise typer.BadParameter("no task is given; name at least one", param_hint="--tasks")
        results = evaluate_model(model, section, max_length)
        if RankEnvironment.from_environ(os.environ).rank > 0:
            return
        if output is not None:
            write_atomically(output, json.dumps(results.report, indent=1, sort_keys=True) + "\n")
        typer.echo(table(results.report))
