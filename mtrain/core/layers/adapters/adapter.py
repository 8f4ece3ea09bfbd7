"""The common part of all adapters: a switch, parameter names, and their slices in checkpoints."""

import contextlib
import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory
from torch import nn
from torch.utils.hooks import RemovableHandle

from mtrain.config.schema.adapter import AdapterSection
from mtrain.core.layers.own_parameters import (
    DividedModule,
    ShardedOffsets,
    divided_parameter,
    replicated_parameter,
)

LORA_A, LORA_B, MAGNITUDE = "lora_a", "lora_b", "magnitude"
"""Endings of the names of parameters with the shapes [rank, inputs], [outputs, rank] and [outputs]."""
MODULE = "_adapter"
"""Suffix of the name of an adapter, after the name of its sibling, the frozen module."""
_TABLE_DEVIATIONS = {f"embedding_{LORA_A}": 0.0, f"embedding_{LORA_B}": 1.0}
"""Initial standard deviations of the matrices of a table, as in PEFT; A has a row for each token."""


class Adapter(DividedModule):
    """Trained parameters of a frozen module, next to it in the module tree: `linear_qkv_adapter` for `linear_qkv`.

    As siblings, adapters do not change the names of frozen parameters. All parameters belong to the adapter itself,
    since gathered parameters are awaited in the call of the module that owns them.
    """

    is_switched_on = True
    """False inside `adapters_off`."""
    is_in_model = True
    """False while another set of adapters is in the model."""
    hook: RemovableHandle | None = None

    def __init__(self, section: AdapterSection, config: TransformerConfig, tp: dist.ProcessGroup) -> None:
        super().__init__(config, tp)
        self._section = section
        self.divided_axes: dict[str, int] = {}
        self._padded: set[str] = set()
        self._halved: set[str] = set()

    @property
    def is_on(self) -> bool:
        """Says whether the frozen module adds the adapter's output."""
        return self.is_switched_on and self.is_in_model

    def add_parameter(
        self,
        name: str,
        shape: tuple[int, ...],
        divided_axis: int | None,
        may_be_padded: bool = False,
        is_halved: bool = False,
    ) -> None:
        """Adds a parameter of zeros.

        Args:
            divided_axis: Axis that TP divides; None if the parameter is replicated.
            may_be_padded: Whether it has a row for each token, with the padding that TP needs.
            is_halved: Whether a rank has a part of each half of the divided axis, as for gate and up.
        """
        if divided_axis is None:
            parameter = replicated_parameter(self.config, torch.zeros(shape))
        else:
            parameter = divided_parameter(self.config, torch.zeros(shape), divided_axis)
            self.divided_axes[name] = divided_axis
        self._padded |= {name} if may_be_padded else set()
        self._halved |= {name} if is_halved else set()
        self.register_parameter(name, parameter)

    def follow(self, module: nn.Module) -> None:
        """Makes the frozen module return its output plus that of this adapter."""
        self.hook = module.register_forward_hook(self._after)

    def _after(self, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> Any:
        return self.added(module, inputs, output) if self.is_on else output

    def added(self, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> Any:
        """Returns the output of the frozen module plus the adapter's."""
        return output + self(inputs[0])

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: ShardedOffsets = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Describes the parameters for checkpoints."""
        tensors = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        for name in self._padded:
            tensors[f"{prefix}{name}"].allow_shape_mismatch = True
        for name in self._halved:
            tensors[f"{prefix}{name}"] = apply_swiglu_sharded_factory(tensors[f"{prefix}{name}"], sharded_offsets)
        return tensors


class AdapterSet:
    """The adapters of a rank's chunks, which can take turns with other sets on the same frozen modules."""

    def __init__(self, models: Iterable[nn.Module]) -> None:
        holders = [holder for model in models for holder in model.modules()]
        self._positions = [
            (holder, name, child)
            for holder in holders
            for name, child in holder.named_children()
            if isinstance(child, Adapter)
        ]

    def take_out(self) -> None:
        """Removes the adapters from the module tree; their hooks then add nothing."""
        for holder, name, adapter in self._positions:
            delattr(holder, name)
            adapter.is_in_model = False

    def put_in(self) -> None:
        """Puts the adapters back into the module tree, in the same order."""
        for holder, name, adapter in self._positions:
            holder.add_module(name, adapter)
            adapter.is_in_model = True

    def unhook(self) -> None:
        """Removes the hooks of adapters that have been taken out for good."""
        for _, _, adapter in self._positions:
            assert adapter.hook is not None, "attach registers a hook"
            adapter.hook.remove()


def is_adapter_key(key: str) -> bool:
    """Says whether a name in the model or in a checkpoint belongs to a parameter of an adapter."""
    return f"{MODULE}." in key


def first_deviation(name: str, columns: int) -> float:
    """Returns the initial standard deviation of an adapter's parameter, 0 for one that starts at zero.

    A is drawn with PEFT's variance, which depends on the columns of the whole matrix, and B starts at zero, so that the
    model starts equal to its frozen part; for a table it is the other way round.
    """
    matrix = name.rpartition(".")[2]
    # as of nn.Linear's initialization, Kaiming's uniform distribution with a = sqrt(5)
    return _TABLE_DEVIATIONS.get(matrix, 1 / math.sqrt(3 * columns) if matrix.endswith(LORA_A) else 0.0)


def has_adapters(model: nn.Module) -> bool:
    """Says whether a chunk belongs to a model trained by adapters; the chunk itself may have none."""
    return bool(getattr(model, "has_adapters", False))


def adapters_of(modules: Iterable[nn.Module]) -> Iterator[Adapter]:
    """Yields all adapters inside some modules."""
    return (child for module in modules for child in module.modules() if isinstance(child, Adapter))


@contextlib.contextmanager
def adapters_off(chunks: Iterable[nn.Module]) -> Iterator[None]:
    """Turns adapters off inside the block, for forward passes of the frozen model without gradients."""
    adapters = list(adapters_of(chunks))
    for adapter in adapters:
        adapter.is_switched_on = False
    try:
        yield
    finally:
        for adapter in adapters:
            adapter.is_switched_on = True
