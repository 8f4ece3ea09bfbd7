"""Tensors that claim to be on a GPU; their content is on the CPU.

Every operation on them is seen and done on the CPU, so a whole step gives its numbers, with all that depends on them:
routing, documents, the overflow of fp16. Operations that a GPU would refuse are refused here (tensors of two devices in
one operation, CPU memory in a collective of NCCL, GPU memory in one between hosts), and waits of the host are noted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from tests.plan.allocations import LiveStorages
from tests.simulated_gpu.kernels import KERNELS
from tests.simulated_gpu.transfers import Kind, note

DEVICE = torch.device("cuda", 0)
_SIZED_BY_VALUES = (
    "nonzero",
    "masked_select",
    "unique_consecutive",
    "unique_dim",
    "_unique",
    "_unique2",
    "bincount",
    "equal",
    "is_nonzero",
)
"""Operations whose output, or its size, the host has to know: they fetch a kernel's result halfway."""


MEMORY = LiveStorages()
"""Live storages of the GPU."""
HOST_GROUPS: set[str] = set()
"""Names of the process groups of gloo; the others are NCCL's."""


class SimulatedTensor(Tensor):
    """Tensor of the simulated GPU."""

    on_host: Tensor
    """Content, on the CPU."""
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, on_host: Tensor) -> SimulatedTensor:
        """Makes a GPU tensor of a tensor on the CPU."""
        made: Any = Tensor._make_wrapper_subclass(
            cls,
            on_host.shape,
            strides=on_host.stride(),
            storage_offset=on_host.storage_offset(),
            dtype=on_host.dtype,
            layout=on_host.layout,
            device=DEVICE,
        )
        made.on_host = on_host
        MEMORY.note(on_host)
        return made  # type: ignore[no-any-return]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return _run(function, args, dict(kwargs or {}))

    @property
    def data(self) -> Tensor:
        """Detached tensor, as `Tensor.data`; the setter also takes the content of the new value."""
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        assert isinstance(value, SimulatedTensor)
        Tensor.data.__set__(self, value)  # type: ignore[attr-defined]
        self.on_host = value.on_host

    def untyped_storage(self) -> torch.UntypedStorage:
        """Returns the storage of the content; views share it, as on a GPU."""
        return self.on_host.untyped_storage()

    def tolist(self) -> Any:
        """Converts the content to a list, which torch refuses for subclasses."""
        return self.cpu().tolist()

    def __repr__(self, *, tensor_contents: Any = None) -> Any:  # type: ignore[override]
        return f"SimulatedTensor({self.on_host!r})"


class SimulatedGpu(TorchDispatchMode):
    """Mode in which factory functions, too, make tensors of the GPU."""

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return _run(function, args, dict(kwargs or {}))


def _run(function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    namespace, name = function.namespace, function._schema.name.partition("::")[2]
    given = list(_tensors((args, kwargs)))
    simulated = {id(each.on_host): each for each in given if isinstance(each, SimulatedTensor)}
    wanted, is_on_gpu = kwargs.get("device"), bool(simulated)
    if wanted is not None:
        is_on_gpu, kwargs["device"] = torch.device(wanted).type == "cuda", torch.device("cpu")
    if namespace == "c10d":
        _look_at_collective(name, given, args)
    elif name in ("_to_copy", "copy_"):
        is_on_gpu = _look_at_copy(name, args, kwargs, is_on_gpu)
    elif simulated:
        _look_at_operation(function, name, given, args, kwargs)
    held_args, held_kwargs = tree_map(_held, (tuple(args), kwargs))
    result = KERNELS.get(function._schema.name, function)(*held_args, **held_kwargs)
    if not is_on_gpu and simulated and kwargs.get("non_blocking"):
        return result.pin_memory()  # as torch pins the target of such a copy
    if not is_on_gpu:
        return tree_map(lambda each: simulated.get(id(each), each) if isinstance(each, Tensor) else each, result)
    return tree_map(lambda each: _wrapped(each, simulated), result)


def _tensors(tree: Any) -> Any:
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, tuple | list):
        for each in tree:
            yield from _tensors(each)
    elif isinstance(tree, dict):
        yield from _tensors(list(tree.values()))


def _held(value: Any) -> Any:
    return value.on_host if isinstance(value, SimulatedTensor) else value


def _wrapped(value: Any, simulated: Mapping[int, SimulatedTensor]) -> Any:
    if not isinstance(value, Tensor):
        return value
    same = simulated.get(id(value))  # the output of an in-place operation
    if same is None:
        return SimulatedTensor(value)
    if same.shape != value.shape:  # the tensor was resized
        same.data = SimulatedTensor(value)
    return same


def _look_at_collective(name: str, given: Sequence[Tensor], args: Sequence[Any]) -> None:
    group = dist.ProcessGroup.unbox(next(each for each in args if isinstance(each, torch.ScriptObject)))
    if group.group_name in HOST_GROUPS:
        if any(isinstance(each, SimulatedTensor) for each in given):
            raise RuntimeError(f"gloo's {name} was given a tensor of the GPU, for which the host would wait")
        return
    for each in given:
        if not isinstance(each, SimulatedTensor):
            raise RuntimeError(f"No backend type associated with device type cpu: NCCL's {name} was given one")
        if not each.is_contiguous():
            raise RuntimeError(f"NCCL's {name} needs contiguous tensors")
    note(Kind.COLLECTIVE, name)


def _look_at_copy(name: str, args: Sequence[Any], kwargs: Mapping[str, Any], is_on_gpu: bool) -> bool:
    """Says whether the result is on the GPU."""
    if name == "copy_":
        target, source = args[:2]
        is_on_gpu, non_blocking = isinstance(target, SimulatedTensor), bool((args[2:] or [False])[0])
    else:
        target, source, non_blocking = None, args[0], bool(kwargs.get("non_blocking", False))
    if is_on_gpu == isinstance(source, SimulatedTensor):
        return is_on_gpu
    if is_on_gpu:
        if not (source.dim() == 0 and name == "copy_"):  # a number is passed with the kernel
            note(Kind.COPY if non_blocking and source.is_pinned() else Kind.WAITING_COPY, name)
    else:
        note(Kind.COPY if non_blocking and (target is None or target.is_pinned()) else Kind.READ, name)
    return is_on_gpu


def _look_at_operation(
    function: Any, name: str, given: Sequence[Tensor], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> None:
    others = [each for each in given if not isinstance(each, SimulatedTensor)]
    is_indexing = name in ("index", "index_put_", "_index_put_impl_", "_unsafe_index")
    if name == "index_put_" and _is_masked_fill(args):
        return
    for each in others:
        if is_indexing:
            note(Kind.WAITING_COPY, name)  # torch copies indices to the device itself
        elif each.dim() > 0:
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but {function} was given some on cuda:0 and one of "
                f"{list(each.shape)} on the cpu"
            )
    has_unknown_size = name == "repeat_interleave" and kwargs.get("output_size") is None
    if name == "_local_scalar_dense" or name in _SIZED_BY_VALUES or has_unknown_size:
        note(Kind.READ, name)
    elif is_indexing and any(each is not None and each.dtype in (torch.bool, torch.uint8) for each in args[1]):
        note(Kind.READ, f"{name} by a mask")


def _is_masked_fill(args: Sequence[Any]) -> bool:
    """Says whether a host number is written where a single mask says: torch then uses a kernel that needs no
    indices."""
    indices, value = args[1], args[2]
    masks = [each for each in indices if each is not None]
    return len(masks) == 1 and masks[0].dtype == torch.bool and value.numel() == 1 and value.device.type == "cpu"
