"""Supported versions of torch and megatron-core, checked on the packages that an import would load.

Results depend on how megatron-core sums, splits and marks tensors, so only two exact versions are accepted; others
would silently train another run. An import may load a source tree or an unpacked wheel on PYTHONPATH instead of the
installed distribution, so the version is read from the source that an import would load, without running it.
"""

import ast
import os
import sys
from collections.abc import Callable, Mapping
from importlib.machinery import ModuleSpec
from typing import Any, NamedTuple

from mtrain.base.errors import MachineError

MEGATRON_CORES = ("0.16.1", "0.19.2")
"""Tested versions; pip offers the second only to Python 3.12 and later."""
OLDEST_TORCH, TOO_NEW_TORCH = (2, 9), (2, 16)


class LocatedPackage(NamedTuple):
    """Package that an import would load."""

    location: str
    version: str | None
    """Version that the source states; None if it states none."""


def require_ground(is_another_machine: bool = False) -> None:
    """Refuses untested versions of torch and megatron-core; imports neither package.

    Args:
        is_another_machine: Whether the run is for another machine, so packages may be missing here. A present package
            is still checked, because names of fields are read from its source.

    Raises:
        MachineError: torch or megatron-core is missing or has an untested version; the first rank of each machine shows
            the error.
    """
    packages = (_fault_of_torch, found_torch()), (_fault_of_megatron, found_megatron())
    faults = [fault_of(package) for fault_of, package in packages if package is not None or not is_another_machine]
    if any(faults):
        error = MachineError("; ".join(filter(None, faults)))
        # not only rank 0, since each machine has its own installation
        error.on_every_rank = os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", "0")) != "0"
        raise error


def found_megatron() -> LocatedPackage | None:
    """Locates the megatron-core that this process imported or would import; None if it is missing."""
    package = _located("megatron.core", "package_info", _version_of_megatron)
    if package is None or package.version is None:
        return package
    # once imported, 0.19 appends the commit of any git checkout around its folder, such as one around the user's .venv
    return package._replace(version=package.version.partition("+")[0])


def found_torch() -> LocatedPackage | None:
    """Locates the torch that this process imported or would import; None if it is missing."""
    return _located("torch", "version", lambda constants: constants.get("__version__"))


def source_of(name: str) -> str | None:
    """Reads the source of a module that an import would load; None if it is missing or unreadable."""
    spec = _spec_of(name)
    get_source: Any = getattr(spec.loader if spec is not None else None, "get_source", None)
    try:
        return None if get_source is None else get_source(name)
    except (ImportError, OSError, SyntaxError):
        return None


def _fault_of_torch(package: LocatedPackage | None) -> str | None:
    oldest, too_new = (".".join(map(str, version)) for version in (OLDEST_TORCH, TOO_NEW_TORCH))
    needed = f"torch>={oldest},<{too_new}"
    if package is None:
        return f"torch is not installed, but {needed} is needed; install it"
    numbers = (package.version or "").split(".")[:2]
    is_known = len(numbers) == 2 and all(map(str.isdecimal, numbers))
    if is_known and OLDEST_TORCH <= tuple(map(int, numbers)) < TOO_NEW_TORCH:
        return None
    return f"{_named('torch', package)}, but mtrain is tested only with {needed}; install one of these"


def _fault_of_megatron(package: LocatedPackage | None) -> str | None:
    proven = " or ".join(MEGATRON_CORES)
    preferred = MEGATRON_CORES[sys.version_info >= (3, 12)]  # as in pyproject.toml
    install = f"install it with `pip install megatron-core=={preferred}`"
    if package is None:
        above = _spec_of("megatron")
        hidden = "" if above is None or above.origin is None else f" ({above.origin} comes first and has no core)"
        return f"megatron-core is not installed{hidden}, but {proven} is needed; {install}"
    if package.version in MEGATRON_CORES:
        return None
    return (
        f"{_named('megatron-core', package)}, but mtrain is tested only with {proven}; {install}, and remove any other "
        "from PYTHONPATH"
    )


def _named(name: str, package: LocatedPackage) -> str:
    version = package.version or "of unknown version"
    return f"{name} {version} would be imported from {package.location}"


def _located(package: str, part: str, version_in: Callable[[Mapping[str, Any]], object]) -> LocatedPackage | None:
    spec = _spec_of(package)
    if spec is None or spec.origin is None:  # a folder without a module, such as the remains of an uninstalled package
        return None
    location = next(iter(spec.submodule_search_locations or ()), spec.origin)
    loaded = getattr(sys.modules.get(package), "__version__", None)
    version = loaded if loaded is not None else version_in(_constants(source_of(f"{package}.{part}") or ""))
    return LocatedPackage(location, None if version is None else str(version))


def _version_of_megatron(constants: Mapping[str, Any]) -> str | None:
    """Joins the version as megatron-core's package_info.py does, without the commit that 0.19 adds."""
    parts = [constants.get(name) for name in ("MAJOR", "MINOR", "PATCH", "PRE_RELEASE")]
    return None if None in parts else ".".join(map(str, parts[:3])) + str(parts[3])


def _constants(source: str) -> dict[str, Any]:
    constants: dict[str, Any] = {}
    try:
        body = ast.parse(source).body
    except (SyntaxError, ValueError):
        return constants
    for node in body:
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign):
            targets = node.targets
        elif isinstance(node, ast.AnnAssign):
            targets = [node.target]
        value = getattr(node, "value", None)
        for target in targets:
            if isinstance(target, ast.Name) and isinstance(value, ast.Constant):
                constants[target.id] = value.value
    return constants


def _spec_of(name: str) -> ModuleSpec | None:
    """Works like `importlib.util.find_spec`, but does not import parent packages."""
    if name in sys.modules:
        return getattr(sys.modules[name], "__spec__", None)
    parent = name.rpartition(".")[0]
    path = None
    if parent:
        above = _spec_of(parent)
        # a folder without __init__.py is also a package, but finding `path` of a nested one needs an import
        if above is None or above.submodule_search_locations is None or (above.origin is None and "." in parent):
            return None
        path = list(above.submodule_search_locations)
    for finder in sys.meta_path:
        find = getattr(finder, "find_spec", None)
        spec: ModuleSpec | None = None if find is None else find(name, path)
        if spec is not None:
            return spec
    return None
