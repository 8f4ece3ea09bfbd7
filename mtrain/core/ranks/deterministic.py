"""Deterministic runs: what libraries read before they start, and torch's own switch (`train.deterministic`)."""

import contextlib
import os
from collections.abc import Iterator, MutableMapping

import torch

from mtrain.base.errors import ConfigError, MachineError

VARIABLES = {
    "NCCL_ALGO": ("Ring", "CollnetDirect", "CollnetChain", "^NVLS"),
    "CUBLAS_WORKSPACE_CONFIG": (":4096:8", ":16:8"),
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": ("0",),
}
"""Environment variable -> the values with which NCCL, cuBLAS or TransformerEngine adds in one order; the first one is
the default. NCCL_ALGO may list several; Tree is excluded, as its order follows from the network.

Source: megatron-core 0.19.2, megatron/training/determinism.py.
"""

_KEY = "train.deterministic=true"
_SIGN = "does not have a deterministic implementation"
"""Part of torch's message for an operation that its switch refuses."""


@contextlib.contextmanager
def deterministic(is_wanted: bool) -> Iterator[None]:
    """Makes a block's results repeat to the bit on the same device, versions and layout, if configured.

    Enter it before CUDA starts. The environment keeps the variables, since libraries have read them.

    Raises:
        ConfigError: The block used an operation of torch that cannot be deterministic.
        MachineError: A variable has another value, or this process has used CUDA without it.
    """
    if not is_wanted:
        yield
        return
    has_cuda_started: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    _set_variables(os.environ, has_cuda_started)
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    except RuntimeError as error:
        if _SIGN not in str(error):
            raise
        name = str(error).partition(_SIGN)[0].strip()
        fault = ConfigError(
            f"{_KEY} cannot be combined with {name}, which {_SIGN} in torch; remove what calls it, or set "
            "train.deterministic=false"
        )
        fault.on_every_rank = False  # another pipeline stage may not call it
        raise fault from error
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def _set_variables(environ: MutableMapping[str, str], has_cuda_started: bool) -> None:
    faults = [
        f"{name}={environ[name]} of the environment (it can be {' or '.join(values)})"
        for name, values in VARIABLES.items()
        if name in environ and not set(environ[name].split(",")) <= set(values)
    ]
    if faults:
        raise _on_this_machine(f"{_KEY} cannot be combined with {', '.join(faults)}; unset what is named here")
    missing = {name: values[0] for name, values in VARIABLES.items() if name not in environ}
    if missing and has_cuda_started:
        settings = " ".join(f"{name}={value}" for name, value in missing.items())
        raise _on_this_machine(
            f"{_KEY} sets {', '.join(missing)} before CUDA starts, but this process has used it already; start the "
            f"program with {settings}"
        )
    environ.update(missing)


def _on_this_machine(message: str) -> MachineError:
    error = MachineError(message)
    # not rank 0 alone: each machine has its own environment
    error.on_every_rank = os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", "0")) != "0"
    return error
