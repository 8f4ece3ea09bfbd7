"""Fields of megatron-core's TransformerConfig, read from the source of the installed package.

Importing it would load torch.
"""

import ast
from collections.abc import Iterator
from functools import cache
from typing import Any

from mtrain.base.ground import source_of

_CLASSES = {
    "megatron.core.model_parallel_config": "ModelParallelConfig",
    "megatron.core.transformer.transformer_config": "TransformerConfig",
}

UNREADABLE = object()
"""Marker for a default that is no plain value, such as a member of an enumeration."""


@cache
def field_defaults() -> dict[str, Any]:
    """Returns the default of every public field, inherited ones included.

    Raises:
        ValueError: megatron-core is not installed.
    """
    return {
        name: default
        for module, class_name in _CLASSES.items()
        for name, default in _annotated(_source(module), class_name)
        if not name.startswith("_")
    }


def _source(module: str) -> str:
    source = source_of(module)
    if source is None:
        raise ValueError(
            "megatron cannot be checked, since megatron-core is not installed; install it or remove the key"
        )
    return source


def _annotated(source: str, class_name: str) -> Iterator[tuple[str, Any]]:
    for node in ast.parse(source).body:
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
