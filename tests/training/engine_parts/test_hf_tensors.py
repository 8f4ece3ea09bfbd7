"""Streamed weights equal, bit for bit, those that an export writes."""

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from mtrain.arch.layout import Layout
from tests.pool import Pool
from tests.training.engine_parts import hf_ranks
from tests.training.engine_parts.hf_ranks import bits_of
from tests.training.test_engine import small

CASES: dict[str, tuple[Layout, dict[str, Any]]] = {
    "tp2": (Layout(tp=2), {"layout__tp": 2, "train__precision": "bf16"}),
    "pp2": (Layout(pp=2), {"layout__pp": 2, "model__tied_embeddings": True}),
    "ep2": (
        Layout(dp=2, ep=2),
        {
            "layout__ep": 2,
            "model__qk_norm": True,
            "model__experts": {"num_experts": 4, "top_k": 2, "ffn_hidden_size": 16},
            "train__overlap_grad_reduce": True,
            "train__overlap_param_gather": True,
        },
    ),
}


# by day test_weight_deltas.py streams tensors that tp divides
@pytest.mark.parametrize("name", [pytest.param("tp2", marks=pytest.mark.nightly), "pp2", "ep2"])
def test_tensors_come_as_an_export_writes_them(pool: Pool, tmp_path: Path, name: str) -> None:
    """The tensors come on all ranks, on the first alone, and in a process that receives them in buckets."""
    layout, changes = CASES[name]
    ranks = pool.run(hf_ranks.streamed_and_exported, layout, small(**changes), str(tmp_path / "out"))
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    written = {name: (str(each.dtype), tuple(each.shape), bits_of(each)) for name, each in tensors.items()}
    first = ranks[0]
    assert {name: tuple(rest) for name, *rest in first.everywhere} == written
    assert len(first.everywhere) == len(written)
    assert all(rank.everywhere == first.everywhere for rank in ranks)
    assert first.on_first == first.received == first.everywhere
    assert [rank.on_first for rank in ranks[1:]] == [[] for _ in ranks[1:]]
    assert {rank.num_bytes for rank in ranks} == {first.num_bytes}
    size = sum(len(bits) for *_, bits in first.everywhere)
    assert size <= first.num_bytes < size + 16 * len(written)
