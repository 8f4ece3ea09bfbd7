"""Imports: of a great deal of code at once, and of what may be installed and still be of no use."""

import gc
import importlib
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec

_GPU_PACKAGES = {
    "transformer_engine": ("transformer_engine.pytorch", "transformer_engine.pytorch.optimizers"),
    "apex": ("amp_C", "apex.optimizers", "apex.multi_tensor_apply"),  # built without amp_C its Adam raises when made
}
"""What megatron-core takes wherever it is found, and the modules that have to be importable for it to be of use."""

_OLDEST, _TOO_NEW = (2, 9), (2, 12)
"""Of TransformerEngine, as megatron-core 0.16.1 names them (its extra `dev`)."""

_faults: dict[str, str] | None = None
"""Package -> why it was left out although a GPU is there; None: nobody has looked yet."""


@contextmanager
def without_collections() -> Iterator[None]:
    """Puts garbage collection off while a block imports, and leaves what it has made out of later collections.

    Importing torch and megatron-core makes a million objects that stay. The collector looks through them again and
    again, and once more when the process ends: 2 of the 7 processor seconds of a rank that starts and ends. A step that
    happens to be the collector's turn would look through them too.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


@contextmanager
def without_trackers() -> Iterator[None]:
    """Hides packages of experiment trackers from a block that imports megatron-core; afterwards they are found again.

    Its timers and its inference engine import wandb and TensorBoard wherever these are installed. Nothing here calls
    those parts, and wandb alone takes a ninth of the time in which a rank imports what it needs.
    """
    hidden = [name for name in ("wandb", "torch.utils.tensorboard") if name not in sys.modules]
    for name in hidden:
        sys.modules[name] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]


def ignore_warnings_of_megatron() -> None:
    """Silences megatron-core and torch for this process; call before megatron-core is first imported.

    What they warn about here is decided by this package (missing optional packages, names that are deprecated between
    the two), not by the user, who would read it once for each rank.
    """
    warnings.filterwarnings("ignore", module=r"(megatron|torch)\.")
    # of its source, as Python compiles it for the first time: the module is then the path of the file
    warnings.filterwarnings("ignore", category=SyntaxWarning, module=r".*[/\\]megatron[/\\]core[/\\]")


def settle_gpu_packages(has_gpu: bool) -> None:
    """Decides once, before megatron-core is first imported, whether it finds TransformerEngine and apex.

    It asks for no more than that they can be imported, and only an ImportError counts as absence. Without a GPU its
    optimizers would then be kernels for tensors that are not there; and a package that breaks in another way, as one
    built for another CUDA does, would end every run. So both are hidden where they are of no use: an import says that
    they are not there, to everything in this process.

    Args:
        has_gpu: Whether torch can use one.
    """
    global _faults
    if _faults is not None:
        return
    _faults = {}
    for package, needed in _GPU_PACKAGES.items():
        if not _is_there(package):
            continue
        fault = _fault_of(package, needed) if has_gpu else None
        if fault is not None:
            _faults[package] = fault
        if fault is not None or not has_gpu:
            _hide(package)


def faulty_gpu_packages() -> dict[str, str]:
    """Name -> what is wrong with it, of those that were left out beside a GPU."""
    return dict(_faults or {})


def _is_there(package: str) -> bool:
    with suppress(ValueError):  # raised for a module that something has put in place by hand
        return find_spec(package) is not None
    return True


def _fault_of(package: str, needed: tuple[str, ...]) -> str | None:
    """Found out by importing it."""
    try:
        for name in needed:
            importlib.import_module(name)
    except Exception as error:  # whatever it raises, it is of no use
        return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    version = str(getattr(sys.modules[package], "__version__", ""))
    parts = version.split(".")[:2]
    if package != "transformer_engine" or not all(part.isdigit() for part in parts):
        return None
    if _OLDEST <= tuple(map(int, parts)) < _TOO_NEW:
        return None
    oldest, too_new = (".".join(map(str, each)) for each in (_OLDEST, _TOO_NEW))
    return f"version {version} is not one that megatron-core takes (>={oldest},<{too_new})"


def _hide(package: str) -> None:
    # a module that is loaded is found whatever its parent says, so parts of what broke halfway are hidden, too
    loaded = [name for name in sys.modules if name.startswith(f"{package}.")]
    for name in (package, *loaded):
        sys.modules[name] = None  # type: ignore[assignment]
