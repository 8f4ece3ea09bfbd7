"""Imitation of torch.cuda and NCCL on a machine without either: one GPU for each rank, whose work is done at once.

Import it before torch: the library registers the device, which torch looks for when it is loaded.
"""

from __future__ import annotations

import ctypes
import importlib.util
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

_libraries: list[ctypes.CDLL] = []
"""Library that is loaded, as the only element."""
_SOURCE = Path(__file__).with_name("gpu.cpp")


def compiled(folder: Path) -> Path:
    """Compiles the library into the folder, which takes a few seconds."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    torchs, library = Path(spec.origin).parent, folder / "simulated_gpu.so"
    libraries = [f"-L{torchs / 'lib'}", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{torchs / 'lib'}"]
    options = ["-std=c++20", "-O0", "-shared", "-fPIC", f"-I{torchs / 'include'}"]
    subprocess.run(["c++", *options, _SOURCE, "-o", library, "-Wl,--no-as-needed", *libraries], check=True)
    return library


def load(library: Path) -> None:
    """Loads the library; must be called before torch is imported."""
    import sys

    assert "torch" not in sys.modules
    _libraries.append(ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL))


def install() -> None:
    """Replaces torch's functions; must be called after torch and before megatron-core is imported."""
    import torch

    from tests.simulated_gpu.tensors import DEVICE

    assert torch.device(0) == DEVICE, "the library was not loaded before torch"
    # so that torch.tensor(..., device=...) shows its copy to the device
    torch._C._set_only_lift_cpu_tensors(True)
    # torch asks no driver whether memory is pinned before the device's first use; a rank's first use is its model
    torch.empty(1).pin_memory()
    _replace_cuda(torch)
    _replace_communication()
    # megatron-core compiles small functions when it is imported; here they run eagerly
    torchs: Any = torch
    torchs.compile = lambda function=None, *given, **options: (lambda inner: inner) if function is None else function
    _replace_bias()
    import megatron.core.tensor_parallel.random as rng

    # these go past torch.cuda
    rng._get_cuda_rng_state = lambda device="cuda", clone=False, graph_safe=False: torch.get_rng_state()
    rng._set_cuda_rng_state = lambda state, device=-1, graph_safe=False: torch.set_rng_state(state)


class _Moment:
    """Replacement of a stream or an event: everything has already happened; waits of the host are noted."""

    def __init__(self, *given: object, **options: object) -> None:
        pass

    def synchronize(self) -> None:
        from tests.simulated_gpu.transfers import Kind, note

        note(Kind.WAIT, "synchronize")

    def _nothing(self, *given: object) -> None:
        pass

    wait_stream = wait_event = wait = record = _nothing

    def query(self) -> bool:
        return True

    def record_event(self, event: Any = None) -> Any:
        return self if event is None else event

    def elapsed_time(self, other: object) -> float:
        return 0.0

    def __enter__(self) -> _Moment:
        return self

    def __exit__(self, *error: object) -> None:
        pass


def _replace_cuda(torch: Any) -> None:
    cuda, now, later = torch.cuda, _Moment(), _Moment
    constants: dict[str, object] = {
        "is_available": True,
        "is_initialized": True,
        "is_current_stream_capturing": False,
        "is_bf16_supported": True,
        "device_count": 1,
        "current_device": 0,
        "get_device_name": "a simulated GPU",
        "get_device_capability": (9, 0),
        "current_stream": now,
        "default_stream": now,
        "memory_allocated": 0,
        "max_memory_allocated": 0,
        "memory_reserved": 0,
        "max_memory_reserved": 0,
        "mem_get_info": (80 << 30, 80 << 30),
    }
    for name in [
        "_lazy_init",
        "init",
        "set_device",
        "set_stream",
        "empty_cache",
        "reset_peak_memory_stats",
        "ipc_collect",
    ]:
        constants[name] = None
    for name, value in constants.items():
        setattr(cuda, name, _returning(value))
    cuda.synchronize = lambda *given: now.synchronize()
    cuda.stream, cuda.Stream, cuda.Event = lambda stream: now, later, later
    cuda.manual_seed = lambda seed: torch.default_generator.manual_seed(seed)
    cuda.manual_seed_all = cuda.manual_seed
    # random numbers are drawn on the CPU
    cuda.get_rng_state = lambda *given, **options: torch.get_rng_state()
    cuda.set_rng_state = lambda state, *given, **options: torch.set_rng_state(state)
    cuda.cudart = _returning(SimpleNamespace(cudaHostRegister=_register, cudaHostUnregister=_unregister))
    cuda.nccl.version = _returning((2, 0, 0))
    cuda.nvtx.range_push, cuda.nvtx.range_pop = _returning(None), _returning(None)
    torch.Tensor.record_stream = lambda self, stream: None


def _register(address: int, size: int, flags: int) -> int:
    return int(_libraries[0].register_pinned(ctypes.c_void_p(address), ctypes.c_size_t(size)))


def _unregister(address: int) -> int:
    return int(_libraries[0].unregister_pinned(ctypes.c_void_p(address)))


def _replace_bias() -> None:
    """Keeps the tensor of a causal bias off the GPU: it holds nothing, and only tells attention which bias is meant."""
    import torch.nn.attention.bias as bias
    from torch.utils._python_dispatch import _disable_current_modes

    biases: Any = bias
    original = bias.causal_lower_right

    def causal_lower_right(*sizes: int) -> Any:
        with _disable_current_modes():
            return original(*sizes)

    biases.causal_lower_right = causal_lower_right


def _replace_communication() -> None:
    """Makes gloo carry what NCCL would; tensors are checked before they get there.

    Groups that are created for gloo by name are those of hosts.
    """
    import torch.distributed as dist

    from tests.simulated_gpu.tensors import HOST_GROUPS

    distributed: Any = dist
    original, new_group = dist.init_process_group, distributed.distributed_c10d.new_group

    def init_process_group(backend: str, device_id: object = None, **options: Any) -> None:
        assert backend == "nccl"
        original("gloo", **options)

    def noted(*given: Any, backend: str | None = None, **options: Any) -> Any:
        group = new_group(*given, backend=backend, **options)
        if backend == "gloo" and isinstance(group, dist.ProcessGroup):
            HOST_GROUPS.add(group.group_name)
        return group

    distributed.init_process_group = init_process_group
    distributed.new_group = distributed.distributed_c10d.new_group = noted
    distributed.distributed_c10d._get_object_coll_device = lambda group=None: "cuda"  # as for NCCL's groups


def _returning(value: object) -> Callable[..., Any]:
    return lambda *given, **options: value
