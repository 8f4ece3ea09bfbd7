"""The fields of megatron-core's TransformerConfig, read from the source of the installed package.

Importing it would load torch.
"""

import ast
import importlib.util
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

_CLASSES = {
    "core/model_parallel_config.py": "ModelParallelConfig",
    "core/transformer/transformer_config.py": "TransformerConfig",
}

UNREADABLE = object()
"""Stands for a default that is no plain value, such as a member of an enumeration."""


@cache
def field_defaults() -> dict[str, Any]:
    """The default of every public field, inherited ones included.

    Raises:
        ValueError: megatron-core is not installed.
    """
    folder = _package_folder()
    return {
        name: default
        for path, class_name in _CLASSES.items()
        for name, default in _annotated(folder / path, class_name)
        if not name.startswith("_")
    }


def _package_folder() -> Path:
    spec = importlib.util.find_spec("megatron")
    for folder in spec.submodule_search_locations or () if spec else ():
        if all((Path(folder) / path).is_file() for path in _CLASSES):
            return Path(folder)
    raise ValueError("megatron cannot be checked, since megatron-core is not installed; install it or remove the key")


def _annotated(path: Path, class_name: str) -> Iterator[tuple[str, Any]]:
    for node in ast.parse(path.read_bytes()).body:
        if isinstance(node, ast.ClassDef) and node.name == class_name:
            for statement in node.body:
                if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                    yield statement.target.id, _plain(statement.value)


def _plain(default: ast.expr | None) -> Any:
    if isinstance(default, ast.Call):  # field(default=...)
        default = next((keyword.value for keyword in default.keywords if keyword.arg == "default"), None)
    try:
        return UNREADABLE if default is None else ast.literal_eval(default)
    except ValueError:
        return UNREADABLE
