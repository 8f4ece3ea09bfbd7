"""Imports of torch, megatron-core and optional GPU packages: faster, silent, and without unusable packages."""

import atexit
import gc
import importlib
import logging
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from typing import Any

from mtrain.base.certificate import certificate_folder, certificates
from mtrain.base.environment import program_versions
from mtrain.base.errors import MachineError
from mtrain.base.ground import found_megatron

_GPU_PACKAGES = {
    "transformer_engine": ("transformer_engine.pytorch", "transformer_engine.pytorch.optimizers"),
    "apex": ("amp_C", "apex.optimizers", "apex.multi_tensor_apply"),  # without amp_C its Adam raises when constructed
}
"""Package that megatron-core uses if it finds it -> modules that must be importable for it to work."""

_TRANSFORMER_ENGINE = {"0.16.1": ((2, 9), (2, 13)), "0.19.2": ((2, 14), (2, 21))}
"""megatron-core -> releases of TransformerEngine that it takes: oldest, first too new.

Source: 0.16.1's extra `dev` says >=2.9,<2.12, and NVIDIA's container NeMo 26.02 has 2.12 with 0.16; 0.19.2 asks for no
release, and its features need up to 2.14.
"""

_OPTIMIZERS = "transformer_engine.pytorch.optimizers"
_LOGGED = {
    # DDP then computes what it asks for, from its own arguments
    "megatron.core.distributed.distributed_data_parallel": "DistributedDataParallel: full_param_layout not provided",
    # torch has CUDA and the machine has its compiler, but no GPU; megatron-core imports it, nothing is compiled
    "torch.utils.cpp_extension": "No CUDA runtime is found",
}
"""Logger -> beginning of a message that is useless to a user."""

_faults: dict[str, str] | None = None
"""Package -> why it was left out although there is a GPU; None before `settle_gpu_packages`."""
_beyond: str | None = None
"""Fault of a TransformerEngine that stays, although megatron-core does not take its release: see certificates."""


@contextmanager
def without_collections() -> Iterator[None]:
    """Suspends garbage collection while a block imports, and exempts the block's objects from later collections.

    torch and megatron-core create a million permanent objects on import. Scanning them takes 2 of the 7 processor
    seconds of a rank that starts and ends, and delays training steps in which a collection happens.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
        atexit.register(_release_triton)


def _release_triton() -> None:
    # its bindings print 70 lines about leaks if their objects stay exempt until the end
    if "triton" in sys.modules:
        gc.unfreeze()


@contextmanager
def without_trackers() -> Iterator[None]:
    """Hides experiment trackers from a block that imports megatron-core.

    megatron-core's timers and inference engine import wandb and TensorBoard if they are installed. We call neither, and
    wandb alone takes a ninth of a rank's import time.
    """
    hidden = [name for name in ("wandb", "torch.utils.tensorboard") if name not in sys.modules]
    for name in hidden:
        sys.modules[name] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]


def _all_but(beginning: str) -> Callable[[logging.LogRecord], bool]:
    return lambda record: not record.getMessage().startswith(beginning)


def ignore_warnings_of_megatron() -> None:
    """Silences megatron-core and torch for this process; call before megatron-core is first imported.

    The causes (missing optional packages, names deprecated between the two) are ours to handle, and the user would read
    each warning once per rank.
    """
    warnings.filterwarnings("ignore", module=r"(megatron|torch)\.")
    # SyntaxWarning: Python compiles a source for the first time; the module is then the path of the file
    warnings.filterwarnings("ignore", category=SyntaxWarning, module=r".*[/\\]megatron[/\\]core[/\\]")
    for name, beginning in _LOGGED.items():
        logging.getLogger(name).addFilter(_all_but(beginning))


def settle_gpu_packages(has_gpu: bool, takes_any_version: bool = False) -> None:
    """Decides once, before megatron-core is first imported, whether it finds TransformerEngine and apex.

    megatron-core treats only an ImportError as absence. Without a GPU its optimizers would use kernels for tensors that
    do not exist, and a package that breaks in another way, such as one built for another CUDA, would end every run.
    Unusable packages are therefore hidden: any import in this process says that they are not installed.

    A release of TransformerEngine that megatron-core does not take stays if a certificate of `mtrain verify backend`
    knows it, but only for its layers: nothing has compared its optimizers.

    Args:
        takes_any_version: Whether any release of TransformerEngine may stay, as when it is to be certified.
    """
    global _faults, _beyond
    if _faults is not None:
        return
    _faults = {}
    stand_in_for_triton()
    for package, needed in _GPU_PACKAGES.items():
        if not _is_there(package):
            continue
        fault = fault_of(needed) if has_gpu else None
        if has_gpu and fault is None and package == "transformer_engine":
            _beyond = _beyond_bounds(str(getattr(sys.modules[package], "__version__", "")))
            if _beyond is not None and not (takes_any_version or _is_certified()):
                fault, _beyond = _beyond, None
            elif _beyond is not None:
                _hide(_OPTIMIZERS)
        if fault is not None:
            _faults[package] = fault
        if fault is not None or not has_gpu:
            _hide(package)


def stand_in_for_triton() -> None:
    """Lets megatron-core 0.19 be imported without triton, which only torch for GPUs contains.

    The schedules import kernels of `moe_paged_stash`, an option that is refused; nothing calls them.
    """
    if not _is_there("triton"):
        kernels: Any = types.ModuleType("megatron.core.transformer.moe.ops.paged_stash")
        kernels.__getattr__ = lambda name: None
        sys.modules.setdefault(kernels.__name__, kernels)


def faulty_gpu_packages() -> dict[str, str]:
    """Returns what is wrong with each package that was left out although there is a GPU."""
    return dict(_faults or {})


def release_beyond_bounds() -> str | None:
    """Returns what is wrong with the release of a TransformerEngine that stays; None if it is supported."""
    return _beyond


def _is_certified() -> bool:
    """Says whether any certificate is of the installed releases; mtrain/core/layers/certified.py compares the rest."""
    here, names = program_versions(), ("megatron-core", "transformer-engine")
    with suppress(MachineError):  # without a home folder there are none
        return any(
            all(each.machine.get(name) == here.get(name) for name in names)
            and any(name.startswith("te") and found.passed for name, found in each.candidates.items())
            for each in certificates(certificate_folder())
        )
    return False


def _is_there(package: str) -> bool:
    with suppress(ValueError):  # raised for a module that something put into sys.modules by hand
        return find_spec(package) is not None
    return True


def fault_of(needed: tuple[str, ...]) -> str | None:
    """Imports the modules of a package and returns what is wrong with it, if anything."""
    try:
        for name in needed:
            importlib.import_module(name)
    except Exception as error:  # whatever it raises, the package is unusable
        return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    return None


def _beyond_bounds(version: str) -> str | None:
    parts = version.split(".")[:2]
    if not all(part.isdigit() for part in parts):
        return None
    found = found_megatron()
    megatron = None if found is None else found.version
    bounds = _TRANSFORMER_ENGINE.get(str(megatron))
    if bounds is None or bounds[0] <= tuple(map(int, parts)) < bounds[1]:
        return None
    oldest, too_new = (".".join(map(str, bound)) for bound in bounds)
    taken = f"megatron-core {megatron} takes (>={oldest},<{too_new})"
    return f"version {version} is not one that {taken} without a certificate of `mtrain verify backend`"


def _hide(package: str) -> None:
    # a loaded module is found whatever its parent says, so the loaded parts of a half-broken package are hidden as well
    loaded = [name for name in sys.modules if name.startswith(f"{package}.")]
    for name in (package, *loaded):
        sys.modules[name] = None  # type: ignore[assignment]
