"""Groups of answers that are hard on a preference loss, and TRL's results for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mtrain.config import Config
from mtrain.core.batch.sample import Sample, shifted
from mtrain.core.loss.preference.member import GroupMember, Role
from tests.parity.batches import SEQ, VOCAB, GlobalBatch
from tests.reference import Parameters, logits_of
from tests.trl_losses import Answer, Trl

NUM_GROUPS = 6
OPTIONS: dict[str, dict[str, Any]] = {
    "dpo": {"beta": 0.3, "label_smoothing": 0.1},
    "ipo": {"beta": 0.4},
    "kto": {"beta": 0.3, "desirable_weight": 0.7},
    "orpo": {"beta": 0.5},
    "simpo": {"beta": 2.0, "gamma": 0.7},
}
"""Options by loss; none has its default value."""
_LENGTHS = [5, 1, 17, 9, 2, 30, 12, 3, 8, 1, 4, 20]
"""Number of tokens of each answer, down to one."""
_WEIGHTS = [1.0, 0.5, 2.0, 0.25, 1.5, 3.0]
"""Weights of the pairs."""
_ORDER = [7, 2, 11, 4, 0, 9, 5, 10, 1, 8, 3, 6]
"""Slots of the sequences: the two of a pair are apart."""


def sequences(kind: str, seed: int = 5) -> GlobalBatch:
    """Draws sequences: 2 i and 2 i + 1 are a pair; for kto an answer and a mismatched one."""
    rng = np.random.default_rng(seed)
    found = []
    for number, length in enumerate(_LENGTHS):
        group, is_second = divmod(number, 2)
        role: Role = "rejected" if is_second else "chosen"
        if kind == "kto":
            role = "mismatched" if is_second else "rejected" if group % 3 == 0 else "chosen"
        prompt = int(rng.integers(2, SEQ - 30 + 2)) if length == 30 else int(rng.integers(1, SEQ - length))
        mask = np.r_[np.zeros(prompt - 1), np.ones(length)]
        weight = 1.0 if kind == "kto" else _WEIGHTS[group]
        sample = shifted(rng.integers(0, VOCAB, prompt + length), mask, weight)
        found.append(replace(sample, member=GroupMember(group, role, 0.0)))
    return found


def scattered(batch: GlobalBatch) -> GlobalBatch:
    """Sorts the batch into the order of slots."""
    return [batch[number] for number in _ORDER]


def answer_of(sample: Sample) -> Answer:
    """Converts a sample to TRL's form."""
    return Answer([*sample.tokens.tolist(), int(sample.labels[-1])], [0, *sample.mask.astype(int).tolist()])


def with_references(batch: GlobalBatch, model: Callable[[Tensor], Tensor], is_mean: bool) -> GlobalBatch:
    """Returns the batch with the scores of a reference model."""
    found = []
    for sample in batch:
        log_probs = model(torch.from_numpy(sample.tokens)[None])[0].log_softmax(-1)
        likely = log_probs.gather(1, torch.from_numpy(sample.labels)[:, None])[:, 0] * torch.from_numpy(sample.mask)
        score = likely.sum().item() / (sample.mask.sum() if is_mean else 1)
        assert sample.member is not None
        found.append(replace(sample, member=replace(sample.member, reference=float(score))))
    return found


def model_of(parameters: Mapping[str, Any], config: Config) -> tuple[Callable[[Tensor], Tensor], Parameters]:
    """Builds the reference's model in float64, and returns its leaves, too."""
    leaves = {name: torch.from_numpy(np.asarray(value)).double().requires_grad_() for name, value in parameters.items()}
    return lambda ids: logits_of(leaves, config.model, ids), leaves


def trl_loss(kind: str, batch: GlobalBatch, trl: Trl) -> Tensor:
    """Computes the loss of a global batch: the weighted mean over pairs, each of which TRL sees alone."""
    if kind == "kto":
        answers = [sample for sample in batch if _role(sample) != "mismatched"]
        labels = [_role(sample) == "chosen" for sample in answers]
        moved = [answer_of(sample) for sample in batch if _role(sample) == "mismatched"]
        return trl.kto([answer_of(each) for each in answers], labels, moved, undesirable_weight=1.0, **OPTIONS[kind])
    losses = [
        one.weight * _loss_of_pair(kind, trl, answer_of(one), answer_of(other))
        for one, other in zip(batch[::2], batch[1::2], strict=True)
    ]
    mean: Tensor = torch.stack(losses).sum() / sum(sample.weight for sample in batch[::2])
    return mean


def _loss_of_pair(kind: str, trl: Trl, chosen: Answer, rejected: Answer) -> Tensor:
    options = dict(OPTIONS[kind])
    if kind == "simpo":
        options = {"beta": options["beta"], "simpo_gamma": options["gamma"], "label_smoothing": 0.0}
    if kind == "dpo" and options.pop("label_smoothing"):
        # TRL has no conservative DPO: it is two of its losses, the second with the pair exchanged
        ways = [([chosen], [rejected]), ([rejected], [chosen])]
        right, wrong = (trl.pairs("dpo", *way, loss_types=["sigmoid"], **options) for way in ways)
        share: float = OPTIONS["dpo"]["label_smoothing"]
        return (1 - share) * right + share * wrong
    if kind in ("dpo", "ipo"):
        types = {"dpo": "sigmoid", "ipo": "ipo"}
        return trl.pairs("dpo", [chosen], [rejected], loss_types=[types[kind]], label_smoothing=0.0, **options)
    return trl.pairs(kind, [chosen], [rejected], **options)


def naive_loss(kind: str, batch: GlobalBatch, trl: Trl) -> Tensor:
    """Averages the means of microbatches of two groups each."""
    size = 4
    parts = [batch[start : start + size] for start in range(0, len(batch), size)]
    return torch.stack([trl_loss(kind, part, trl) for part in parts]).mean()


def _role(sample: Sample) -> str:
    assert sample.member is not None
    return sample.member.role
