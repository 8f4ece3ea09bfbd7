"""Tables are one-to-one: each number of each global tensor has one place on disk, and any box of it can be made."""

import json
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from mtrain.base.tensor_slice import TensorSlice
from mtrain.hf.schema.registry import family_of
from mtrain.hf.schema.table import Table, read_slice, stream_tensor
from tests.hf.folders import CONFIGS, TOWERS


def table_of(name: str) -> Table:
    config = json.loads((CONFIGS | TOWERS)[name]().to_json_string(use_diff=False))
    family = family_of(config)
    return family.table(family.model(config))


@pytest.mark.parametrize("name", [*CONFIGS, *TOWERS])
def test_every_number_has_one_place(name: str) -> None:
    """DeepSeek has the layer that predicts further ahead."""
    table = table_of(name)
    numbered = {}
    for key, shape in table.shapes.items():
        numbered[key] = torch.arange(torch.Size(shape).numel()).view(shape)
    seen: dict[str, list[Tensor]] = {key: [] for key in table.shapes}
    on_disk: dict[str, Tensor] = {}
    for tensor, filled in table.tensors():
        parts = list(stream_tensor(tensor, filled.key, lambda key, wanted: wanted.of(numbered[key])))
        assert tensor.name not in on_disk
        on_disk[tensor.name] = torch.cat(parts).view(tensor.shape)
        seen[filled.key] += parts
    for key, shape in table.shapes.items():
        assert torch.equal(torch.cat(seen[key]).sort()[0], torch.arange(torch.Size(shape).numel())), key
    for filled in table.slices:
        whole = read_slice(filled, filled.at, on_disk.__getitem__)
        assert torch.equal(whole, filled.at.of(numbered[filled.key])), filled.key


@given(st.data())
def test_any_slice_is_the_same_as_that_of_the_whole(data: Any) -> None:
    table = table_of(data.draw(st.sampled_from(["mistral", "gpt-oss", "deepseek", "mixtral", "qwen3.5", "qwen3-next"])))
    filled = data.draw(st.sampled_from(table.slices))
    tensors = {one.name: torch.randn(one.shape) for one in filled.tensors}
    whole = read_slice(filled, filled.at, tensors.__getitem__)
    inside = [data.draw(st.integers(0, size - 1)) for size in filled.at.shape]
    sizes = [data.draw(st.integers(1, size - start)) for size, start in zip(filled.at.shape, inside)]
    offset = tuple(first + start for first, start in zip(filled.at.offset, inside))
    found = read_slice(filled, TensorSlice(offset, tuple(sizes)), tensors.__getitem__)
    region = tuple(slice(start, start + size) for start, size in zip(inside, sizes))
    assert torch.equal(found, whole[region])
