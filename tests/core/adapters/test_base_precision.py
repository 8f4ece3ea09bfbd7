"""The precision of a frozen base: bfloat16 in float32 runs, and bfloat16 runs, whose adapters have main weights."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from mtrain.arch.layout import Layout
from mtrain.verify.core.exact import ExactJob, exact_steps
from mtrain.verify.core.samples import SamplePlan
from mtrain.verify.core.texts import texts_of
from mtrain.verify.core.weights import TABLES
from mtrain.verify.core.worker import Job, run_layout
from tests.config.samples import config
from tests.core.adapters import adapter_ranks
from tests.parity.layouts.test_precision import GRADIENT_ROUNDINGS, LOSS_ROUNDINGS, ROUNDING
from tests.pool import Pool

LORA: dict[str, Any] = {"rank": 3, "targets": ["qkv", "proj", "fc1", "fc2"]}
SMALL: dict[str, Any] = {
    "model__num_layers": 2,
    "model__vocab_size": 97,
    "model__vocab_multiple": 8,
    "model__qkv_bias": True,
    "train__micro_batch_size": 2,
    # from 64 keys on torch packs bf16 by what the processor has, and fails where ATEN_CPU_CAPABILITY names less
    "data__seq_length": 32,
}
MORE_ROUNDINGS = 12
"""Number of additional roundings in a layer: three at each of four projections."""


@pytest.mark.parametrize("layout", [Layout(), Layout(tp=2, sp=True)], ids=str)
def test_matrices_alone_are_held_in_bf16_and_are_the_rounded_ones(pool: Pool, layout: Layout) -> None:
    whole = config(adapter=LORA, **SMALL | {"train__precision": "fp32"})
    narrow = config(adapter=LORA | {"base_dtype": "bf16"}, **SMALL | {"train__precision": "fp32"})
    wide = pool.run(adapter_ranks.parameters, layout, whole)
    for before, held in zip(wide, pool.run(adapter_ranks.parameters, layout, narrow), strict=True):
        assert before.keys() == held.keys()
        frozen = [name for name in held if "_adapter." not in name]
        matrices = {name for name in frozen if held[name].dim() > 1}
        assert len(matrices) == 2 + 2 * 4
        for name, values in held.items():
            wanted = before[name].to(torch.bfloat16) if name in matrices else before[name]
            assert values.dtype == wanted.dtype, name
            assert torch.equal(values, wanted), name


@pytest.mark.parametrize(  # adapters in float32 by day under pp and cp: tests/parity
    "layout", [Layout(tp=2, sp=True), pytest.param(Layout(pp=2, cp=2), marks=pytest.mark.nightly)], ids=str
)
def test_adapters_of_a_run_in_bf16_are_near_the_oracle_and_learn_in_float32(pool: Pool, layout: Layout) -> None:
    user = config(adapter=LORA, **SMALL | {"train__precision": "bf16"})
    plan = SamplePlan(0, 1)
    ranks = pool.run(run_layout, layout, Job(user, plan))
    (step,), initial = ranks[0].steps, ranks[0].initial
    assert initial is not None
    assert step.gradients is not None
    assert step.weights is not None
    job = ExactJob(user, texts_of(user, plan).steps)
    exact = pool.run(exact_steps, Layout(), job, [initial.tensors])[0][0]
    unit = ROUNDING["bf16"]
    loss, wanted = step.values.means["main"], exact.values.means["main"]
    assert abs(loss / wanted - 1) < 2 * math.sqrt(LOSS_ROUNDINGS + MORE_ROUNDINGS) * unit
    assert step.gradients.tensors.keys() == exact.gradients.keys()
    for name, value in exact.gradients.items():
        distance = np.linalg.norm(step.gradients.tensors[name] - value) / np.linalg.norm(value)
        assert distance < 2 * math.sqrt(GRADIENT_ROUNDINGS + 2 * MORE_ROUNDINGS) * unit, name
    for name, value in step.weights.tensors.items():
        assert (value == initial.tensors[name]).all() == ("_adapter." not in name), name
    assert not [name for name in TABLES if name in step.gradients.tensors]
    for main in pool.run(adapter_ranks.main_weights, layout, user):
        assert {dtype for _, dtype in main} == {torch.float32}
        assert sum(count for count, _ in main) > 0
