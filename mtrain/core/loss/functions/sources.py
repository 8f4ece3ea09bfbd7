"""Identity of the source of the user's own loss functions: a start with other code is another run."""

import ast
import contextlib
import hashlib
import importlib.util
import sysconfig
from collections.abc import Iterator
from functools import cache
from importlib.abc import ResourceLoader
from importlib.machinery import ModuleSpec
from pathlib import Path

from mtrain.base.files import disk_faults
from mtrain.config.schema.loss import LOSS_FUNCTIONS, LossSection

_NUM_DIGITS = 16
_OF_OTHERS = frozenset({"mtrain", "megatron", "torch"})
"""Packages that are never the user's own; a checkpoint has their versions."""
_FOLDERS_OF_PACKAGES = frozenset({"site-packages", "dist-packages"})


def source_fingerprints(section: LossSection) -> dict[str, str]:
    """Returns the fingerprint of the source of each of the user's own loss functions, by the key that names it.

    It covers the file of the named module and of every module that it imports, directly or not: modules of the same
    package, and all others that are not installed; their names and bytes, not their folder. The functions were loaded
    before.

    Raises:
        MachineError: The disk refuses.
    """
    terms = {"loss": section, **{f"loss.side_terms.{name}": term for name, term in section.side_terms.items()}}
    return {
        f"{key}.function": _fingerprint(term.function.partition(":")[0])
        for key, term in terms.items()
        if term.function not in LOSS_FUNCTIONS
    }


def _fingerprint(name: str) -> str:
    digest = hashlib.sha256()
    with disk_faults(f"read the source of {name}"):
        for module, content in sorted(_own_modules(name).items()):
            digest.update(f"{module}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()[:_NUM_DIGITS]


def _own_modules(name: str) -> dict[str, bytes]:
    """Returns name -> content of a module, its parent packages, and the user's modules that these import."""
    own_package, found = _package(name), dict[str, bytes]()

    @cache
    def is_own(package: str) -> bool:
        return package == own_package or (package not in _OF_OTHERS and _is_outside(_spec(package)))

    seen, waiting = set[str](), [name]
    while waiting:
        module = waiting.pop()
        # the package first: looking for a module imports its package, which may be foreign
        if module in seen or not is_own(_package(module)):
            continue
        seen.add(module)
        waiting.append(module.rpartition(".")[0] or module)
        spec = _spec(module)
        if spec is not None and spec.has_location and spec.origin and isinstance(spec.loader, ResourceLoader):
            found[module] = spec.loader.get_data(spec.origin)
            waiting += _imported(spec, found[module])
    return found


def _package(module: str) -> str:
    return module.partition(".")[0]


def _spec(name: str) -> ModuleSpec | None:
    try:
        return importlib.util.find_spec(name)
    except (ImportError, ValueError, AttributeError):  # no such module, or the name of something else
        return None


def _is_outside(spec: ModuleSpec | None) -> bool:
    """Says whether a package or module is neither installed nor part of Python."""
    if spec is None:
        return False
    places = [spec.origin] if spec.has_location and spec.origin else list(spec.submodule_search_locations or ())
    return bool(places) and not any(_is_installed(Path(place).resolve()) for place in places)


def _is_installed(path: Path) -> bool:
    # by name: a .pth file may lead into the packages of another environment
    return not _FOLDERS_OF_PACKAGES.isdisjoint(path.parts) or any(map(path.is_relative_to, _of_python()))


@cache
def _of_python() -> tuple[Path, ...]:
    return tuple(Path(sysconfig.get_path(kind)).resolve() for kind in ("stdlib", "platstdlib"))


def _imported(spec: ModuleSpec, content: bytes) -> Iterator[str]:
    """Yields all names that the import statements of a module may mean as modules."""
    if spec.origin is None or not spec.origin.endswith(".py"):
        return
    with contextlib.suppress(SyntaxError):  # of a module that nothing has imported yet
        for node in ast.walk(ast.parse(content)):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                base = node.module or ""
                if node.level:
                    base = importlib.util.resolve_name("." * node.level + base, spec.parent)
                # a name that is imported from a package may be a module of it
                yield from (base, *(f"{base}.{alias.name}" for alias in node.names))
