"""The rank side of the tests of dispatchers: a layer of experts whose tensors have no elements."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

import torch
from megatron.core.tensor_parallel import mappings
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.func import functional_call

from mtrain.config import Config
from mtrain.core.layers.build import build_with
from mtrain.core.layers.moe.layer import ExpertsLayer
from mtrain.core.ranks.groups import Groups


def read_by_the_host(groups: Groups, config: Config) -> bool:
    """Says whether the first layer of experts, forward and backward, reads an element of a tensor on the host; its
    tensors have no elements."""
    chunk = build_with("torch", config, groups)
    layer = next(module for module in chunk.modules() if isinstance(module, ExpertsLayer))
    with FakeTensorMode(), _without_transfers():
        shapes = {name: (each.shape, each.dtype) for name, each in layer.named_parameters()}
        state = {name: torch.empty(shape, dtype=dtype, requires_grad=True) for name, (shape, dtype) in shapes.items()}
        sizes = config.data.seq_length, 2, config.model.hidden_size
        hidden = torch.empty(sizes, dtype=torch.bfloat16, requires_grad=True)
        try:
            output, _ = functional_call(layer, state, (hidden,))
            output.sum().backward()
        except (DataDependentOutputException, DynamicOutputShapeException):
            return True
    assert all(each.grad is not None and each.grad.shape == each.shape for each in (hidden, *state.values()))
    return False


@contextlib.contextmanager
def _without_transfers() -> Iterator[None]:
    """Lets collectives leave their outputs as they are, whose sizes the caller has chosen."""
    with (
        mock.patch.object(torch.distributed, "all_to_all_single"),
        mock.patch.object(mappings, "dist_all_gather_func"),
        mock.patch.object(mappings, "dist_reduce_scatter_func"),
    ):
        yield
