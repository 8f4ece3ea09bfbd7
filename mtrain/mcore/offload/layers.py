"""Layers of a model that move what they keep, and when one ends and the next begins."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from mtrain.mcore.offload.activations import HostSide, KeptByLayer, MovingPass


def move_activations(blocks: Sequence[nn.Module], num_layers: int, device: torch.device) -> HostSide:
    """Makes the first layers of each of a rank's transformer blocks move what they keep for backward.

    Args:
        blocks: TransformerBlocks of megatron-core, one for each virtual stage.
        num_layers: Number of layers of each, or all where there are fewer.
        device: Device that computes.

    Returns:
            The host memory that they share.
    """
    departures = _Departures(HostSide(device))
    for block in blocks:
        watched, inside = _Block(departures, block, num_layers), cast(Any, block)
        block.register_forward_pre_hook(watched.begin, with_kwargs=True)
        block.register_forward_hook(watched.end, always_call=True)
        last = [] if inside.final_layernorm is None else [inside.final_layernorm]
        for number, layer in enumerate([*inside.layers, *last]):
            layer.register_forward_pre_hook(functools.partial(watched.enter, number))
    return departures.side


class _Departures:
    """State that the blocks of a rank share."""

    def __init__(self, side: HostSide) -> None:
        self.side = side
        self._leaving: KeptByLayer | None = None

    def follow(self, leaving: KeptByLayer) -> None:
        """Notes a layer whose copies have started; frees the layer before it, whose copies had a layer's time."""
        if self._leaving is not None:
            self._leaving.free()
        self._leaving = leaving


class _Block:
    """A transformer block that is observed while it runs forward with gradients."""

    def __init__(self, departures: _Departures, block: Any, num_layers: int) -> None:
        self._departures, self._block = departures, block
        self._num_layers = min(num_layers, len(block.layers))
        self._pass: MovingPass | None = None
        """Forward pass in progress; None outside of one, and where layers run a second time in backward."""
        self._number = 0
        """Number of the running layer; the number of layers while the norm after them runs."""
        self._hooks = contextlib.ExitStack()

    def begin(self, block: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        """Starts a forward pass."""
        if not torch.is_grad_enabled():
            return
        # given to all layers, and held by the caller; the schedule holds what a stage receives, for its gradient
        given = [*args, *(value for name, value in options.items() if name != "hidden_states")]
        given.append(None if self._block.pre_process else self._block.input_tensor)
        staying = [*block.parameters(), *block.buffers(), *(each for each in given if isinstance(each, Tensor))]
        self._pass = MovingPass(self._departures.side, staying)
        self._hooks.enter_context(self._pass.hooks())

    def enter(self, number: int, layer: nn.Module, args: tuple[Any, ...]) -> None:
        """Starts a layer, or the norm after the last one."""
        if self._pass is None:
            return
        self._number = number
        self._departures.follow(self._pass.begin_layer(moves=number < self._num_layers))
        if number > self._num_layers:  # nothing that follows needs to be observed
            self._close()

    def end(self, block: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Ends the forward pass, also when it has failed."""
        if self._pass is None:
            return
        left = self._pass.begin_layer(moves=False)
        if self._number < len(self._block.layers):  # after the norm, copies have the time of the loss, too
            self._departures.follow(left)
        self._close()

    def _close(self) -> None:
        self._hooks.close()
        self._pass = None
