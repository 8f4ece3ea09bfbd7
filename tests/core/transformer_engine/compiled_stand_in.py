"""TransformerEngine's Python without its compiled part: everything it imports from that exists and does nothing.

Its pure Python wheel is enough to build its modules, and so to see their parameters; nothing can be computed.
"""

from __future__ import annotations

import importlib
import os
import sys
import types
import warnings
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

COMPILED = "transformer_engine_torch"
_NOT_NEEDED = (
    "einops",
    "transformer_engine.pytorch.onnx_extensions",
    *(f"transformer_engine.{package}.triton" for package in ("common", "pytorch")),
    *(
        f"transformer_engine.{package}.triton.{kernel}"
        for package in ("common", "pytorch")
        for kernel in ("pad", "permutation", "cross_entropy", "grouped_dbias_dscales")
    ),
)
"""Modules that nothing here calls and that would import packages of hundreds of megabytes."""


class _Enumeration(type):
    """A class that has any member it is asked for, numbered in this order; it cannot be called."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        member: Any = object.__new__(cls)  # type: ignore[arg-type]
        cls.__members__[name] = member
        setattr(cls, name, member)
        return member

    def __call__(cls, *args: object, **options: object) -> Any:
        raise NotImplementedError(f"{COMPILED}.{cls.__name__} is compiled")


class _Module(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        members: dict[str, Any] = {}  # TransformerEngine has a copy of some enumerations, and compares the two
        found = _Enumeration(
            name, (), {"__members__": members, "__int__": lambda self: [*members.values()].index(self)}
        )
        setattr(self, name, found)
        return found


def install(folder: Path) -> None:
    """Makes TransformerEngine importable; call it before megatron-core is imported.

    Args:
        folder: The unpacked wheel.
    """
    os.environ["NVTE_PROJECT_BUILDING"] = "1"  # makes it look for no shared library
    sys.path.insert(0, str(folder))
    for name in _NOT_NEEDED:
        sys.modules[name] = MagicMock(__spec__=None)
    sys.modules[COMPILED] = _Module(COMPILED)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        common: Any = importlib.import_module("transformer_engine.common")
        common.load_framework_extension = lambda framework: None
        attention: Any = importlib.import_module(
            "transformer_engine.pytorch.attention.dot_product_attention.dot_product_attention"
        )
    # these ask the libraries of a GPU for their versions
    attention.get_cudnn_version, attention.get_device_compute_capability = lambda: (9, 19, 0), lambda: (9, 0)
