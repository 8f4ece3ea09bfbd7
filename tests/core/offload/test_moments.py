"""Moments kept on the host: the same bits under every layout, and few of them on the device at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mtrain.arch import memory
from mtrain.arch.layout import Layout
from mtrain.core.state import host_memory
from mtrain.core.state.host_memory import HostBlocks
from tests.core.offload import moments_ranks
from tests.core.offload.moments_ranks import AT_ONCE_BYTES, SAVE_AT, Crossed
from tests.core.state.test_save_and_load import BF16, FP16, NOT_DISTRIBUTED, TIED, assert_same_standing, configured
from tests.pool import Pool

EXPERTS = {"model.experts": {"num_experts": 4, "top_k": 2, "ffn_hidden_size": 24}}
ADAPTER = {"adapter.rank": 4}
ON_HOST = {"train.offload_optimizer": True}
OVERLAPPED = {"train.overlap_grad_reduce": True, "train.overlap_param_gather": True}
ROWS: list[Any] = [
    (Layout(dp=2), BF16 | OVERLAPPED, False),
    # one rank holds a part of the table alone, and no norm
    (Layout(dp=2), TIED | {"model.num_layers": 1, "model.vocab_size": 800}, True),
    # the update does not depend on which parameters a rank updates
    pytest.param(Layout(tp=2), FP16 | NOT_DISTRIBUTED, False, marks=pytest.mark.nightly),
    pytest.param(Layout(pp=2), ADAPTER | BF16, False, marks=pytest.mark.nightly),
    pytest.param(Layout(cp=2), {}, False, marks=pytest.mark.nightly),
    pytest.param(Layout(dp=2, ep=2), EXPERTS | FP16, False, marks=pytest.mark.nightly),
]


@pytest.mark.parametrize(("layout", "changes", "counts_by_group"), ROWS, ids=str)
def test_moments_on_the_host_change_no_bit(
    pool: Pool, tmp_path: Path, layout: Layout, changes: dict[str, Any], counts_by_group: bool
) -> None:
    """No bit changes in a run, nor in one that resumes where the other was saved."""
    for rank in pool.run(moments_ranks.cross, layout, configured(**changes), tmp_path, counts_by_group):
        on_device, on_host, from_host, from_device = Crossed(*rank)
        assert on_device.saved is not None
        for saved in (on_host.saved, from_host.begin, from_device.begin):
            assert saved is not None
            assert_same_standing(on_device.saved, saved)
        for one, steps in ((on_host, on_device.steps), *((each, on_device.steps[SAVE_AT:]) for each in rank[2:])):
            assert str(one.steps) == str(steps)  # an overflow has nan for a norm
            assert_same_standing(on_device.end, one.end)


def test_few_moments_are_on_the_device_at_one_time(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device holds moments that are being updated, and those just before and after them."""
    monkeypatch.setattr(memory, "MOMENTS_AT_ONCE_BYTES", AT_ONCE_BYTES)
    layout, config = Layout(dp=2), configured(**BF16, **ON_HOST, **{"model.vocab_size": 200})  # tables are largest
    estimate = memory.memory_per_rank(config, layout, 0)
    for found in pool.run(moments_ranks.memory, layout, config):
        assert found.num_elsewhere == 0
        assert found.moments <= found.on_host < 1.1 * found.moments  # each begins in a cache line of its own
        most = max(AT_ONCE_BYTES, found.largest) + 2 * AT_ONCE_BYTES
        assert 2 * AT_ONCE_BYTES < found.at_once < 1.3 * most < 0.7 * found.moments
        assert estimate.host_bytes == pytest.approx(found.moments, rel=0.05)  # of two ranks' unequal parts the mean
        assert estimate.optimizer_bytes == pytest.approx(found.moments / 2, rel=0.05)
        assert found.at_once < estimate.update_bytes < 2 * found.at_once


def test_a_rank_may_have_none(pool: Pool) -> None:
    """Buffers are divided at their padded length: two of four ranks hold only what follows a matrix."""
    few = {"adapter.rank": 1, "adapter.targets": ["proj"], "model.num_layers": 1}
    assert pool.run(moments_ranks.num_moments, Layout(dp=4), configured(**few, **ON_HOST)) == [32, 0, 32, 0]


def test_where_the_driver_pins_no_more_memory_is_plain_and_that_is_said_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[int] = []

    def refused(size_bytes: int, purpose: str) -> torch.Tensor:
        asked.append(size_bytes)  # the warning is pinned_memory's
        return torch.empty(size_bytes, dtype=torch.uint8)

    monkeypatch.setattr(host_memory, "pinned_memory", refused)
    blocks = HostBlocks(True, "moments")
    assert [blocks.block(size).nbytes for size in (3, 4, 5)] == [3, 4, 5]
    assert asked == [3]
