"""Tables and norms that learn whole next to adapters, against PEFT's `modules_to_save` in float64: three steps of
AdamW."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np
import peft
import pytest
import torch
from torch import Tensor
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM

from mtrain.config import Config
from mtrain.hf.schema.families.dense import LLAMA, QWEN3
from mtrain.hf.schema.family import Family
from tests.parity.batches import GlobalBatch, two_steps
from tests.parity.cases import Case, case
from tests.parity.compare import TOLERANCE, relative, worst
from tests.parity.objectives.heads import by_global_name, learned
from tests.parity.ranks import Arrays, Run, train_each
from tests.pool import Pool

PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
TABLES = ["embed_tokens", "lm_head"]
RATE, DECAY, EPSILON, CLIP = 0.01, 0.1, 1e-3, 0.5
CHANGES: dict[str, Any] = {
    "optimizer__lr": RATE,
    "optimizer__min_lr": RATE,
    "optimizer__schedule": "constant",
    "optimizer__warmup_steps": 0,
    "optimizer__weight_decay": DECAY,
    "optimizer__clip_grad": CLIP,
    "adapter": {"rank": 3, "alpha": 5.0},
}


class Saved(NamedTuple):
    """What learns whole, and in which model."""

    modules: list[str]
    model: dict[str, Any]
    """Keys of the model."""
    family: Family = LLAMA


SAVED = {
    "two tables": Saved(TABLES, {"tied_embeddings": False}),
    "tied": Saved(TABLES, {"tied_embeddings": True}),
    "norms": Saved(["norm"], {"tied_embeddings": False, "qk_norm": True, "head_dim": 8}, QWEN3),
}


class Exact(NamedTuple):
    """Results of PEFT's model."""

    parameters: Arrays
    """All tensors before the first step, by our names."""
    losses: list[float]
    norms: list[float]
    gradients: list[Arrays]
    """Gradients of what learns, by step, before clipping."""
    after: Arrays
    """What learns, after the last step."""


def config_of(one: Case, name: str) -> Config:
    saved = SAVED[name]
    changes = {f"model__{key}": value for key, value in saved.model.items()}
    return one.config(**CHANGES, **changes, adapter__modules_to_save=saved.modules)


def _loss(model: Any, batch: GlobalBatch) -> Tensor:
    tokens, labels = (torch.tensor(np.stack([getattr(each, kind) for each in batch])) for kind in ("tokens", "labels"))
    mask = torch.tensor(np.stack([sample.mask for sample in batch])) > 0
    return functional.cross_entropy(model(tokens).logits[mask], labels[mask])


@cache
def exact(saved: str) -> Exact:
    """Trains PEFT's model; a tied table stays one with its `ensure_weight_tying`."""
    modules, changes, family = SAVED[saved]
    config = config_of(case(4, num_layers=2), saved)
    assert config.adapter is not None
    torch.manual_seed(11)
    described = AutoConfig.for_model(**family.config(config.model, None), pad_token_id=None)
    model = AutoModelForCausalLM.from_config(described, attn_implementation="eager").double()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.1)
    base = {name: each.detach().clone() for name, each in model.named_parameters()}
    settings = peft.LoraConfig(
        r=config.adapter.rank,
        lora_alpha=int(config.adapter.alpha),
        target_modules=PROJECTIONS,
        modules_to_save=list(modules),
        ensure_weight_tying=changes["tied_embeddings"],
        task_type="CAUSAL_LM",
    )
    adapted = peft.get_peft_model(model, settings).double()
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.normal_(0.0, 0.1)
    trained = {name: each for name, each in adapted.named_parameters() if each.requires_grad}
    start = {name: torch.from_numpy(each) for name, each in by_global_name(base, config, family).items()}
    start |= {name: each.clone() for name, each in learned(trained, config, family).items()}
    found = Exact({name: each.numpy() for name, each in start.items()}, [], [], [], {})
    # norms are not decayed here, as in Megatron-Core; PEFT leaves that to the optimizer
    groups = [
        {"params": [each for each in trained.values() if (each.dim() > 1) == is_matrix], "weight_decay": decay}
        for is_matrix, decay in ((True, DECAY), (False, 0.0))
    ]
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.95), eps=EPSILON)
    for batch in two_steps():
        optimizer.zero_grad()
        loss = _loss(adapted, batch)
        loss.backward()
        found.losses.append(loss.item())
        own = {name: each.grad for name, each in trained.items() if each.grad is not None}
        gradients = learned(own, config, family)
        found.gradients.append({name: each.clone().numpy() for name, each in gradients.items()})
        found.norms.append(float(torch.nn.utils.clip_grad_norm_(trained.values(), CLIP)))
        optimizer.step()
    found.after.update({name: each.numpy() for name, each in learned(trained, config, family).items()})
    return found


ROWS = (
    case(4, num_layers=2, pp=2, tp=2),
    case(4, num_layers=2),
    case(4, num_layers=2, cp=2, tp=2, sp=True),
    case(4, num_layers=2, dp=2),
)
BY_DAY = (("two tables", ROWS[0]), ("norms", ROWS[0]))
"""What learns, under tp and pp; norms under sp: tests/verify/parity/test_adapters.py; a tied table:
tests/core/adapters/test_peft.py."""


@pytest.mark.parametrize(
    ("saved", "one"),
    [
        pytest.param(saved, one, id=f"{saved}-{one}", marks=[] if (saved, one) in BY_DAY else [pytest.mark.nightly])
        for saved in SAVED
        for one in ROWS
    ],
)
def test_what_learns_whole_with_adapters_is_as_in_peft(pool: Pool, saved: str, one: Case) -> None:
    """Compares loss, gradient norm, every gradient and every updated weight; nothing else has changed."""
    config, wanted = config_of(one, saved), exact(saved)
    run = Run(config, wanted.parameters, two_steps())
    outcome = pool.run(train_each, one.resolved(config), [run])[0][0]
    for number, step in enumerate(outcome.steps):
        assert relative(step.loss, wanted.losses[number]) < TOLERANCE
        assert relative(step.grad_norm, wanted.norms[number]) < TOLERANCE
        assert step.gradients is not None
        assert step.gradients.keys() == wanted.gradients[number].keys()
        assert worst(step.gradients, wanted.gradients[number], config) < TOLERANCE
    assert outcome.parameters is not None
    assert worst({name: outcome.parameters[name] for name in wanted.after}, wanted.after, config) < TOLERANCE
    whole = {name for name in wanted.after if "_adapter." not in name}
    tables = {"embedding.word_embeddings.weight", "output_layer.weight"}
    of_layer = ("input_layernorm", "pre_mlp_layernorm", "self_attention.q_layernorm", "self_attention.k_layernorm")
    norms = {f"decoder.layers.{layer}.{name}.weight" for layer in range(2) for name in of_layer}
    learn = {"two tables": tables, "tied": tables - {"output_layer.weight"}}
    assert whole == learn.get(saved, norms | {"decoder.final_layernorm.weight"})
    for name, before in wanted.parameters.items():
        is_same = np.array_equal(outcome.parameters[name][: len(before)], before.astype(np.float32))
        assert is_same == (name not in wanted.after), name
