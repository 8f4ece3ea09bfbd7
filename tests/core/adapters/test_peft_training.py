"""Adapters of fused projections train as PEFT trains them on transformers' model, in float64, on any layout."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import peft
import pytest
import torch
import torch.nn.functional as F
import transformers

from mtrain.arch.lr import learning_rate
from mtrain.hf.io.peft import from_peft, to_peft
from mtrain.hf.schema.peft import PeftTensor, tensors
from mtrain.hf.schema.registry import family_of
from tests.hf.megatron_names import from_huggingface
from tests.parity import ranks
from tests.parity.batches import three_steps
from tests.parity.cases import Case, case
from tests.parity.compare import TOLERANCE, at_night, relative, tensor_deviation
from tests.parity.models import test_against_transformers as plain
from tests.pool import Pool


def qwen3_next() -> Any:
    return transformers.Qwen3NextConfig(
        # float32 of small outputs under a norm is amplified rounding with a smaller epsilon
        **plain.common() | {"rms_norm_eps": 1e-2},
        head_dim=8,
        linear_num_key_heads=4,
        linear_num_value_heads=8,
        linear_key_head_dim=6,
        linear_value_head_dim=5,
        linear_conv_kernel_dim=3,
        layer_types=["linear_attention", "full_attention"] * 2,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=12,
        shared_expert_intermediate_size=16,
        pad_token_id=None,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5},
    )


def phi3() -> Any:
    theirs = {"rope_type": "default", "rope_theta": 500.0}
    return transformers.Phi3Config(**plain.common() | {"pad_token_id": None}, rope_parameters=theirs)


TARGETS: dict[Callable[[], Any], list[str]] = {
    qwen3_next: ["q_proj", "k_proj", "v_proj", "o_proj", "in_proj_qkvz", "in_proj_ba", "out_proj"],
    phi3: ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"],
}
OPTIMIZER = {"optimizer__weight_decay": 0.0, "optimizer__clip_grad": 0.05}
RANKS = {"in_proj_ba": 2, "gate_up_proj": 5}


class Exact(NamedTuple):
    """A model of transformers with PEFT's adapters, and a step in float64."""

    knobs: dict[str, Any]
    base: dict[str, Any]
    """Frozen parameters by megatron-core's names."""
    named: list[PeftTensor]
    before: dict[str, Any]
    """Pairs by PEFT's names; also gradients, and pairs after the step."""
    gradients: dict[str, Any]
    after: dict[str, Any]
    loss: float
    grad_norm: float


@cache
def exact(model_of: Callable[[], Any]) -> Exact:
    described = model_of()
    said = json.loads(described.to_json_string(use_diff=False))
    family, targets = family_of(said), TARGETS[model_of]
    section = family.model(family.as_held(said, ())).model_dump(exclude={"vocab_multiple"})
    patterns = {name: rank for name, rank in RANKS.items() if name in targets}
    adapter = {"rank": 3, "alpha": 7.0, "targets": targets, "rank_pattern": patterns}
    knobs = {f"model__{name}": value for name, value in section.items()} | OPTIMIZER | {"adapter": adapter}
    config = case(4).config(**knobs)
    torch.manual_seed(11)
    base = transformers.AutoModelForCausalLM.from_config(described, dtype=torch.float64)
    with torch.no_grad():
        for name, parameter in base.named_parameters():
            is_scale = "norm" in name and not config.model.zero_centered_norm
            torch.nn.init.normal_(parameter, mean=1.0 if is_scale else 0.0, std=0.1)
    frozen = {name: value.numpy() for name, value in from_huggingface(base.state_dict(), config.model).items()}
    settings = peft.LoraConfig(
        r=3, lora_alpha=7, target_modules=targets, rank_pattern=patterns, init_lora_weights=False
    )
    theirs = peft.get_peft_model(base, settings).double()
    pairs = {name.replace(".default", ""): each for name, each in theirs.named_parameters() if each.requires_grad}
    for each in pairs.values():
        torch.nn.init.normal_(each, std=0.1)
    before = {name: each.detach().clone() for name, each in pairs.items()}
    batch = three_steps()[0]
    tokens, labels = (torch.tensor(np.stack([getattr(s, kind) for s in batch])) for kind in ("tokens", "labels"))
    mask = torch.tensor(np.stack([sample.mask for sample in batch])) > 0
    loss = F.cross_entropy(theirs(tokens).logits[mask], labels[mask])
    loss.backward()
    gradients = {name: each.grad.clone() for name, each in pairs.items()}
    norm = float(torch.nn.utils.clip_grad_norm_(pairs.values(), config.optimizer.clip_grad))
    wanted: Any = config.optimizer
    lr = learning_rate(0, wanted, config.train.num_steps)
    torch.optim.AdamW(
        pairs.values(), lr=lr, betas=(wanted.beta1, wanted.beta2), eps=wanted.epsilon, weight_decay=0.0
    ).step()
    assert config.adapter is not None
    named = list(tensors(family, config.model, config.adapter))
    after = {name: each.detach().clone() for name, each in pairs.items()}
    return Exact(knobs, frozen, named, before, gradients, after, float(loss.detach()), norm)


CASES = [
    case(8),
    case(8, tp=2, sp=True),
    case(8, cp=2),
    case(8, cp=2, cp_comm="ulysses"),
    case(8, pp=2),
    case(4, tp=2, sp=True, cp=2, dp=2),
]
BY_DAY = (CASES[0], CASES[1])
RUNS = [(model_of, each) for model_of in TARGETS for each in CASES]


@pytest.mark.parametrize(
    ("model_of", "each"),
    [run if run[1] in BY_DAY else at_night(*run) for run in RUNS],
    ids=[f"{model_of.__name__}-{each}" for model_of, each in RUNS],
)
def test_a_pair_of_a_fused_projection_trains_as_in_peft(pool: Pool, model_of: Callable[[], Any], each: Case) -> None:
    theirs = exact(model_of)
    assert {one.name for one in theirs.named} == theirs.before.keys(), "PEFT has the same modules"
    config = each.config(**theirs.knobs)
    start = theirs.base | {one.key: from_peft(one, theirs.before[one.name]).numpy() for one in theirs.named}
    outcome = pool.run(ranks.train, each.resolved(config), config, start, three_steps()[:1])[0]
    (step,) = outcome.steps
    assert relative(step.loss, theirs.loss) <= TOLERANCE
    assert relative(step.grad_norm, theirs.grad_norm) <= TOLERANCE
    for of_ours, of_theirs in ((step.gradients, theirs.gradients), (outcome.parameters, theirs.after)):
        assert of_ours is not None
        for one in theirs.named:
            found = to_peft(one, torch.from_numpy(of_ours[one.key])).numpy()
            assert tensor_deviation(found, of_theirs[one.name].numpy()) <= TOLERANCE, one.name
    assert step.gradients is not None
    assert step.gradients.keys() == {one.key for one in theirs.named}, "nothing else learns"
