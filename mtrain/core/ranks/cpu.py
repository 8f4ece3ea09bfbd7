"""Runs megatron-core 0.16.1 on a machine without a GPU.

megatron-core names CUDA in many places that only mean "the device of this rank": factory functions with `device='cuda'`
or a device index, streams and events, RNG state, and tensor type names compared as text. `install` maps those to the
CPU by plain wrappers (a TorchFunctionMode would slow down every operation). If CUDA is present it only checks whether
TransformerEngine and apex can be used. No other module knows about this.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from mtrain.base.imports import settle_gpu_packages
from mtrain.core.ranks import cpu_collectives

_CPU = torch.device("cpu")
_FACTORIES = (
    "arange as_tensor empty empty_like eye full full_like linspace ones ones_like rand randint randn randperm tensor "
    "zeros zeros_like"
)
_NEW_FACTORIES = "new_empty new_full new_ones new_tensor new_zeros"
_installed = False


class _Stream:
    """Replaces a CUDA stream or event; all work is already done."""

    def __init__(self, *args: object, **options: object) -> None:
        pass

    def _nothing(self, *args: object) -> None:
        pass

    wait_stream = synchronize = wait_event = wait = record = _nothing

    def query(self) -> bool:
        return True

    def record_event(self, event: Any = None) -> Any:
        return self if event is None else event

    def elapsed_time(self, other: object) -> float:
        return 0.0

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *error: object) -> None:
        pass


_STREAM = _Stream()


# a plain number is a device index, which torch takes for CUDA; megatron-core passes torch.cuda.current_device()
def _names_cuda(device: object) -> bool:
    kind = type(device)
    if kind is str:
        return str(device).startswith("cuda")
    return kind is int or (isinstance(device, torch.device) and device.type == "cuda")


def _on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(factory)
    def make(*args: Any, **options: Any) -> Any:
        if options:  # these wrappers run in every factory call, and most calls name no device
            if _names_cuda(options.get("device")):
                options["device"] = _CPU
            if options.get("pin_memory"):  # pinning needs the CUDA runtime
                options["pin_memory"] = False
        return factory(*args, **options)

    return make


def _patch_factories() -> None:
    import torch.utils._device as device_mode

    device_mode._device_constructors()  # caches the original functions, which `with torch.device(...)` looks up
    for name in _FACTORIES.split():
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    for name in _NEW_FACTORIES.split():
        setattr(torch.Tensor, name, _on_cpu(getattr(torch.Tensor, name)))


def _patch_tensor() -> None:
    original_to, original_type = torch.Tensor.to, torch.Tensor.type

    # megatron-core passes the device by position or by name, and in other calls a dtype at the same position
    def to(self: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        if args and _names_cuda(args[0]):
            args = (_CPU, *args[1:])
        elif _names_cuda(options.get("device")):
            options["device"] = _CPU
        return original_to(self, *args, **options)

    def type_name(self: torch.Tensor, *args: Any, **options: Any) -> Any:
        # optimizer.py, distrib_optimizer.py and clip_grads.py compare type() with 'torch.cuda.FloatTensor'
        result = original_type(self, *args, **options)
        if not args and not options and sys._getframe(1).f_globals.get("__name__", "").startswith("megatron."):
            return str(result).replace("torch.", "torch.cuda.", 1)
        return result

    tensor: Any = torch.Tensor
    tensor.to, tensor.type = to, type_name
    tensor.cuda = lambda self, *args, **options: self
    tensor.pin_memory = lambda self, *args: self
    tensor.record_stream = lambda self, stream: None
    module: Any = torch.nn.Module
    module.cuda = lambda self, device=None: self


def _patch_cuda() -> None:
    """Replaces each name by a separate function, since torch's compiler looks up functions by identity."""
    cuda: Any = torch.cuda
    for name in ["synchronize", "set_device", "empty_cache", "set_stream"]:
        setattr(cuda, name, _returning(None))
    for name in ["current_stream", "default_stream"]:
        setattr(cuda, name, _returning(_STREAM))
    # an index, as on a GPU; the factory functions above map it to the CPU
    cuda.current_device, cuda.device_count = _returning(0), _returning(1)
    cuda.Stream = cuda.Event = _Stream
    cuda.stream = lambda stream: contextlib.nullcontext()
    # dropout on the CPU draws from torch's only generator, which the tracker of tensor_parallel/random.py saves and
    # restores by these names
    cuda.manual_seed = lambda seed: torch.default_generator.manual_seed(seed)
    cuda.get_rng_state = lambda *args, **options: torch.get_rng_state()
    cuda.set_rng_state = lambda state, *args, **options: torch.set_rng_state(state)
    cuda.nvtx.range_push, cuda.nvtx.range_pop = _returning(None), _returning(None)


def _returning(value: object) -> Callable[..., Any]:
    return lambda *args, **options: value


@contextlib.contextmanager
def _without_compile() -> Iterator[None]:
    """Turns off the compilation of small functions at megatron-core's import (`jit_fuser`), for CPUs."""
    original = torch.compile
    torch.compile = lambda function=None, *args, **options: (  # type: ignore[assignment]
        (lambda inner: inner) if function is None else function
    )
    try:
        yield
    finally:
        torch.compile = original


def install() -> None:
    """Makes megatron-core importable and runnable without CUDA; call before its first import. Idempotent."""
    global _installed
    settle_gpu_packages(torch.cuda.is_available())
    if _installed or torch.cuda.is_available():
        return
    _installed = True
    if "megatron.core.jit" in sys.modules:  # imported earlier for its data sets, so its functions are already compiled
        torch.compiler.set_stance("force_eager")
    _patch_factories()
    _patch_tensor()
    _patch_cuda()
    # at its first import jit.py stores torch.compile (jit_fuser)
    with _without_compile():
        import megatron.core.tensor_parallel.random as rng

        # these two functions use names of torch.cuda.random and torch._C that are not replaced above
        rng._get_cuda_rng_state = lambda device="cuda", clone=False, graph_safe=False: torch.get_rng_state()
        rng._set_cuda_rng_state = lambda state, device=-1, graph_safe=False: torch.set_rng_state(state)
        # with one generator, every dropout would warn "CPU RNG state changed within GPU RNG context"
        logging.getLogger(rng.__name__).addFilter(lambda record: "CPU RNG state" not in record.getMessage())
        import megatron.core.models.gpt
        import megatron.core.optimizer  # noqa: F401
        import megatron.core.transformer.moe.token_dispatcher as dispatcher

        # token_dispatcher.py imports the function by name from moe_utils.py
        dispatcher.maybe_move_tensor_to_cpu = _moved_to_host
    cpu_collectives.install()


def _moved_to_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Replaces moe_utils.py::maybe_move_tensor_to_cpu, which converts split sizes only if they are on a GPU."""
    return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor
