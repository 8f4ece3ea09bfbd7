"""Moves tensors that autograd saves in a layer to the host, between forward and backward of the layer.

autograd passes each tensor that it saves to a hook. The memory of an offloaded layer goes to the host while the next
layer computes, once for all tensors that share it, and comes back while the next layer is in backward. Weights, small
tensors, tensors on the host, and those that other code keeps alive anyway stay on the device. Values are copied
unchanged.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, assert_never, cast

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from mtrain.arch.activations import SMALLEST_MOVED_BYTES as SMALLEST_MOVED_BYTES  # tests move less
from mtrain.core.state.host_memory import CopyStream, HostMemory, copy_from_host, copy_to_host


def move_activations(blocks: Sequence[nn.Module], num_layers: int, device: torch.device) -> HostSide:
    """Makes the first `num_layers` layers of each of a rank's transformer blocks offload their saved tensors; returns
    the host memory that they share."""
    side = HostSide(device)
    for block in blocks:
        watched, inside = _Block(side, block, num_layers), cast(Any, block)
        block.register_forward_pre_hook(watched.begin, with_kwargs=True)
        block.register_forward_hook(watched.end, always_call=True)
        last = [] if inside.final_layernorm is None else [inside.final_layernorm]
        for number, layer in enumerate([*inside.layers, *last]):
            layer.register_forward_pre_hook(functools.partial(watched.enter, number))
    return side


class _Block:
    """Observes the forward passes, with gradients, of one transformer block."""

    def __init__(self, side: HostSide, block: Any, num_layers: int) -> None:
        self._side, self._block = side, block
        self._num_layers = min(num_layers, len(block.layers))
        self._pass: MovingPass | None = None
        """Forward pass in progress; None outside of one, and during recomputation in backward."""
        self._number = 0
        """Number of the running layer; the number of layers while the final norm runs."""
        self._hooks = contextlib.ExitStack()

    def begin(self, block: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        """Starts a forward pass."""
        if not torch.is_grad_enabled():
            return
        # the caller keeps the arguments alive, and the schedule the received input, for its gradient
        inputs = [*args, *(value for name, value in options.items() if name != "hidden_states")]
        inputs.append(None if self._block.pre_process else self._block.input_tensor)
        staying = [*block.parameters(), *block.buffers(), *(value for value in inputs if isinstance(value, Tensor))]
        self._pass = MovingPass(self._side, staying)
        self._hooks.enter_context(self._pass.hooks())

    def enter(self, number: int, layer: nn.Module, args: tuple[Any, ...]) -> None:
        """Starts a layer, or the final norm."""
        if self._pass is None:
            return
        self._number = number
        self._side.follow(self._pass.begin_layer(moves=number < self._num_layers))
        if number > self._num_layers:  # later layers need not be observed
            self._close()

    def end(self, block: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Ends the forward pass, even if it has failed."""
        if self._pass is None:
            return
        left = self._pass.begin_layer(moves=False)
        if self._number < len(self._block.layers):  # after the final norm, copies can overlap the loss
            self._side.follow(left)
        self._close()

    def _close(self) -> None:
        self._hooks.close()
        self._pass = None


class HostSide:
    """Host memory for offloaded activations, shared by all layers and microbatches of a rank."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.stream = device, CopyStream(device)
        self.host = HostMemory(is_pinned=device.type == "cuda")
        self._leaving: KeptByLayer | None = None

    def follow(self, leaving: KeptByLayer) -> None:
        """Registers a layer whose copies have started; frees the memory of the layer before it."""
        if self._leaving is not None:
            self._leaving.free()
        self._leaving = leaving


class _Moved:
    """The memory of one or several tensors; freed on device and host as soon as backward needs none of them."""

    def __init__(self, tensor: Tensor, side: HostSide) -> None:
        self._side, self._dtype, self._pieces = side, tensor.dtype, list[Tensor]()
        self._size = tensor.untyped_storage().nbytes() // tensor.element_size()
        self.on_device: Tensor | None = tensor.as_strided((self._size,), (1,), 0)
        """All of the memory, [elements]; None while it is only on the host."""
        weakref.finalize(self, side.host.give_back, self._pieces).atexit = False

    def copy_to_host(self) -> None:
        """Copies to the host, inside `CopyStream.copying`; does nothing the second time."""
        if self._pieces:
            return
        assert self.on_device is not None
        self._pieces += self._side.host.take(self.on_device.nbytes)
        copy_to_host(self.on_device, self._pieces)

    def allocate(self) -> None:
        """Allocates device memory for the copy back."""
        self.on_device = torch.empty(self._size, dtype=self._dtype, device=self._side.device)

    def copy_from_host(self) -> None:
        """Copies back from the host, inside `CopyStream.copying`."""
        assert self.on_device is not None
        copy_from_host(self._pieces, self.on_device)


class KeptByLayer:
    """Tensors that autograd saves in one forward pass of one layer."""

    def __init__(self, side: HostSide, before: KeptByLayer | None) -> None:
        """Takes the host memory, and the tensors of the layer before, which is next in backward."""
        self._side, self._before = side, before
        self._memory: dict[_Moved, None] = {}
        """Memory of this layer in the order in which forward saved it."""
        self._known: list[weakref.ref[_Moved]] = []
        """Weak references after the forward pass, since backward decides how long the memory lives."""
        self._gone: Any = None
        """Event for the completion of the copies to the host."""
        self._back: Any = None
        """Event for the completion of the copies from the host."""
        self._is_wanted = self._is_needed = False

    def add(self, moved: _Moved) -> None:
        """Adds memory that autograd saves in this layer, possibly shared with a layer before it."""
        self._memory[moved] = None

    def leave(self) -> None:
        """Starts the copies to the host; nothing may be added afterwards."""
        memory, self._memory = self._memory, {}
        self._known = [weakref.ref(moved) for moved in memory]
        with self._side.stream.copying():
            for moved in memory:
                moved.copy_to_host()
        self._gone = self._side.stream.moment()

    def free(self) -> None:
        """Releases the device memory, unless backward has already asked for it; later work waits for the copies."""
        self._side.stream.wait(self._gone)
        if not self._is_wanted:
            for moved in self._living():
                moved.on_device = None

    def want(self) -> None:
        """Starts the copies from the host."""
        if self._is_wanted:
            return
        self._is_wanted = True
        gone = [moved for moved in self._living() if moved.on_device is None]
        # allocated on the compute stream, since copies begin after all work that used the memory before
        for moved in gone:
            moved.allocate()
        with self._side.stream.copying():
            for moved in gone:
                moved.copy_from_host()
        self._back = self._side.stream.moment()

    def need(self) -> None:
        """Waits for this layer, which backward has reached, and starts the copies of the layer before."""
        if self._is_needed:
            return
        self._is_needed = True
        self.want()
        self._side.stream.wait(self._back)
        if self._before is not None:
            self._before.want()

    def _living(self) -> list[_Moved]:
        return [moved for reference in self._known if (moved := reference()) is not None]


class _MovedTensor(NamedTuple):
    """Placeholder for a tensor that autograd saves."""

    moved: _Moved
    layer: KeptByLayer
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def tensor(self) -> Tensor:
        """Returns the tensor as it was."""
        self.layer.need()
        assert self.moved.on_device is not None
        return self.moved.on_device.view(self.dtype).as_strided(self.size, self.stride, self.offset)


class _TensorOfNextLayer(NamedTuple):
    """Tensor that stays on the device, in the layer after the last offloaded one, which comes next in backward."""

    value: Tensor
    layer: KeptByLayer

    def tensor(self) -> Tensor:
        """Returns the tensor as it was."""
        self.layer.need()
        return self.value


_Packed = Tensor | _MovedTensor | _TensorOfNextLayer


class MovingPass:
    """A forward pass through layers with offloaded activations."""

    def __init__(self, side: HostSide, staying: Iterable[Tensor]) -> None:
        """Takes the host memory, and the tensors that stay on the device: weights, and tensors that other code keeps
        alive until the end of backward."""
        self._side = side
        self._staying = {tensor.untyped_storage()._cdata for tensor in staying}
        self._known: dict[int, tuple[StorageWeakRef, weakref.ref[_Moved]]] = {}
        """Memory by the address of its storage, which is unique as long as the storage is referenced."""
        self._layer = KeptByLayer(side, None)
        self._moves = False

    def hooks(self) -> contextlib.AbstractContextManager[None]:
        """Returns a context in which saved tensors are inspected."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack)

    def begin_layer(self, moves: bool) -> KeptByLayer:
        """Starts the next layer; returns the tensors of the layer before, on their way to the host. A layer that is not
        offloaded (`moves` is False) only signals the beginning of its backward pass."""
        before = self._layer
        before.leave()
        self._layer, self._moves = KeptByLayer(self._side, before), moves
        return before

    def _pack(self, tensor: Tensor) -> _Packed:
        if not self._moves:
            return _TensorOfNextLayer(tensor, self._layer)
        moved = self._moved(tensor.detach())
        if moved is None:
            return tensor
        return _MovedTensor(
            moved, self._layer, tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset())
        )

    def _moved(self, tensor: Tensor) -> _Moved | None:
        """Returns the memory of a tensor; None if it stays."""
        if tensor.layout != torch.strided or tensor.device.type != self._side.device.type:
            return None
        storage = tensor.untyped_storage()
        if storage.nbytes() < SMALLEST_MOVED_BYTES or storage.nbytes() % 8 or storage._cdata in self._staying:
            return None
        known = self._known.get(storage._cdata)
        moved = None if known is None else known[1]()
        if moved is None:
            moved = _Moved(tensor, self._side)
            storage_reference: Any = StorageWeakRef
            self._known[storage._cdata] = storage_reference(storage), weakref.ref(moved)
        self._layer.add(moved)
        return moved


def _unpack(packed: _Packed) -> Tensor:
    match packed:
        case Tensor():
            return packed
        case _MovedTensor() | _TensorOfNextLayer():
            return packed.tensor()
        case _:
            assert_never(packed)
