"""A tower or projector that is trained in full with adapters, as by PEFT, or by Muon; the model is transformers'."""

from __future__ import annotations

import copy
import math
from functools import cache
from typing import Any, NamedTuple

import peft
import pytest
import torch

from mtrain.arch.lr import learning_rate
from mtrain.config import Config
from mtrain.config.schema.train import MuonSection
from mtrain.config.schema.vision import VisionSection
from mtrain.hf.io.peft import from_peft, to_peft
from mtrain.hf.schema.peft import PeftTensor, tensors
from mtrain.hf.schema.registry import family_of
from tests.parity.cases import Case, case
from tests.parity.compare import TOLERANCE, relative, tensor_deviation, worst
from tests.parity.image_models import Kind
from tests.parity.images import differentiated_batch, groups_of, initial, knobs, model_of, ours_of
from tests.parity.models.test_images import (
    KEY_BIAS,
    PACKED,
    PROJECTOR,
    PROJECTOR_ALONE,
    RATES,
    TRAINED,
    agreed,
    steps,
    without_key_biases,
)
from tests.parity.ranks import Arrays, train
from tests.pool import Pool

TOWER = {"freeze_tower": False}
ADAPTER: dict[str, Any] = {"rank": 3, "alpha": 7.0, "targets": ["qkv", "proj", "fc1", "fc2"]}
TARGETS = r"model\.language_model\..*(q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj)"
PARTS: dict[Kind, tuple[list[str], list[str]]] = {
    "dense": (["visual.patch_embed", "visual.pos_embed", "visual.blocks.0", "visual.blocks.1"], ["visual.merger"]),
    "deepstack": (
        ["visual.patch_embed", "visual.pos_embed", *(f"visual.blocks.{layer}" for layer in range(3))],
        ["visual.merger", "visual.deepstack_merger_list.0", "visual.deepstack_merger_list.1"],
    ),
    "gemma3": (["vision_tower"], ["multi_modal_projector"]),
    "mistral3": (["vision_tower"], ["multi_modal_projector"]),
}
"""PEFT's names of the modules of the tower, and of those of the projector."""


class Exact(NamedTuple):
    """Two steps of transformers' model with PEFT's adapters in float64, by PEFT's names."""

    before: dict[str, Any]
    losses: list[float]
    norms: list[float]
    gradients: list[dict[str, Any]]
    after: dict[str, Any]


def config_of(each: Case, kind: Kind, vision: dict[str, bool], **changes: Any) -> Config:
    rates = {key: rate for key, rate in RATES.items() if not knobs(kind, **vision)["model__vision"][_FREEZES[key]]}
    return each.config(**knobs(kind, **vision) | rates | {"adapter": ADAPTER} | changes)


_FREEZES = {"optimizer__tower_lr": "freeze_tower", "optimizer__projector_lr": "freeze_projector"}


@cache
def exact(kind: Kind, trained: tuple[tuple[str, bool], ...]) -> Exact:
    """Trains one sample at a time: numerators are added, and divided once by the step's weights of tokens."""
    vision, (tower, projector) = dict(trained), PARTS[kind]
    config = config_of(case(num_layers=2), kind, vision)
    settings = peft.LoraConfig(
        r=3,
        lora_alpha=7,
        target_modules=TARGETS,
        modules_to_save=[
            *(tower if "freeze_tower" in vision else []),
            *(projector if "freeze_projector" in vision else []),
        ],
        init_lora_weights=False,
    )
    model = peft.get_peft_model(copy.deepcopy(model_of(kind)), settings).double()
    learned = {_saved(name): each for name, each in model.named_parameters() if each.requires_grad}
    torch.manual_seed(3)
    for name, each in learned.items():
        if "lora_" in name:
            torch.nn.init.normal_(each, std=0.1)
    before = {name: each.detach().clone() for name, each in learned.items()}
    section: Any = config.optimizer
    adam = torch.optim.AdamW(groups_of(learned, section), betas=(section.beta1, section.beta2), eps=section.epsilon)
    losses, norms, gradients = [], [], []
    for step, batch in enumerate(steps(kind)):
        adam.zero_grad()
        losses.append(differentiated_batch(model, batch))
        gradients.append({name: each.grad.clone() for name, each in learned.items()})
        norms.append(float(torch.nn.utils.clip_grad_norm_(learned.values(), section.clip_grad)))
        for group in adam.param_groups:
            group["lr"] = learning_rate(step, section, config.train.num_steps) * group["share"]
        adam.step()
    return Exact(before, losses, norms, gradients, {name: each.detach().clone() for name, each in learned.items()})


def _saved(name: str) -> str:
    """Returns the name under which PEFT saves a parameter."""
    return name.replace(".modules_to_save.default", "").replace(".default", "")


def named(kind: Kind, config: Config) -> list[PeftTensor]:
    assert config.adapter is not None
    return list(tensors(family_of(model_of(kind).config.to_dict()), config.model, config.adapter))


Changes = dict[str, Any]
CASES: list[tuple[Case, Kind, dict[str, bool], Changes]] = [
    (case(4, num_layers=2), "dense", TRAINED, {}),
    (case(4, num_layers=2, tp=2, sp=True), "dense", TRAINED, PACKED),
    (case(8, num_layers=2, tp=2), "dense", TOWER, {}),
    (case(4, num_layers=2, cp=2), "dense", TRAINED, {}),
    (case(4, num_layers=2, pp=2), "dense", PROJECTOR_ALONE, {"train__recompute": "full"}),
    (case(4, num_layers=2, dp=2), "dense", TRAINED, {"layout__shard": "weights"}),
    (case(4, num_layers=2, pp=2, dp=2), "dense", TRAINED, {"train__overlap_grad_reduce": True}),
    (case(4, num_layers=3, tp=2, sp=True, cp=2), "deepstack", PROJECTOR, {}),
    (case(4, num_layers=2, tp=2, sp=True, dp=2), "gemma3", TRAINED, {"layout__shard": "weights"}),
    (case(4, num_layers=2, cp=2, pp=2), "mistral3", TRAINED, {}),
]


@pytest.mark.parametrize(
    ("each", "kind", "vision", "changes"), CASES, ids=[f"{kind}-{each}" for each, kind, _, _ in CASES]
)
def test_a_tower_trains_in_full_with_adapters_as_in_peft(
    pool: Pool, each: Case, kind: Kind, vision: dict[str, bool], changes: Changes
) -> None:
    config = config_of(each, kind, vision, **changes)
    saved = {key: value for key, value in vision.items() if key != "freeze_language_model"}
    theirs, ours = exact(kind, tuple(saved.items())), named(kind, config)
    assert {one.name for one in ours} == theirs.before.keys(), "PEFT saves the same tensors"
    start = initial(kind) | {one.key: from_peft(one, theirs.before[one.name]).numpy() for one in ours}
    outcome = agreed(pool.run(train, each.resolved(config), config, start, steps(kind)))
    for found, loss, norm in zip(outcome.steps, theirs.losses, theirs.norms, strict=True):
        assert relative(found.loss, loss) <= TOLERANCE
        assert relative(found.grad_norm, norm) <= TOLERANCE
    for of_ours, of_theirs in [
        *zip([step.gradients for step in outcome.steps], theirs.gradients, strict=True),
        (outcome.parameters, theirs.after),
    ]:
        assert of_ours is not None
        for one in ours:
            if not one.key.endswith(KEY_BIAS):  # has no gradient but rounding
                own = to_peft(one, torch.from_numpy(of_ours[one.key])).numpy()
                assert tensor_deviation(own, of_theirs[one.name].numpy()) <= TOLERANCE, one.name
    assert outcome.steps[0].gradients is not None
    assert outcome.steps[0].gradients.keys() == {one.key for one in ours}, "nothing else learns"


MUON: Changes = {"optimizer__kind": "muon", "adapter": None}
MUON_CASES: list[tuple[Case, Kind, dict[str, bool], Changes]] = [
    (case(4, num_layers=3, tp=2, sp=True, dp=2), "deepstack", TRAINED, PACKED),
    (case(4, num_layers=3, dp=2), "deepstack", PROJECTOR_ALONE, {"layout__shard": "weights"}),
    (case(4, num_layers=2, cp=2), "gemma3", TRAINED, {}),
    (case(4, num_layers=2, pp=2, dp=2), "mistral3", TRAINED, {}),
]


@pytest.mark.parametrize(
    ("each", "kind", "vision", "changes"), MUON_CASES, ids=[f"{kind}-{each}" for each, kind, _, _ in MUON_CASES]
)
def test_muon_updates_the_matrices_of_a_tower(
    pool: Pool, each: Case, kind: Kind, vision: dict[str, bool], changes: Changes
) -> None:
    config = config_of(each, kind, vision, **MUON | changes)
    theirs = exact_muon(kind, tuple(vision.items()))
    outcome = agreed(pool.run(train, each.resolved(config), config, initial(kind), steps(kind)))
    for found, loss, norm in zip(outcome.steps, theirs.losses, theirs.norms, strict=True):
        assert relative(found.loss, loss) <= TOLERANCE
        assert relative(found.grad_norm, norm) <= TOLERANCE
    assert worst(without_key_biases(outcome.parameters), without_key_biases(theirs.parameters), config) <= TOLERANCE


class ExactMuon(NamedTuple):
    losses: list[float]
    norms: list[float]
    parameters: Arrays


@cache
def exact_muon(kind: Kind, trained: tuple[tuple[str, bool], ...]) -> ExactMuon:
    """Trains transformers' model in float64: Muon updates each matrix that hidden states are multiplied by.

    Sources: as in mtrain/verify/reference/optimizer.py.
    """
    config = config_of(case(num_layers=2), kind, dict(trained), **MUON)
    model, section, vision = copy.deepcopy(model_of(kind)), config.optimizer, config.model.vision
    assert vision is not None
    assert isinstance(section, MuonSection)
    learned = {name: each for name, each in model.named_parameters() if is_learned(name, vision)}
    matrices = {name: each for name, each in learned.items() if each.ndim == 2 and not name.endswith(TABLES)}
    others = {name: each for name, each in learned.items() if name not in matrices}
    adam = torch.optim.AdamW(groups_of(others, section), betas=(section.beta1, section.beta2), eps=section.epsilon)
    shares = {name: groups_of({name: each}, section)[0]["share"] for name, each in matrices.items()}
    means = {name: torch.zeros_like(each) for name, each in matrices.items()}
    losses, norms = [], []
    for step, batch in enumerate(steps(kind)):
        model.zero_grad()
        losses.append(differentiated_batch(model, batch))
        norms.append(float(torch.nn.utils.clip_grad_norm_(learned.values(), section.clip_grad)))
        lr = learning_rate(step, section, config.train.num_steps)
        for group in adam.param_groups:
            group["lr"] = lr * group["share"]
        adam.step()
        for name, each in matrices.items():
            means[name] = section.momentum * means[name] + (1 - section.momentum) * each.grad
            direction = (1 - section.momentum) * each.grad + section.momentum * means[name]
            parts = direction.chunk(3) if ".attn.qkv." in name else [direction]
            change = torch.cat([math.sqrt(max(part.shape)) * orthogonal(part) for part in parts])
            with torch.no_grad():
                each -= lr * shares[name] * (section.update_rms * change + section.weight_decay * each)
    return ExactMuon(losses, norms, ours_of(dict(model.named_parameters()), kind))


TABLES = ("embed_tokens.weight", "lm_head.weight", "pos_embed.weight", "position_embedding.weight")


def is_learned(name: str, vision: VisionSection) -> bool:
    if not any(part in name for part in ("visual", "vision_tower", "multi_modal_projector")):
        return not vision.freeze_language_model
    is_projector = "merger" in name or "multi_modal_projector" in name
    return not (vision.freeze_projector if is_projector else vision.freeze_tower)


def orthogonal(matrix: torch.Tensor) -> torch.Tensor:
    x: torch.Tensor = matrix / torch.linalg.norm(matrix)
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x - 4.7750 * gram @ x + 2.0315 * gram @ gram @ x
    return x
