"""Model of transformers with a head, and the losses of transformers and TRL for some sequences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mtrain.config import Config
from mtrain.core.batch.datum import Datum, sample_of
from mtrain.core.layers.layer_spec import canonical_name, global_name
from mtrain.core.loss.preference.member import GroupMember, Role
from mtrain.hf.schema import peft as peft_schema
from mtrain.hf.schema.families.dense import LLAMA
from mtrain.hf.schema.family import Family
from mtrain.hf.schema.table import read_slice
from tests.parity.batches import SEQ, VOCAB, GlobalBatch

NUM_GROUPS, CENTER = 6, 0.05
_PAD = VOCAB - 1
_LENGTHS = [5, 1, 17, 9, 2, SEQ, 12, 3, 8, 20, 4, 30]
"""Number of tokens of each sequence, from one to a whole row."""
_WEIGHTS = [1.0, 0.5, 2.0, 0.25, 1.5, 3.0]
"""Weights of the pairs."""
_MARGINS = [0.0, 0.5, -0.25, 1.0, 0.0, 2.0]
_ORDER = [7, 2, 11, 4, 0, 9, 5, 10, 1, 8, 3, 6]
"""Slots of the sequences: the two of a pair are apart."""


def model_of(config: Config) -> Any:
    """Builds LlamaForSequenceClassification in float64, with every parameter drawn."""
    from transformers import LlamaConfig, LlamaForSequenceClassification

    described = LLAMA.config(config.model, None)
    torch.manual_seed(11)
    model = LlamaForSequenceClassification(LlamaConfig(**described, pad_token_id=_PAD, attn_implementation="eager"))
    model = model.double()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            values = torch.randn_like(parameter)
            parameter.copy_(1 + 0.1 * values if "norm" in name else (0.3 if "score" in name else 0.1) * values)
    return model


def by_global_name(tensors: Mapping[str, Tensor], config: Config, family: Family = LLAMA) -> dict[str, Any]:
    """Renames tensors, or their gradients, from transformers' names to ours."""
    found = {}
    for filled in family.table(config.model).slices:
        axes = 1 if "decoder.layers" in filled.key else 0
        values = read_slice(filled, filled.at, lambda name: tensors[name])
        found[global_name(filled.key, filled.at.offset[:axes])] = values.reshape(values.shape[axes:]).numpy().copy()
    return found


def data(num_labels: int, seed: int = 5) -> list[Datum]:
    """Draws sequences: 2 i and 2 i + 1 are a pair; or each has a class of its own."""
    rng = np.random.default_rng(seed)
    found = []
    for number, length in enumerate(_LENGTHS):
        group, is_second = divmod(number, 2)
        datum = Datum(rng.integers(0, _PAD, length).tolist(), weight=_WEIGHTS[group])
        if num_labels == 1:
            role: Role = "rejected" if is_second else "chosen"
            datum = replace(datum, member=GroupMember(group, role, margin=_MARGINS[group]))
        else:
            datum = replace(datum, label=int(rng.integers(0, num_labels)))
        found.append(datum)
    return found


def scattered(batch: Sequence[Datum], config: Config) -> GlobalBatch:
    """Converts the sequences to samples in the order of slots."""
    needed = ("label",) if config.loss.function == "regression" else ()
    return [sample_of(batch[number], "a sample", config, needed) for number in _ORDER]


def _rows(batch: Sequence[Datum]) -> dict[str, Tensor]:
    width = max(len(datum.input_ids) for datum in batch)
    ids = [[*datum.input_ids, *[_PAD] * (width - len(datum.input_ids))] for datum in batch]
    lengths = torch.tensor([len(datum.input_ids) for datum in batch])
    return {"input_ids": torch.tensor(ids), "attention_mask": (torch.arange(width) < lengths[:, None]).long()}


def reward_loss(batch: Sequence[Datum], model: Any) -> Tensor:
    """Computes TRL's loss of each pair, and their weighted mean."""
    from trl import RewardTrainer

    accelerator = SimpleNamespace(gather=lambda x: x, gather_for_metrics=lambda x: x)
    args = SimpleNamespace(center_rewards_coefficient=CENTER)
    losses, weights = [], []
    for chosen, rejected in zip(batch[::2], batch[1::2], strict=True):
        known = {"accelerator": accelerator, "args": args, "_total_train_tokens": 0, "_tp_size": 1, "model": model}
        trainer: Any = SimpleNamespace(**known, _metrics={"train": _Lists(), "eval": _Lists()})
        assert chosen.member is not None
        inputs = _rows([chosen, rejected]) | {"margin": torch.tensor([chosen.member.margin], dtype=torch.float64)}
        losses.append(RewardTrainer.compute_loss(trainer, model, inputs))
        weights.append(chosen.weight)
    return torch.stack(losses) @ torch.tensor(weights, dtype=torch.float64) / sum(weights)


def classification_loss(batch: Sequence[Datum], model: Any) -> Tensor:
    """Computes transformers' loss of each sequence, and their weighted mean."""
    losses = [model(**_rows([datum]), labels=torch.tensor([datum.label])).loss for datum in batch]
    weights = torch.tensor([datum.weight for datum in batch], dtype=torch.float64)
    return torch.stack(losses) @ weights / weights.sum()


def with_numbers(batch: Sequence[Datum]) -> list[Datum]:
    """Gives each sequence a number as its label."""
    numbers = np.random.default_rng(9).normal(0.0, 2.0, len(batch))
    return [
        replace(datum, member=None, label=float(np.float32(number)))
        for datum, number in zip(batch, numbers, strict=True)
    ]


def regression_loss(batch: Sequence[Datum], model: Any) -> Tensor:
    """Computes transformers' loss of each sequence, and their weighted mean."""
    numbers = [torch.tensor([datum.label], dtype=torch.float64) for datum in batch]
    losses = [model(**_rows([datum]), labels=number).loss for datum, number in zip(batch, numbers, strict=True)]
    assert model.config.problem_type == "regression"
    weights = torch.tensor([datum.weight for datum in batch], dtype=torch.float64)
    return torch.stack(losses) @ weights / weights.sum()


@torch.no_grad()
def pooled(batch: Sequence[Datum], model: Any) -> Tensor:
    """Computes the head's outputs of padded rows, [sequences, labels]."""
    logits: Tensor = model(**_rows(batch)).logits
    return logits


class _Lists(dict[str, list[float]]):
    def __missing__(self, name: str) -> list[float]:
        return self.setdefault(name, [])


def adapted(model: Any, config: Config) -> tuple[Any, dict[str, Tensor]]:
    """Wraps the model in PEFT with drawn pairs, its score trained whole; returns it and all tensors under our names."""
    import peft

    base = {name: each.detach().clone() for name, each in model.named_parameters()}
    assert config.adapter is not None
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    settings = {"r": config.adapter.rank, "lora_alpha": config.adapter.alpha, "target_modules": targets}
    found = peft.get_peft_model(model, peft.LoraConfig(**settings, task_type="SEQ_CLS")).double()
    with torch.no_grad():
        for name, parameter in found.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.2 * torch.randn_like(parameter))
    names = {
        name: torch.from_numpy(each)
        for name, each in by_global_name(base, config).items()
        if name != "output_layer.weight"
    }
    return found, names | learned(dict(found.named_parameters()), config)


def learned(tensors: Mapping[str, Tensor], config: Config, family: Family = LLAMA) -> dict[str, Tensor]:
    """Returns the trained tensors of `adapted`, or their gradients, under our names."""
    assert config.adapter is not None
    theirs = {
        name.replace(".default", "").replace(".modules_to_save", ""): each.detach() for name, each in tensors.items()
    }
    named = peft_schema.tensors(family, config.model, config.adapter)
    # a tied table has two names in files, and one among the parameters
    return {canonical_name(each.key): theirs[each.name] for each in named if each.name in theirs}
