"""Deterministic runs (`train.deterministic`): environment variables of libraries, and torch's switch."""

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
"""Values of environment variables with which NCCL, cuBLAS and TransformerEngine add in a fixed order; the first is the
default. NCCL_ALGO may list several values; Tree is excluded, since its order depends on the network.

Source: megatron-core 0.19.2, megatron/training/determinism.py.
"""

_KEY = "train.deterministic=true"
_SIGN = "does not have a deterministic implementation"
"""Part of torch's message for an operation that its switch refuses."""


@contextlib.contextmanager
def deterministic(is_wanted: bool) -> Iterator[None]:
    """Makes the results of a block repeat to the bit on the same device, versions and layout, if `is_wanted`.

    Enter it before CUDA starts. The variables stay set afterwards, since libraries have read them.

    Raises:
        ConfigError: The block used a torch operation that cannot be deterministic.
        MachineError: A variable has a forbidden value, or this process has already used CUDA without the variables.
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
        fault.on_every_rank = False  # other pipeline stages may not call the operation
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
        raise _on_this_machine(f"{_KEY} cannot be combined with {', '.join(faults)}; unset these variables")
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
    # one rank of each machine shows it, since each machine has its own environment
    error.on_every_rank = os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", "0")) != "0"
    return error
