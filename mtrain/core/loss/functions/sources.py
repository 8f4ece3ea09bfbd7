"""Fingerprints of the source of user-defined loss functions, since a start with other code is another run."""

import ast
import contextlib
import hashlib
import importlib.util
import inspect
import sys
import sysconfig
from collections.abc import Iterator
from functools import cache
from importlib.abc import ResourceLoader
from importlib.machinery import ModuleSpec
from pathlib import Path

from mtrain.base.files import disk_faults
from mtrain.config.schema.loss import LOSS_FUNCTIONS, LossSection

_NUM_DIGITS = 16
_FOREIGN_PACKAGES = frozenset({"mtrain", "megatron", "torch"})
"""Packages that never belong to the user; checkpoints record their versions."""
_INSTALL_FOLDERS = frozenset({"site-packages", "dist-packages"})


def source_fingerprints(section: LossSection) -> dict[str, str]:
    """Returns the fingerprints of the sources of user-defined loss functions, by configuration key.

    A fingerprint covers the names and contents, but not the folders, of the module and of all modules that it imports,
    directly or not, if they belong to the same package or are not installed. The functions must be loaded already.

    Raises:
        MachineError: A source file cannot be read.
    """
    terms = {"loss": section, **{f"loss.side_terms.{name}": term for name, term in section.side_terms.items()}}
    return {
        f"{key}.function": _fingerprint(*term.function.split(":"))
        for key, term in terms.items()
        if term.function not in LOSS_FUNCTIONS
    }


def _fingerprint(name: str, function: str) -> str:
    digest = hashlib.sha256()
    with disk_faults(f"read the source of {name}"):
        for module, content in sorted(_user_modules(name, function).items()):
            digest.update(f"{module}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()[:_NUM_DIGITS]


def _source_of_main(function: str) -> bytes:
    """Returns the source of the program; in a notebook, which has no file, the source of the function."""
    main = sys.modules["__main__"]
    file = getattr(main, "__file__", None)
    return inspect.getsource(getattr(main, function)).encode() if file is None else Path(file).read_bytes()


def _user_modules(name: str, function: str) -> dict[str, bytes]:
    """Returns the contents, by name, of a function's module, its parent packages, and the user's modules that these
    import."""
    user_package, contents = _package(name), dict[str, bytes]()

    @cache
    def is_users(package: str) -> bool:
        return package == user_package or (package not in _FOREIGN_PACKAGES and _is_outside(_spec(package)))

    seen, pending = set[str](), [name]
    if name == "__main__":  # it has no import spec
        contents[name] = _source_of_main(function)
        pending = list(_imported(contents[name], ""))
    while pending:
        module = pending.pop()
        # the package is checked first, since finding a module imports its package, which may be foreign
        if module in seen or not is_users(_package(module)):
            continue
        seen.add(module)
        pending.append(module.rpartition(".")[0] or module)
        spec = _spec(module)
        if spec is not None and spec.has_location and spec.origin and isinstance(spec.loader, ResourceLoader):
            contents[module] = spec.loader.get_data(spec.origin)
            if spec.origin.endswith(".py"):
                pending += _imported(contents[module], spec.parent)
    return contents


def _package(module: str) -> str:
    return module.partition(".")[0]


def _spec(name: str) -> ModuleSpec | None:
    try:
        return importlib.util.find_spec(name)
    except (ImportError, ValueError, AttributeError):  # no such module, or not the name of a module
        return None


def _is_outside(spec: ModuleSpec | None) -> bool:
    """Says whether a package or module is neither installed nor part of Python."""
    if spec is None:
        return False
    paths = [spec.origin] if spec.has_location and spec.origin else list(spec.submodule_search_locations or ())
    return bool(paths) and not any(_is_installed(Path(path).resolve()) for path in paths)


def _is_installed(path: Path) -> bool:
    # by folder name, since a .pth file may lead into the packages of another environment
    return not _INSTALL_FOLDERS.isdisjoint(path.parts) or any(map(path.is_relative_to, _python_folders()))


@cache
def _python_folders() -> tuple[Path, ...]:
    return tuple(Path(sysconfig.get_path(kind)).resolve() for kind in ("stdlib", "platstdlib"))


def _imported(content: bytes, package: str | None) -> Iterator[str]:
    """Yields all names in the import statements of a module of this package that may be modules."""
    with contextlib.suppress(SyntaxError):  # possible in a module that has not been imported yet
        for node in ast.walk(ast.parse(content)):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                base = node.module or ""
                if node.level:
                    base = importlib.util.resolve_name("." * node.level + base, package)
                # a name imported from a package may be one of its modules
                yield from (base, *(f"{base}.{alias.name}" for alias in node.names))
