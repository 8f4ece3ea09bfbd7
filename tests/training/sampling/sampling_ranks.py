"""What ranks do in the tests of sampling; the functions for `Pool.run`."""

from __future__ import annotations

import contextlib
import runpy
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from mtrain import Datum, Engine
from mtrain.checkpoint.state.start_weights import load_hf_weights
from mtrain.config import Config
from mtrain.core.batch.batch import Microbatch
from mtrain.core.engine.rank_model import RankModel, build_rank_model
from mtrain.core.layers.build import run_chunk
from mtrain.core.layers.output_layer import Logits
from mtrain.core.ranks.groups import Groups
from mtrain.hf.configuration import load_config
from mtrain.training.sampling.generate import generate_text
from mtrain.training.sampling.params import SamplingParams
from mtrain.training.sampling.sampler import Completion, generate
from tests.paths import ROOT
from tests.training.engine_ranks import free
from tests.training.sampling import vllm_stand_in

Prompts = Sequence[Sequence[int]]


def answers(
    groups: Groups,
    configs: Sequence[Config],
    prompts: Prompts,
    samplings: Sequence[SamplingParams],
    max_sequences: int = 64,
) -> list[list[list[Completion]]]:
    """Returns the answers of each model under each sampling."""
    found = []
    for config in configs:
        model = _loaded(config, groups)
        found.append([generate(model, prompts, each, max_sequences) for each in samplings])
        assert all(chunk.training for chunk in model.chunks), "generation leaves a model as it was"
    return found


def without_cache(groups: Groups, config: Config, sequences: Prompts) -> list[Any]:
    """Returns logits of whole sequences by one training forward pass each, [length, vocab_size], as numpy."""
    (chunk,) = _loaded(config, groups).chunks
    chunk.eval()
    found = []
    with torch.no_grad():
        for ids in sequences:
            tokens = torch.tensor([list(ids)])
            places = torch.arange(tokens.shape[1])[None]
            output = run_chunk(chunk, Microbatch(tokens, tokens, places, {}, {}, None, None))
            assert isinstance(output, Logits)
            found.append(output.main.whole()[:, 0, : config.model.vocab_size].double().numpy())
    return found


def _loaded(config: Config, groups: Groups) -> RankModel:
    model = build_rank_model(config, groups)  # with initial weights
    if config.model.hf is not None:
        load_hf_weights(Path(config.model.hf), model)
    return model


def engine_answers(groups: Groups, config: Config, prompts: Prompts, sampling: SamplingParams, folder: str) -> Any:
    """Returns (answers, their values by `forward`, answers after a step); writes a checkpoint of the first weights."""
    with free(groups), Engine(config) as engine:
        engine.save(folder)
        first = engine.generate(prompts, sampling)
        data = [Datum([*prompt, *each.token_ids]) for prompt, each in zip(prompts, first, strict=True)]
        likely = [each.tolist() for each in engine.forward(data).log_probs]
        engine.forward_backward(data)
        engine.optim_step()
        return first, likely, engine.generate(prompts, sampling)


def texts(
    groups: Groups, asked: Sequence[tuple[Sequence[Path], bool]], prompts: Sequence[str], sampling: SamplingParams
) -> list[list[list[str]]]:
    """Returns the answers of models in several folders, to texts or to chats."""
    with free(groups):
        return [[generate_text(path, prompts, sampling, as_chat) for path in paths] for paths, as_chat in asked]


@contextlib.contextmanager
def example(name: str, *modules: Any) -> Iterator[dict[str, Any]]:
    """Yields the names of a program of examples/, which finds its neighbours and modules that are not installed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "examples")
        patch.delitem(sys.modules, "vllm_rollouts", raising=False)
        for module in modules:
            patch.setitem(sys.modules, "vllm", module)
        yield runpy.run_path(str(ROOT / "examples" / name))


def grpo_rewards(groups: Groups, overrides: Sequence[str]) -> list[float]:
    """Returns the rewards of the steps of examples/grpo_loop.py."""
    with example("grpo_loop.py") as program, free(groups):
        rewards: list[float] = program["train"](load_config([], [*program["SETTINGS"], *overrides]))
        return rewards


def vllm_rollouts(groups: Groups, overrides: Sequence[str]) -> Any:
    """Runs examples/grpo_loop.py with a stand-in for vLLM: returns its rewards, the updates that the stand-in got, and
    before and after a step (answers, their values by the engine)."""
    found = []
    with example("grpo_loop.py", vllm_stand_in) as program, free(groups):
        program["train"].__globals__.update(WARM_UP_STEPS=1, GROUP_SIZE=2)
        config = load_config([], [*program["SETTINGS"], *overrides])
        rewards = program["train"](config)
        updates = [each.num_updates for each in vllm_stand_in.made]
        with Engine(config) as engine, program["drawing"](engine) as draw:
            for _ in range(2):
                answers = draw([[1, 10, 2, 11]] * 4, SamplingParams(max_new_tokens=2, seed=3))
                data = [Datum([1, 10, 2, 11, *each.token_ids]) for each in answers]
                found.append((answers, [each[-2:].tolist() for each in engine.forward(data).log_probs]))
                engine.forward_backward([Datum([1, 10, 2, 11, 0, 3])], "next_token")
                engine.optim_step(lr=0.1)
    return rewards, updates, found
