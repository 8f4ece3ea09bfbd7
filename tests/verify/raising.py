"""Errors of every kind, raised where a check computes; ranks import this module to raise them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jinja2 import UndefinedError

from mtrain.base.errors import DataError, MachineError, MtrainError, NumericError, StopRequestedError

ERRORS: dict[str, Callable[[], BaseException]] = {
    "key": lambda: KeyError("planted"),
    "no text": ValueError,
    "several lines": lambda: RuntimeError("\n planted\nand more\n"),
    "assertion": lambda: AssertionError("planted"),
    "memory": MemoryError,
    "recursion": lambda: RecursionError("planted"),
    "pipe": lambda: BrokenPipeError(32, "planted"),
    "disk": lambda: OSError(28, "planted"),
    "template": lambda: UndefinedError("planted"),
    "group": lambda: ExceptionGroup("planted", [KeyError("one"), OSError("two")]),
    "exit 0": lambda: SystemExit(0),
    "exit 1": lambda: SystemExit(1),
    "of code 1": lambda: MtrainError("planted"),
    "stop": lambda: StopRequestedError("planted"),
    "data": lambda: DataError("planted"),
    "machine": lambda: MachineError("planted"),
    "number": lambda: NumericError("planted"),
}
"""What a check may meet, by a name for the test."""


class Raising:
    """Function that raises one of ERRORS whatever it is given; ranks find it by name."""

    __name__ = "raising"

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        raise ERRORS[self.name]()
