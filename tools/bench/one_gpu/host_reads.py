"""Places where the host waits for the device, by file and line."""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tools.bench.one_gpu.shapes import Bench


def host_reads(bench: Bench, call: Callable[[], Any]) -> Counter[str]:
    """Counts the waits of one call: those that CUDA's sync debug mode sees; on a CPU, values that the host reads."""
    found: Counter[str] = Counter()
    if bench.device == "cpu":
        with _Reads(found):
            call()
        return found

    def note(message: Any, *others: Any, **options: Any) -> None:
        if "synchronizing" in str(message):
            found[_asking_line()] += 1

    shown = warnings.showwarning
    warnings.showwarning = note
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.showwarning = note
            torch.cuda.set_sync_debug_mode("warn")
            call()
    finally:
        torch.cuda.set_sync_debug_mode("default")
        warnings.showwarning = shown
    return found


class _Reads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, found: Counter[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._found = found

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if function.name().startswith("aten::_local_scalar_dense"):
            self._found[_asking_line()] += 1
        return function(*args, **(kwargs or {}))


def _asking_line() -> str:
    """Returns the innermost line outside torch and this file."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if "torch" not in path.parts and path != Path(__file__) and path.name != "warnings.py":
            return f"{'/'.join(path.parts[-4:])}:{frame.f_lineno}"
        frame = frame.f_back
    return "torch"
