"""Imports of torch, megatron-core and optional GPU packages: faster, without noise, and without unusable packages."""

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
"""Package that megatron-core uses if present -> modules that must be importable for the package to work."""

_TRANSFORMER_ENGINE = {"0.16.1": ((2, 9), (2, 13)), "0.19.2": ((2, 14), (2, 21))}
"""Release of megatron-core -> supported releases of TransformerEngine: the oldest, and the first that is too new.

Source: the extra `dev` of 0.16.1 says >=2.9,<2.12, and NVIDIA's container NeMo 26.02 has 2.12 with 0.16; 0.19.2 states
no release, and its features need up to 2.14.
"""

_OPTIMIZERS = "transformer_engine.pytorch.optimizers"
_LOGGED = {
    # DDP then computes it from its other arguments
    "megatron.core.distributed.distributed_data_parallel": "DistributedDataParallel: full_param_layout not provided",
    # torch has CUDA and the machine has its compiler, but no GPU; megatron-core imports the module and compiles nothing
    "torch.utils.cpp_extension": "No CUDA runtime is found",
}
"""Logger -> beginning of a message that users do not need."""

_faults: dict[str, str] | None = None
"""Package -> why it is hidden despite a GPU; None before `settle_gpu_packages`."""
_beyond: str | None = None
"""Fault of a TransformerEngine whose release megatron-core does not support, but which a certificate permits."""


@contextmanager
def without_collections() -> Iterator[None]:
    """Suspends garbage collection in a block of imports, and exempts the block's objects from later collections.

    torch and megatron-core create a million permanent objects on import. Scanning them takes 2 of the 7 CPU seconds of
    a rank that starts and ends, and delays training steps during which a collection happens.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
        atexit.register(_release_triton)


def _release_triton() -> None:
    # triton's bindings print 70 lines about leaks if their objects stay exempt until the end
    if "triton" in sys.modules:
        gc.unfreeze()


@contextmanager
def without_trackers() -> Iterator[None]:
    """Hides experiment trackers from a block that imports megatron-core.

    megatron-core's timers and inference engine import wandb and TensorBoard if they are installed. We use neither, and
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

    The causes (missing optional packages, deprecated names) are ours to handle, and the user would see each warning
    once per rank.
    """
    warnings.filterwarnings("ignore", module=r"(megatron|torch)\.")
    # Python raises SyntaxWarning when it first compiles a source; the warning's module is then the path of the file
    warnings.filterwarnings("ignore", category=SyntaxWarning, module=r".*[/\\]megatron[/\\]core[/\\]")
    for name, beginning in _LOGGED.items():
        logging.getLogger(name).addFilter(_all_but(beginning))


def settle_gpu_packages(has_gpu: bool, takes_any_version: bool = False) -> None:
    """Hides TransformerEngine and apex from megatron-core if they are unusable; call before megatron-core is imported.

    megatron-core only handles an ImportError. Without a GPU its optimizers would call GPU kernels, and a package that
    fails in another way, such as one built for another CUDA, would end every run. So any import of an unusable package
    in this process says that it is not installed.

    A release of TransformerEngine that megatron-core does not support stays if a certificate of `mtrain verify backend`
    covers it, but only for its layers, since the certificate does not compare optimizers. Later calls do nothing.

    Args:
        takes_any_version: Whether any release of TransformerEngine may stay, for example to certify it.
    """
    global _faults, _beyond
    if _faults is not None:
        return
    _faults = {}
    stand_in_for_triton()
    for package, needed in _GPU_PACKAGES.items():
        if not _is_installed(package):
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
    """Replaces the kernels of megatron-core 0.19 that need triton, which only torch for GPUs contains.

    Its schedules import kernels of `moe_paged_stash`, an option that mtrain refuses, so nothing calls them.
    """
    if not _is_installed("triton"):
        kernels: Any = types.ModuleType("megatron.core.transformer.moe.ops.paged_stash")
        kernels.__getattr__ = lambda name: None
        sys.modules.setdefault(kernels.__name__, kernels)


def faulty_gpu_packages() -> dict[str, str]:
    """Returns package -> its fault, for packages that are hidden despite a GPU."""
    return dict(_faults or {})


def release_beyond_bounds() -> str | None:
    """Returns why the release of the present TransformerEngine is not supported; None if it is."""
    return _beyond


def _is_certified() -> bool:
    """Says whether any certificate is for the installed releases; mtrain/core/layers/certified.py checks details."""
    here, names = program_versions(), ("megatron-core", "transformer-engine")
    with suppress(MachineError):  # without a home folder no certificate exists
        return any(
            all(certificate.machine.get(name) == here.get(name) for name in names)
            and any(name.startswith("te") and comparison.passed for name, comparison in certificate.candidates.items())
            for certificate in certificates(certificate_folder())
        )
    return False


def _is_installed(package: str) -> bool:
    with suppress(ValueError):  # raised for a module that was put into sys.modules by hand
        return find_spec(package) is not None
    return True


def fault_of(needed: tuple[str, ...]) -> str | None:
    """Imports the modules of a package and returns the first error in one line; None if all imports succeed."""
    try:
        for name in needed:
            importlib.import_module(name)
    except Exception as error:  # any error makes the package unusable
        return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    return None


def _beyond_bounds(version: str) -> str | None:
    parts = version.split(".")[:2]
    if not all(part.isdigit() for part in parts):
        return None
    package = found_megatron()
    megatron = None if package is None else package.version
    bounds = _TRANSFORMER_ENGINE.get(str(megatron))
    if bounds is None or bounds[0] <= tuple(map(int, parts)) < bounds[1]:
        return None
    oldest, too_new = (".".join(map(str, bound)) for bound in bounds)
    supported = f"megatron-core {megatron} supports >={oldest},<{too_new}"
    return f"version {version} needs a certificate of `mtrain verify backend`, since {supported}"


def _hide(package: str) -> None:
    # an import finds a loaded module even if its parent is hidden, so loaded parts of a broken package are also hidden
    loaded = [name for name in sys.modules if name.startswith(f"{package}.")]
    for name in (package, *loaded):
        sys.modules[name] = None  # type: ignore[assignment]
