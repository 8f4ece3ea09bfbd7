"""Several adapters on one frozen base: each is to the bit what it is alone, and PEFT's in float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
import transformers

from mtrain import Datum, arch
from mtrain.arch.layout import Layout
from mtrain.base.errors import ConfigError
from mtrain.convert.adapters import export_adapter
from mtrain.hf.configuration import load_config
from mtrain.serve.checked import check_served
from tests.hf.folders import save
from tests.messages import check_message, refuses
from tests.parity.cases import Case, case
from tests.parity.compare import at_night
from tests.parity.expert_models import QWEN
from tests.parity.images import knobs
from tests.pool import Pool
from tests.training import adapters_ranks
from tests.training.adapters_ranks import ADAM, Wanted

VOCAB = 61
OVERLAP = {"train__overlap_grad_reduce": True, "train__overlap_param_gather": True}
ROUTED = {**QWEN, "model__tied_embeddings": False, "loss__router": {"sequence_balance_coefficient": 0.1}}
CASES: list[tuple[Case, dict[str, Any]]] = [
    (case(2, num_layers=1, dp=2), OVERLAP),
    at_night(case(1, num_layers=1), {"train__compile": "regions"}),
    (case(2, num_layers=1, dp=2, shard="weights"), {"train__precision": "bf16"}),
    # adapters of experts alone: tests/verify/parity/test_adapters.py
    at_night(case(2, num_layers=1), ROUTED),
    at_night(case(2, num_layers=1, tp=2, sp=True), {}),
    at_night(case(2, num_layers=2, pp=2), {"train__precision": "bf16"}),
    at_night(case(2, num_layers=1, cp=2), {"train__recompute": "full"}),
    at_night(case(2, num_layers=1, dp=2, ep=2), ROUTED),
]


def batch(seed: int, size: int, vocab_size: int = VOCAB) -> list[Datum]:
    rng = np.random.default_rng(seed)
    return [Datum(rng.integers(0, vocab_size, rng.integers(4, 17)).tolist()) for _ in range(size)]


def wanted(
    sections: list[dict[str, Any]], vocab_size: int = VOCAB, num_calls: int = 2, num_steps: int = 3
) -> dict[str, Wanted]:
    """Gives every adapter data of its own: some steps of some calls."""
    return {
        f"adapter {number}": Wanted(
            section,
            number + 1,
            [
                [batch(100 * number + 10 * step + call, 4, vocab_size) for call in range(num_calls)]
                for step in range(num_steps)
            ],
        )
        for number, section in enumerate(sections)
    }


@pytest.mark.parametrize(("one", "changes"), CASES)
def test_adapters_that_take_turns_are_what_each_is_alone(pool: Pool, one: Case, changes: dict[str, Any]) -> None:
    """Ranks, scales, kinds and modules differ; steps, norms, log-probabilities, answers and weights are compared."""
    config = one.config(adapter={"rank": 2, "targets": ["qkv"]}, **changes)
    modules = ["experts"] if config.model.experts is not None else ["fc1", "fc2"]
    first: dict[str, Any] = {"rank": 4, "alpha": 8, "targets": ["proj", "output", *modules]}
    # terms of routers have denominators of their own, which need the whole batch
    num_calls = 1 if config.model.experts is not None else 2
    sections = [first, {"rank": 1}, {"kind": "dora", "targets": ["proj"]}]
    given = wanted(sections, num_calls=num_calls, num_steps=2)  # the second one has moments
    single = pool.run(adapters_ranks.alone, one.resolved(config), config, given)
    together = pool.run(adapters_ranks.mixed, one.resolved(config), config, given)
    assert together == single
    losses = [[step.loss for step in each.steps] for each in single[0].values()]
    assert len({tuple(each) for each in losses}) == 3


@pytest.mark.nightly  # in turns they are what they are alone, above; alone: tests/core/adapters/test_peft_training.py
def test_one_of_several_adapters_is_that_of_peft_in_float64(pool: Pool, tmp_path: Path) -> None:
    save("llama", tmp_path / "hf", torch.float32, num_key_value_heads=2)
    keys = [f"model.hf={tmp_path / 'hf'}", f"run.dir={tmp_path / 'run'}", "data={kind: mock, seq_length: 16}"]
    keys += ["train={global_batch_size: 8, num_steps: 1, precision: fp32, device: cpu}", "optimizer={lr: 1.0}"]
    config = load_config([], [*keys, "adapter={rank: 2}", "loss.aggregation=sum"])
    given = wanted([{"rank": 3, "alpha": 9, "targets": ["qkv", "fc2"]}, {"rank": 5}], config.model.vocab_size)
    found = pool.run(adapters_ranks.mixed, Layout(), config, given, str(tmp_path))[0]
    for name, one in given.items():
        folder = tmp_path / name
        for step in (0, 3):
            export_adapter(folder / "checkpoints" / f"step_{step:08d}", tmp_path / f"{name} {step}", None)
        model = of_peft(tmp_path / "hf", tmp_path / f"{name} 0")
        norms, losses = train(model, one)
        assert [each.grad_norm for each in found[name].steps] == pytest.approx(norms, rel=1e-5)
        assert [each.loss for each in found[name].steps] == pytest.approx(losses, rel=1e-5)
        last = of_peft(tmp_path / "hf", tmp_path / f"{name} 3").state_dict()
        ours = {key: values for key, values in last.items() if "lora_" in key}
        assert ours
        exact = model.state_dict()
        for key, values in ours.items():
            assert (values - exact[key]).norm() < 1e-5 * exact[key].norm(), key


def of_peft(base: Path, adapter: Path) -> Any:
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float64)
    return peft.PeftModel.from_pretrained(model, adapter, is_trainable=True).double()


def train(model: Any, one: Wanted) -> tuple[list[float], list[float]]:
    """Makes the steps by torch: a sum over tokens, clipping, AdamW; returns norms and losses."""
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1.0, betas=(ADAM.beta1, ADAM.beta2), eps=ADAM.eps, weight_decay=0.0)
    norms, losses = [], []
    for number, calls in enumerate(one.steps):
        total = 0.0
        for datum in (each for call in calls for each in call):
            ids = torch.tensor(datum.input_ids)
            likely = model(ids[None]).logits[0, :-1].log_softmax(-1)
            loss = -likely.gather(-1, ids[1:, None]).sum()
            loss.backward()
            total += float(loss.detach())
        losses.append(total)
        norms.append(float(torch.nn.utils.clip_grad_norm_(trained, ADAM.clip_grad)))
        optimizer.param_groups[0]["lr"] = 0.01 * (number + 1)
        optimizer.step()
        optimizer.zero_grad()
    return norms, losses


@pytest.mark.parametrize("precision", [pytest.param("fp32", marks=pytest.mark.nightly), "bf16"])
def test_an_adapter_takes_the_memory_that_check_says_and_leaves_none(pool: Pool, precision: str) -> None:
    one = case(2, num_layers=2, dp=2)
    config = one.config(adapter={"rank": 2}, train__precision=precision)
    section = {"rank": 48, "targets": ["qkv", "fc2", "output"]}
    estimate = arch.memory_per_rank(adapters_ranks.with_adapter(config, section), one.resolved(config), 0)
    for found in pool.run(adapters_ranks.sizes, one.resolved(config), config, section, batch(1, 4)):
        assert found.added == pytest.approx(estimate.adapter_bytes, rel=0.02)
        assert abs(found.left) < 0.01 * estimate.adapter_bytes


def test_adapters_that_cannot_be_are_refused(pool: Pool) -> None:
    one = case(2, num_layers=1)
    (said,) = pool.run(adapters_ranks.refused, Layout(), one.config(adapter={"rank": 2}))
    for text, fact in zip(said, ["'one'", "rank", "model.experts", "closed", "add an adapter section"], strict=True):
        check_message(text, fact)


def test_a_trained_tower_cannot_be_shared_by_adapters(pool: Pool) -> None:
    adapter = {"rank": 2, "modules_to_save": ["norm"]}
    config = case(4, num_layers=2).config(**knobs("dense", freeze_projector=False), adapter=adapter)
    keys = "adapter.modules_to_save=norms, model.vision.freeze_projector=false"
    (said,) = pool.run(adapters_ranks.refused_with_a_trained_tower, Layout(), config)
    assert len(said) == 2
    for text in said:
        check_message(text, keys)
    with refuses(ConfigError, keys):
        check_served(config.model, config.adapter)
