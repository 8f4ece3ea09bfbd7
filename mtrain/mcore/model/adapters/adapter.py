"""What all adapters have: a switch, names of their parameters, and their place in a checkpoint."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from torch import nn

from mtrain.mcore.model.own_parameters import own_places

LORA_A, LORA_B, MAGNITUDE = "lora_a", "lora_b", "magnitude"
"""How the names of parameters end: [rank, inputs], [outputs, rank], [outputs]."""
MODULE = "_adapter"
"""What is added to the name of a module for that of its adapter, which stands beside it."""


class Adapter(nn.Module):
    """Trained parameters beside a frozen module, at the same place of the tree: `linear_qkv_adapter` of `linear_qkv`.

    A sibling and not a child, so that the frozen module's own names stay those of a model without adapters. All
    parameters are the adapter's own and not those of modules in it: what waits for gathered parameters is the call of
    the module that owns them.
    """

    is_on = True

    def __init__(self, config: TransformerConfig, collection: ProcessGroupCollection) -> None:
        """
        Args:
            config: Of the model.
            collection: Groups of the ranks that hold parts of the frozen module.
        """
        super().__init__()
        self._config, self._tp = config, collection.tp
        self._divided: dict[str, int] = {}
        self._padded: set[str] = set()

    def add_parameter(
        self, name: str, shape: tuple[int, ...], divided_axis: int | None, may_be_padded: bool = False
    ) -> nn.Parameter:
        """A parameter of zeros.

        Args:
            name: Of the parameter.
            shape: On this rank.
            divided_axis: Cut over TP; None: the same on all its ranks.
            may_be_padded: Whether it has a row for each token, and so many more as TP needs.
        """
        device = "cpu" if self._config.use_cpu_initialization else torch.cuda.current_device()
        parameter: Any = nn.Parameter(torch.zeros(shape, dtype=self._config.params_dtype, device=device))
        if divided_axis is None:
            # Each rank of TP sees its own tokens under sp: by this mark finalize_model_grads sums the gradients, once.
            parameter.sequence_parallel = self._config.sequence_parallel
        else:
            # Else the gradient norm would leave out the parts of all ranks but the first.
            parameter.tensor_model_parallel = True
            parameter.partition_dim, parameter.partition_stride = divided_axis, 1
            self._divided[name] = divided_axis
        self._padded |= {name} if may_be_padded else set()
        self.register_parameter(name, parameter)
        return parameter

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Places of the parameters."""
        places = own_places(self, self._divided, self._tp, prefix, sharded_offsets, metadata)
        for name in self._padded:
            places[f"{prefix}{name}"].allow_shape_mismatch = True
        return places


def is_adapter_key(key: str) -> bool:
    """Whether a name, in the model or in a checkpoint, is of an adapter's parameter."""
    return f"{MODULE}." in key


def has_adapters(model: nn.Module) -> bool:
    """Whether an unwrapped model chunk belongs to a model that learns by adapters; it may itself have none."""
    return bool(getattr(model, "has_adapters", False))


def adapters_of(modules: Iterable[nn.Module]) -> Iterator[Adapter]:
    """All adapters inside some modules."""
    return (each for module in modules for each in module.modules() if isinstance(each, Adapter))


@contextlib.contextmanager
def adapters_off(chunks: Iterable[nn.Module]) -> Iterator[None]:
    """The frozen model alone, inside the `with` block; for forward passes without a gradient.

    Args:
        chunks: This rank's model chunks.
    """
    found = list(adapters_of(chunks))
    for adapter in found:
        adapter.is_on = False
    try:
        yield
    finally:
        for adapter in found:
            adapter.is_on = True
