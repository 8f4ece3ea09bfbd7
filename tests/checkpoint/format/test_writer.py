"""Tensors written during training are read by torch's own reader, and their checksums are those of the files."""

import os
from pathlib import Path

import pytest
import torch
from blake3 import blake3
from torch.distributed.checkpoint.state_dict_loader import load

from mtrain.base.errors import DataError
from mtrain.base.tensor_slice import TensorSlice
from mtrain.checkpoint.format.hashed_file import HashedFile, read_facts
from mtrain.checkpoint.format.writer import Snapshot, write_metadata, write_shards
from mtrain.checkpoint.store.manifest import DigestAlgorithm
from mtrain.core.state.shard import Shard
from tests.messages import refuses


def parts_of(key: str, whole: torch.Tensor, cut: int) -> tuple[Shard, Shard]:
    """Returns the rows before `cut` and those from `cut` on."""
    shape, rest = tuple(whole.shape), tuple(whole.shape[1:])
    zeros = (0,) * len(rest)
    return (
        Shard(key, shape, TensorSlice((0, *zeros), (cut, *rest)), whole[:cut]),
        Shard(key, shape, TensorSlice((cut, *zeros), (shape[0] - cut, *rest)), whole[cut:]),
    )


def test_slices_of_two_ranks_are_read_by_torch(tmp_path: Path) -> None:
    torch.manual_seed(3)
    state = {"half": torch.randn(7, 3).bfloat16(), "large": torch.randn(5, 1 << 17), "bytes": torch.arange(9).byte()}
    pairs = [parts_of(key, whole, 3) for key, whole in state.items()]
    snapshot, ranks = Snapshot(), []
    for rank in (0, 1):
        live = [pair[rank]._replace(data=pair[rank].data.clone()) for pair in pairs]
        copies = snapshot.take(live)
        for part in live:
            part.data.zero_()  # training continues
        ranks.append(write_shards(tmp_path / f"__{rank}_0.distcp", copies))
    files = {name: facts for written in ranks for name, facts in written.files.items()}
    files |= write_metadata(tmp_path, [each for written in ranks for each in written.tensors])
    assert snapshot.size_bytes < 2 * state["large"].nbytes, "memory is used again"
    for name, facts in files.items():
        content = (tmp_path / name).read_bytes()
        assert (facts.size_bytes, facts.blake3) == (len(content), blake3(content).hexdigest())
        assert facts == read_facts(tmp_path / name, DigestAlgorithm.BLAKE3)
    assert {path.name for path in tmp_path.iterdir()} == files.keys()
    found = {key: torch.zeros_like(whole) for key, whole in state.items()}
    load(found, checkpoint_id=tmp_path, no_dist=True)
    for key, whole in state.items():
        assert torch.equal(found[key], whole), key


@pytest.mark.parametrize("fault", ["left out", "doubled", "another shape"])
def test_a_tensor_that_is_not_covered_is_not_listed(tmp_path: Path, fault: str) -> None:
    first, second = parts_of("w", torch.randn(6, 2), 3)
    parts = {
        "left out": [first],
        "doubled": [first, first],
        "another shape": [first, second._replace(global_shape=(7, 2))],
    }[fault]
    tensors = write_shards(tmp_path / "__0_0.distcp", parts).tensors
    with refuses(DataError):
        write_metadata(tmp_path, tensors)
    assert not (tmp_path / ".metadata").exists()


def test_large_and_small_pieces_are_hashed_in_order(tmp_path: Path) -> None:
    pieces = [os.urandom(size) for size in (10, 1 << 20, 3, (1 << 23) + 5, 0, 1 << 19)]
    with HashedFile(tmp_path / "file") as file:
        for piece in pieces:
            assert file.write(piece) == len(piece)
        facts = file.finish()
    content = b"".join(pieces)
    assert (tmp_path / "file").read_bytes() == content
    assert (facts.size_bytes, facts.blake3) == (len(content), blake3(content).hexdigest())
    with pytest.raises(FileExistsError):
        HashedFile(tmp_path / "file")
