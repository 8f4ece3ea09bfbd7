"""Answers equal those of transformers, of a model without a cache, and of any layout."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from mtrain.arch.layout import Layout
from mtrain.config import Config
from mtrain.hf.configuration import load_config
from mtrain.training.sampling.params import SamplingParams
from mtrain.training.sampling.sampler import Completion, TokenPosition, choose
from tests.config.samples import config as small
from tests.hf.folders import save
from tests.parity.families import HYBRID, MAMBA
from tests.pool import Pool
from tests.training.sampling import sampling_ranks

MODELS: dict[str, dict[str, Any]] = {
    "llama": {"num_hidden_layers": 4, "num_key_value_heads": 2},
    "qwen2": {"num_key_value_heads": 2},
    "gemma3": {"num_key_value_heads": 2},  # windows, angles by layer
    "mixtral": {"num_hidden_layers": 2, "num_local_experts": 4},
    "deepseek": {"num_hidden_layers": 2},  # latents
    "glm4-moe": {"num_hidden_layers": 2},  # heads that rotate in part
    "gpt-oss": {"num_key_value_heads": 2, "num_local_experts": 4},  # sinks
    "qwen3-next": {"num_experts": 4},  # states of delta nets
}
PROMPTS = [[5, 9, 30, 7], [11], [40, 3, 3, 17, 21, 50, 8, 2, 33, 19, 4], [6, 6], [12, 48, 1]]
NEW = 4
GREEDY = SamplingParams(max_new_tokens=NEW, temperature=0.0)
WARM = SamplingParams(max_new_tokens=NEW, temperature=0.8, top_p=0.9, top_k=20, seed=7)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    for name, changes in MODELS.items():
        save(name, root / name, dtype=torch.float32, **changes)
    return {name: root / name for name in MODELS}


def configured(folder: Path, layout: dict[str, Any]) -> Config:
    return load_config(
        [],
        [
            f"model.hf={folder}",
            f"layout={layout}".replace("'", ""),
            f"run.dir={folder / 'run'}",
            "train={global_batch_size: 4, num_steps: 1, precision: fp32, device: cpu}",
            "optimizer={lr: 1.0}",
            "data={kind: mock, seq_length: 32}",
        ],
    )


def answers(
    pool: Pool,
    folders: dict[str, Path],
    names: Sequence[str],
    layout: dict[str, Any],
    ranks: int,
    samplings: Sequence[SamplingParams],
    slots: int = 64,
) -> dict[str, list[list[Completion]]]:
    """Returns the answers of each model under each sampling, the same on all ranks."""
    configs = [configured(folders[name], layout) for name in names]
    resolved = Layout.from_config(configs[0], ranks)
    found = pool.run(sampling_ranks.answers, resolved, configs, PROMPTS, samplings, slots)
    assert all(each == found[0] for each in found)
    return dict(zip(names, found[0], strict=True))


@pytest.fixture(scope="module")
def alone(pool: Pool, folders: dict[str, Path]) -> dict[str, list[list[Completion]]]:
    return answers(pool, folders, list(MODELS), {}, 1, [GREEDY, WARM])


def ids_of(completions: Sequence[Completion]) -> list[list[int]]:
    return [each.token_ids for each in completions]


@pytest.mark.parametrize("name", MODELS)
def test_greedy_answers_are_those_of_transformers(
    alone: dict[str, list[list[Completion]]], folders: dict[str, Path], name: str
) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folders[name], dtype=torch.float32, attn_implementation="eager"
    )
    for prompt, ours in zip(PROMPTS, alone[name][0], strict=True):
        theirs = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=NEW,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
        new = theirs.sequences[0, len(prompt) :].tolist()
        assert ours.token_ids == new
        likely = [float(logits[0].double().log_softmax(-1)[token]) for logits, token in zip(theirs.logits, new)]
        np.testing.assert_allclose(ours.log_probs, likely, rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    ("names", "layout", "slots"),
    [
        (["gpt-oss"], {"tp": 2, "sp": "true", "cp_comm": "ulysses"}, 64),
        # stages pass what they pass in training
        pytest.param(["llama"], {"pp": 2, "vpp": 2}, 64, marks=pytest.mark.nightly),
        (["mixtral"], {"ep": 2}, 1),  # one place for three prompts: the others wait
        (["llama"], {"shard": "weights"}, 1),
        # heads are divided like those of sinks above, latents as in training
        pytest.param(["llama", "deepseek"], {"tp": 2, "sp": "true"}, 64, marks=pytest.mark.nightly),
        # replicas of cp answer prompts of their own, like those of dp above
        pytest.param(["gpt-oss"], {"cp": 2, "cp_comm": "ulysses"}, 64, marks=pytest.mark.nightly),
    ],
    ids=["tp2", "pp2-vpp2", "dp2-ep2", "dp2-weights", "tp2 without sinks", "cp2"],
)
def test_the_layout_changes_no_answer(
    pool: Pool,
    folders: dict[str, Path],
    alone: dict[str, list[list[Completion]]],
    names: list[str],
    layout: dict[str, Any],
    slots: int,
) -> None:
    spread = answers(pool, folders, names, layout, 2, [WARM], slots)
    for name in names:
        (ours,), (_, wanted) = spread[name], alone[name]
        assert ids_of(ours) == ids_of(wanted)
        for one, other in zip(ours, wanted, strict=True):
            np.testing.assert_allclose(one.log_probs, other.log_probs, rtol=0, atol=2e-5)


def test_sampled_answers_are_those_without_a_cache(
    pool: Pool, folders: dict[str, Path], alone: dict[str, list[list[Completion]]]
) -> None:
    """Each token is drawn again from the logits of one training pass over the whole sequence."""
    warm = alone["gemma3"][1]
    assert ids_of(warm) != ids_of(alone["gemma3"][0])
    sequences = [[*prompt, *each.token_ids] for prompt, each in zip(PROMPTS, warm, strict=True)]
    (logits,) = pool.run(sampling_ranks.without_cache, Layout(), configured(folders["gemma3"], {}), sequences)
    for number, (prompt, ours, rows) in enumerate(zip(PROMPTS, warm, logits, strict=True)):
        behind = torch.from_numpy(rows[len(prompt) - 1 : -1])
        tokens, likely = choose(behind, [TokenPosition(number, token) for token in range(NEW)], WARM)
        assert tokens.tolist() == ours.token_ids
        np.testing.assert_allclose(ours.log_probs, likely, rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    ("family", "layout", "ranks", "slots"),
    [
        pytest.param(HYBRID, {}, 1, 64, marks=pytest.mark.nightly),  # by day on two ranks
        (HYBRID, {"pp": 2}, 2, 2),
        # one rule for both: tests/core/model/attention/test_delta_rule.py
        pytest.param(MAMBA, {"tp": 2, "sp": True}, 2, 2, marks=pytest.mark.nightly),
        # heads are divided and stages pass a state on as they do above
        pytest.param(HYBRID, {"tp": 2, "sp": True, "pp": 2}, 4, 2, marks=pytest.mark.nightly),
        pytest.param(MAMBA, {"tp": 2, "sp": True, "pp": 2}, 4, 2, marks=pytest.mark.nightly),
        pytest.param(HYBRID, {"cp": 2}, 2, 64, marks=pytest.mark.nightly),  # replicas of cp, as above
    ],
    ids=["alone", "pp2", "mamba-tp2-sp", "tp2-sp-pp2", "mamba-tp2-sp-pp2", "cp2"],
)
def test_states_of_a_hybrid_give_the_answers_without_a_cache(
    pool: Pool, family: dict[str, Any], layout: dict[str, Any], ranks: int, slots: int
) -> None:
    """A delta net or Mamba-2 keeps a state in the place of keys: it is that of each sequence, whatever was read
    together, and in whatever place."""
    model = family | {"model__init_std": 0.15, "model__num_layers": 4, "train__precision": "fp32"}
    config = small(**model, **{f"layout__{key}": value for key, value in layout.items()})
    found = pool.run(sampling_ranks.answers, Layout.from_config(config, ranks), [config], PROMPTS, [WARM], slots)
    assert all(each == found[0] for each in found)
    ((ours,),) = found[0]
    sequences = [[*prompt, *each.token_ids] for prompt, each in zip(PROMPTS, ours, strict=True)]
    (logits,) = pool.run(sampling_ranks.without_cache, Layout(), small(**model), sequences)
    for number, (prompt, answer, rows) in enumerate(zip(PROMPTS, ours, logits, strict=True)):
        after = torch.from_numpy(rows[len(prompt) - 1 : -1])
        tokens, likely = choose(after, [TokenPosition(number, token) for token in range(NEW)], WARM)
        assert tokens.tolist() == answer.token_ids
        np.testing.assert_allclose(answer.log_probs, likely, rtol=0, atol=2e-5)


def test_a_stop_token_ends_an_answer_and_belongs_to_it(
    pool: Pool, folders: dict[str, Path], alone: dict[str, list[list[Completion]]]
) -> None:
    whole = alone["qwen2"][0]
    stop = whole[0].token_ids[3]
    asked = [SamplingParams(max_new_tokens=NEW, temperature=0.0, stop_token_ids=frozenset({stop}))]
    ((found,),) = pool.run(sampling_ranks.answers, Layout(), [configured(folders["qwen2"], {})], PROMPTS, asked)[0]
    for ours, before in zip(found, whole, strict=True):
        end = before.token_ids.index(stop) + 1 if stop in before.token_ids else NEW
        assert ours.token_ids == before.token_ids[:end]
        assert ours.finish_reason == ("stop" if stop in before.token_ids else "length")


def test_an_engine_answers_with_the_log_probabilities_that_it_trains(
    pool: Pool, folders: dict[str, Path], tmp_path: Path, alone: dict[str, list[list[Completion]]]
) -> None:
    config = configured(folders["qwen2"], {})
    ((first, likely, later),) = pool.run(
        sampling_ranks.engine_answers, Layout(), config, PROMPTS, WARM, str(tmp_path / "run")
    )
    assert ids_of(first) == ids_of(alone["qwen2"][1])
    for prompt, answer, of_all in zip(PROMPTS, first, likely, strict=True):
        np.testing.assert_allclose(answer.log_probs, of_all[len(prompt) - 1 :], rtol=0, atol=2e-5)
    assert ids_of(later) != ids_of(first), "a step has changed the weights"
