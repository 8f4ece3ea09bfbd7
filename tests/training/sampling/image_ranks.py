"""What ranks do in the tests of answers to images; the functions for `Pool.run`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from mtrain import Datum, Engine
from mtrain.config import Config
from mtrain.core.batch.images import SampleImages
from mtrain.core.ranks.groups import Groups
from mtrain.hf.tokenizer.tokenizer import tokenizer_of
from mtrain.training.sampling import sampler
from mtrain.training.sampling.generate import generate_text
from mtrain.training.sampling.params import SamplingParams
from mtrain.training.sampling.prompts import Prompt, questions_of, read_prompts
from mtrain.training.sampling.sampler import Completion, generate
from tests.parity.ranks import build
from tests.training.engine_ranks import free

Prompts = tuple[Sequence[Sequence[int]], Sequence[SampleImages | None]]


def answers(
    groups: Groups,
    config: Config,
    parameters: Mapping[str, Any],
    prompts: Prompts,
    sampling: SamplingParams,
    max_sequences: int,
) -> list[Completion]:
    """Answers prompts, given as token ids and images, with these parameters."""
    ids, images = prompts
    return generate(build(groups, config, parameters).model, ids, sampling, max_sequences, images=images)


def answers_without_shift(
    groups: Groups, config: Config, parameters: Mapping[str, Any], prompts: Prompts, sampling: SamplingParams
) -> list[Completion]:
    """Answers like `answers`, but positions continue after the number of tokens."""
    with mock.patch.object(sampler._Prompt, "shift", 0):
        return answers(groups, config, parameters, prompts, sampling, 64)


def texts_of_run(
    groups: Groups, config: Config, file: Path, images: Sequence[Sequence[Path]], sampling: SamplingParams
) -> list[str]:
    """Makes a step from the initial weights and saves a run; returns its answers.

    Args:
        file: Path of the prompts.
        images: Images of each prompt.
    """
    prompts = read_prompts(file)
    with free(groups):
        with Engine(config) as engine:
            questions = questions_of(config, tokenizer_of(config), prompts, None, folder=file.parent)
            data = [
                Datum([*question.ids, 5, 6], [0.0] * len(question.ids) + [1.0, 1.0], images=list(own))
                for question, own in zip(questions, images, strict=True)
            ]
            engine.forward_backward(data)
            engine.optim_step()
            engine.save()
        return generate_text(Path(config.run.dir), prompts, sampling, folder=file.parent)


def texts_of_folder(
    groups: Groups, folder: Path, prompts: Sequence[Prompt], sampling: SamplingParams, images_from: Path
) -> list[str]:
    """Returns the answers of a Hugging Face folder's model to user messages."""
    with free(groups):
        return generate_text(folder, prompts, sampling, as_chat=True, folder=images_from)
