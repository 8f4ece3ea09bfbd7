"""What ranks do in the tests of weights that are sent by what has changed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from mtrain import ConfigError, Datum, Engine, WeightCopy
from mtrain.api.hf_tensors import HfContent
from mtrain.base.background import started
from mtrain.config import Config
from mtrain.core.ranks.groups import Groups
from mtrain.hf.io.weight_delta import Part
from tests.training.engine_parts.hf_ranks import bits_of, group_pair
from tests.training.engine_ranks import free

ENOUGH_S = 600.0


class Following(NamedTuple):
    """How weights are sent."""

    rates: Sequence[float]
    """Learning rate of each step; a sync comes before the first and after each."""
    dtype: torch.dtype | None = None
    content: HfContent = "merged"
    everywhere: bool = False
    bucket_bytes: int = 3000


class Sync(NamedTuple):
    """What one rank sees of a sync; nothing but the number where the parts come on the first rank alone."""

    number: int
    num_bytes: int
    forms: list[str]
    """Form of each change."""
    differences: list[str]
    """Names of tensors that are not, to the bit, those of `named_hf_tensors`."""
    num_tensors: int


def followed(groups: Groups, config: Config, how: Following) -> list[Sync]:
    """Trains some steps, and compares a copy with the weights after each."""
    with free(groups), Engine(config) as engine:
        deltas = engine.weight_deltas(how.content, how.dtype, how.bucket_bytes)
        copy, found = WeightCopy(), []
        for rate in (None, *how.rates):
            if rate is not None:
                step(engine, rate)
            parts = list(deltas.parts(how.everywhere))
            found.append(_compared(engine, copy, parts, deltas.sync, how))
        return found


def step(engine: Engine, rate: float) -> None:
    """Takes a step on some tokens."""
    engine.forward_backward([Datum(range(1, 9)), Datum([5, 3, 1, 2, 9, 9])] * 4)
    engine.optim_step(lr=rate)


def _compared(engine: Engine, copy: WeightCopy, parts: list[Tensor], number: int, how: Following) -> Sync:
    changed = dict(each for part in parts for each in copy.apply(part))
    whole = dict(engine.named_hf_tensors(how.content, how.everywhere))
    if not how.everywhere and engine.rank != 0:
        assert not parts
        return Sync(number, 0, [], [], 0)
    assert list(copy.tensors) == list(whole)
    assert all(tensor is copy.tensors[name] for name, tensor in changed.items())
    precision = {"fp32": torch.float32, "bf16": torch.bfloat16}[engine.config.train.precision]
    different = []
    for name, tensor in whole.items():
        # the bias of a choice stays in float32, as inference engines hold it
        is_rounded = how.dtype is not None and tensor.dtype == precision and "e_score_correction_bias" not in name
        wanted = tensor.to(how.dtype) if is_rounded else tensor
        ours = copy.tensors[name]
        if (ours.dtype, ours.shape, bits_of(ours)) != (wanted.dtype, wanted.shape, bits_of(wanted)):
            different.append(name)
    forms = [each.form for part in parts for each in Part.decoded(part).changes]
    return Sync(number, sum(each.numel() for each in parts), forms, different, len(whole))


def broadcast(groups: Groups, config: Config) -> list[Any]:
    """Sends by a group: all weights, a step, a step that another receiver missed, all weights as one rank asks for."""
    found: list[Any] = []
    with free(groups), Engine(config) as engine:
        deltas = engine.weight_deltas(dtype=torch.bfloat16)
        copy, sender, receiver = WeightCopy(), None, None
        if engine.rank == 0:
            sender, receiver = group_pair()
        for rate, full in ((0.0, False), (0.1, False), (1e-12, False), (0.1, True), (0.0, True)):
            step(engine, rate)
            received = None if receiver is None else started(_receiving(copy, receiver), "receiver")
            num_bytes = deltas.broadcast(sender, full and engine.rank == groups.layout.world_size - 1)
            names = [] if received is None else received.result(ENOUGH_S)
            whole = dict(engine.named_hf_tensors(everywhere=False))
            is_same = all(torch.equal(copy.tensors[name], each.bfloat16()) for name, each in whole.items())
            found.append((deltas.sync, len(names), num_bytes, is_same))
        with pytest.raises(ConfigError, match="rank 0 sends the weights, but its group is None"):
            deltas.broadcast(None)
        with pytest.raises(ConfigError, match="the configuration has no adapter section"):
            engine.weight_deltas("adapter")
    return found


def _receiving(copy: WeightCopy, group: dist.ProcessGroup) -> Callable[[], list[str]]:
    return lambda: [name for name, _ in copy.receive(group)]


def interrupted(groups: Groups, config: Config) -> list[bool]:
    """Says whether syncs are full: the first, the next, one that stopped in the middle, the next, the one after it."""
    found = []
    with free(groups), Engine(config) as engine:
        deltas, copy = engine.weight_deltas(bucket_bytes=1), WeightCopy()
        for stops in (False, False, True, False, False):
            step(engine, 0.1)
            parts = deltas.parts(everywhere=True)
            first = next(parts)
            found.append(Part.decoded(first).is_full)
            copy.apply(first)
            if stops:
                continue
            for part in parts:
                copy.apply(part)
            assert copy.sync == deltas.sync
            for name, tensor in engine.named_hf_tensors():
                assert torch.equal(copy.tensors[name], tensor)
    return found
