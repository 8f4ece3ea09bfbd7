"""Parsed Python files of the package and of tools, and what they import."""

from __future__ import annotations

import ast
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

from tests.paths import ROOT


@dataclass(frozen=True)
class Module:
    """One Python file."""

    name: str
    path: Path
    tree: ast.Module

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """Nodes of the whole tree, which most tests here go through."""
        return list(ast.walk(self.tree))


@dataclass(frozen=True)
class Import:
    """Name that a module imports."""

    target: str
    """Dotted name; a module where the tree has it, else the imported name."""
    line: int
    is_for_types_only: bool


@cache
def modules() -> tuple[Module, ...]:
    paths = [*ROOT.glob("mtrain/**/*.py"), *ROOT.glob("tools/*.py")]
    with uncollected():
        return tuple(Module(_module_name(path), path, ast.parse(path.read_text())) for path in sorted(paths))


@contextmanager
def uncollected() -> Iterator[None]:
    """Parses without looking for garbage among a million nodes, which takes three times as long as parsing."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def module_names() -> frozenset[str]:
    return frozenset(module.name for module in modules())


@cache
def imports(module: Module) -> tuple[Import, ...]:
    """Returns every import of a module, at any depth."""
    return tuple(_imports(module))


def _imports(module: Module) -> Iterator[Import]:
    for_types = {
        id(inner)
        for node in module.nodes
        if isinstance(node, ast.If)
        and any("TYPE_CHECKING" in vars(each).values() for each in ast.walk(node.test))  # a name, or an attribute
        for statement in node.body
        for inner in ast.walk(statement)
    }
    for node in module.nodes:
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module.path}:{node.lineno}: relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            yield Import(_as_module(name), node.lineno, id(node) in for_types)


def _as_module(name: str) -> str:
    parent = name.rpartition(".")[0]
    return parent if name not in module_names() and parent in module_names() else name
