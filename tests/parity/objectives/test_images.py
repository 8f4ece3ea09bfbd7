"""Distillation from a teacher that reads the images through its own tower: loss and gradients are transformers' own."""

from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.parity import teacher_ranks
from tests.parity.cases import Case, case
from tests.parity.compare import TOLERANCE, relative, worst
from tests.parity.images import MIXED, differentiated, drawn, initial, model_of, seen
from tests.parity.models.test_images import LENGTHS, PACKED, TRAINED, config_of
from tests.pool import Pool

COEFFICIENT = 0.5
DISTILLED: dict[str, Any] = {
    "loss__teacher": {"checkpoint": "not read here"},
    "loss__side_terms": {"kl": {"function": "distillation", "coefficient": COEFFICIENT}},
}


@cache
def batch() -> Any:
    return drawn(MIXED, 1, LENGTHS)


def logits(model: Any, sample: Any) -> Tensor:
    ids = torch.from_numpy(sample.tokens)[None]
    given = seen(model.config.model_type, sample.images, ids.shape[1])
    found: Tensor = model(input_ids=ids, use_cache=False, **given).logits[0]
    return found


@cache
def exact() -> Any:
    """Returns loss and gradients of Qwen3.5, taught by Qwen3.5 with experts."""
    teacher = model_of("experts")

    def loss(model: Any) -> Tensor:
        sums = []
        for sample in batch():
            own = logits(model, sample)
            with torch.no_grad():
                taught = logits(teacher, sample).log_softmax(-1)
            divergence = F.kl_div(own.log_softmax(-1), taught, reduction="none", log_target=True).sum(-1)
            losses = F.cross_entropy(own, torch.from_numpy(sample.labels), reduction="none")
            sums.append(((losses + COEFFICIENT * divergence) * torch.from_numpy(sample.mask)).sum())
        return torch.stack(sums).sum() / sum(float(sample.mask.sum()) for sample in batch())

    return differentiated("dense", loss)


@pytest.mark.parametrize(
    ("each", "changes"),
    [
        (case(4, num_layers=2, tp=2, sp=True, cp=2), {}),
        (case(num_layers=2, pp=2, dp=2), PACKED),
    ],
    ids=["tp2-sp-cp2", "pp2-dp2, packed"],
)
def test_a_teacher_sees_the_images_through_its_own_tower(pool: Pool, each: Case, changes: dict[str, Any]) -> None:
    config = config_of(each, "dense", TRAINED, **DISTILLED, **changes)
    teacher = config_of(each, "experts", {}, **changes)
    given = (config, initial("dense"), teacher, initial("experts"), [batch()])
    reports = pool.run(teacher_ranks.train_with_teacher, each.resolved(config), *given)
    assert not any(report.teacher_moved for report in reports)
    loss, gradients = exact()
    (step,) = reports[0].outcome.steps
    assert relative(step.loss, loss) <= TOLERANCE
    assert worst(step.gradients, gradients, config) <= TOLERANCE
