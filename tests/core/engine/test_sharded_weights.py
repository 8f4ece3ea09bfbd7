"""Faults of divided weights are seen, and torch's fully_shard sums as configured."""

from functools import cache
from typing import Any

import pytest
import torch

from mtrain.arch.layout import Layout
from tests.core.engine.reduced_ranks import reduced
from tests.core.engine.sharded_weights_ranks import (
    FAULTS,
    begins_rounded,
    remembered_passes,
    sums_of_torch,
    traffic,
    train_with,
)
from tests.parity.batches import two_steps
from tests.parity.cases import case, lean
from tests.parity.compare import Deviation, between, deviation, initial_parameters, run_oracle
from tests.parity.ranks import Run
from tests.pool import Pool

OF_TP, OF_ADAPTERS = {"replicas in the norm", "sums over tp"}, ("mean of adapters",)
WEIGHTS = {"layout__shard": "weights", "loss__chunk_tokens": 7, "model__vocab_size": 64, "model__vocab_multiple": 8}


@cache
def found(pool: Pool, has_tp: bool) -> dict[str | None, Deviation]:
    """Measures a sound run, and one with each fault of the layout; all in one launch of ranks."""
    one = lean(case(4, tp=2, sp=True, dp=2) if has_tp else case(4, dp=2))
    faults = [None, *(name for name in FAULTS if (name in OF_TP) == has_tp and name not in OF_ADAPTERS)]
    config, batches = one.config(**WEIGHTS), two_steps()
    run = Run(config, initial_parameters(config), batches)
    outcomes = pool.run(train_with, one.resolved(config), faults, run)[0]
    oracle = run_oracle(config, batches)
    return {name: deviation(each, oracle, config) for name, each in zip(faults, outcomes, strict=True)}


@pytest.mark.parametrize("fault", [name for name in FAULTS if name not in OF_ADAPTERS])
def test_a_fault_of_divided_weights_is_seen(pool: Pool, fault: str) -> None:
    everyone = found(pool, fault in OF_TP)
    everyone[None].assert_below()
    assert max(everyone[fault]) > 1e-3


EVERYTHING = ["qkv", "proj", "fc1", "fc2", "embedding", "output"]
ADAPTED: dict[str, dict[str, Any]] = {
    "bf16": {"adapter": {"rank": 3, "targets": EVERYTHING}, "train__precision": "bf16"},
    "tables in fp16": {
        "adapter": {"rank": 1, "targets": ["qkv"], "modules_to_save": ["embedding", "output", "norms"]},
        "train__precision": "fp16",
        "train__initial_loss_scale": 2.0**10,
        "train__recompute": "full",
    },
    "base in bf16": {"adapter": {"rank": 3, "targets": EVERYTHING, "base_dtype": "bf16"}, "train__recompute": "full"},
}


@pytest.mark.parametrize("name", ADAPTED)
def test_adapters_have_the_bits_that_they_have_on_a_whole_base(pool: Pool, name: str) -> None:
    one = lean(case(4, dp=2))
    config, faults = one.config(**WEIGHTS | ADAPTED[name]), [None, *OF_ADAPTERS]
    # sharded weights have no buffers that products could add to, which rounds otherwise
    apart = {"layout__shard": "optimizer", "model__megatron": {"gradient_accumulation_fusion": False}}
    whole = one.config(**WEIGHTS | ADAPTED[name] | apart)
    batches = two_steps()
    (expected,) = pool.run(train_with, one.resolved(whole), [None], Run(whole, None, batches))[0]
    found = pool.run(train_with, one.resolved(config), faults, Run(config, None, batches))[0]
    seen = {fault: max(between(each, expected, config)) for fault, each in zip(faults, found, strict=True)}
    assert seen.pop(None) == 0
    assert min(seen.values()) > 1e-3, seen


def test_a_table_outside_its_unit_has_the_gradient_of_one_rank(pool: Pool) -> None:
    assert found(pool, False)["table outside its unit"].gradient > 0.3


def test_passes_in_which_nothing_learns_leave_nothing(pool: Pool) -> None:
    """A teacher, a service and a validation never have the backward pass after which torch forgets them."""
    one = lean(case(4, dp=2))
    config = one.config(layout__shard="weights")
    for first, *others in pool.run(remembered_passes, one.resolved(config), config, two_steps()[0]):
        assert min(first) > 0
        assert others == [first] * 2


def test_a_half_precision_run_begins_with_the_main_weights_of_whole_ones(pool: Pool) -> None:
    one = lean(case(4, dp=2))
    for shard in ("optimizer", "weights"):
        config = one.config(layout__shard=shard, train__precision="bf16")
        assert all(pool.run(begins_rounded, one.resolved(config), config))


@pytest.mark.parametrize("dp", [2, 3])
def test_torch_sums_gradients_where_each_unit_is_told_so(pool: Pool, dp: int) -> None:
    for gradient, expected in pool.run(sums_of_torch, Layout(dp=dp), "all"):
        assert torch.allclose(gradient, expected, rtol=1e-6, atol=0)
    for gradient, expected in pool.run(sums_of_torch, Layout(dp=dp), "root"):
        assert torch.allclose(gradient * dp, expected, rtol=1e-6, atol=0), "fully_shard's settings are recursive now"


def test_a_pass_gathers_layers_twice_and_sums_their_gradients_once(pool: Pool) -> None:
    """The output layer stays gathered from the forward pass to the backward pass."""
    one = lean(case(4, dp=2))
    config = one.config(layout__shard="weights")
    for seen in pool.run(traffic, one.resolved(config), config, two_steps()[0]):
        assert seen.gathered == seen.num_passes * (2 * seen.of_others + seen.of_table)
        assert seen.summed == seen.num_passes * (seen.of_others + seen.of_table)
        assert seen.num_passes > 1


def test_a_half_precision_run_adds_gradients_in_float32(pool: Pool) -> None:
    one = lean(case(4, dp=2))
    config = one.config(**WEIGHTS, train__precision="bf16", model__tied_embeddings=True)
    for seen in pool.run(reduced, one.resolved(config), config, two_steps()[0]):
        kinds = {each.dtype for each in seen if "reduce_scatter" in each.kind}
        assert kinds == {"torch.float32"}, seen
