"""Checkpoints of adapters: what they hold on every layout, and on which base models they resume."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mtrain.arch.layout import Layout
from mtrain.base.tensor_slice import TensorSlice
from mtrain.checkpoint.format.fingerprint import hash_of
from mtrain.checkpoint.format.reader import CheckpointTensors
from mtrain.checkpoint.store.directory import checkpoint_at
from mtrain.config import Config
from tests.config.samples import config
from tests.core.adapters import adapter_ranks
from tests.fault_table import Notice
from tests.pool import Pool

TARGETS = ["qkv", "proj", "fc1", "fc2", "embedding", "output"]
EXPERTS = {"num_experts": 4, "top_k": 2, "ffn_hidden_size": 16, "shared_ffn_hidden_size": 16, "first_dense_layers": 1}
SMALL = {"model__num_layers": 2, "model__vocab_size": 97, "model__vocab_multiple": 8, "train__precision": "fp32"}
DENSE = config(adapter={"rank": 3, "targets": TARGETS}, **SMALL)
MIXED = config(adapter={"rank": 3, "targets": ["qkv", "fc2", "experts"]}, model__experts=EXPERTS, **SMALL)


@pytest.mark.fault(
    "checkpoints",
    "the frozen model of saved adapters has changed by a bit",
    happens="its fingerprint is another one: the resumption is refused, and both origins are named",
    exit_code=3,
)
@pytest.mark.parametrize(
    ("user", "before", "after"),
    [
        (DENSE, Layout(tp=2, sp=True), Layout(pp=2)),
        (MIXED, Layout(dp=2, ep=2), Layout(tp=2, sp=True)),
        # as many ranks as no number of rows is divisible by
        (DENSE, Layout(dp=2), Layout(dp=3, shard="weights")),
        (MIXED, Layout(dp=4, ep=2, shard="weights"), Layout(dp=2)),
    ],
    ids=["dense", "experts", "dense to sharded", "sharded experts"],
)
def test_adapters_move_between_layouts_without_their_base(
    pool: Pool, tmp_path: Path, user: Config, before: Layout, after: Layout, notice: Notice
) -> None:
    saved, fingerprint = pool.run(adapter_ranks.save, before, user, tmp_path)[0]
    with notice:
        loaded = pool.run(adapter_ranks.load, after, user, tmp_path)
    assert saved is not None
    assert loaded[0].weights is not None
    assert loaded[0].weights.keys() == saved.keys()
    for name, values in saved.items():
        rows = user.model.vocab_size if name.startswith(("embedding", "output")) else len(values)
        assert torch.equal(loaded[0].weights[name][:rows], values[:rows]), name
    assert {each.fingerprint for each in loaded} == {fingerprint}
    entry = checkpoint_at(tmp_path).entry
    assert entry is not None
    assert entry.manifest.base is not None
    assert entry.manifest.base.fingerprint == fingerprint
    keys = [key for key in CheckpointTensors(entry.path).tensors if not key.startswith("rng.")]
    assert keys
    assert all("_adapter." in key for key in keys)
    for rank in loaded:
        changed, whole = rank.refusals
        assert "is not the one that the adapters" in changed
        assert "contains only adapters" in whole
    assert notice.exit_code == 3


@pytest.mark.parametrize("layout", [Layout(), Layout(tp=2, sp=True)], ids=str)
def test_adapters_can_be_switched_off(pool: Pool, layout: Layout) -> None:
    for found in pool.run(adapter_ranks.logits, layout, DENSE):
        assert torch.equal(found["off"], found["plain"])
        assert torch.equal(found["on"], found["on again"])
        assert not torch.allclose(found["on"], found["off"], atol=1e-3)


def test_a_fingerprint_is_the_sum_of_its_parts_and_knows_bits_places_and_names() -> None:
    values = torch.randn(6, 5, generator=torch.Generator().manual_seed(0))
    whole = int(hash_of("a", values, TensorSlice.whole((6, 5)), (6, 5)))

    def of_part(rows: slice, columns: slice) -> int:
        part = values[rows, columns].contiguous()
        return int(hash_of("a", part, TensorSlice((rows.start, columns.start), tuple(part.shape)), (6, 5)))

    parts = [of_part(rows, columns) for rows in (slice(0, 2), slice(2, 6)) for columns in (slice(0, 3), slice(3, 5))]
    assert (sum(parts) - whole) % 2**64 == 0
    others = {
        int(hash_of("b", values, TensorSlice.whole((6, 5)), (6, 5))),
        int(hash_of("a", values.flip(0), TensorSlice.whole((6, 5)), (6, 5))),
        int(hash_of("a", torch.nextafter(values, values + 1), TensorSlice.whole((6, 5)), (6, 5))),
        int(hash_of("a", values.to(torch.bfloat16), TensorSlice.whole((6, 5)), (6, 5))),
    }
    assert whole not in others
    assert len(others) == 4
