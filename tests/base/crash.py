"""Kills a process at every one of its file operations."""

import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

_OPERATIONS = ("open", "os.", "shutil.")


def killed_at_every_file_operation(action: Callable[[], Any], root: Path) -> Iterator[int]:
    """Runs `action` again and again, each time in a child that dies by SIGKILL one file operation later.

    Yields the count of completed operations after each death, and once more when the action ran to its end. The caller
    checks what is there and restores what the action needs.
    """
    completed = 0
    while _dies_before_operation(completed, action, root):
        yield completed
        completed += 1
    assert completed > 0, "the action does nothing with files below the root"
    yield completed


def _dies_before_operation(number: int, action: Callable[[], Any], root: Path) -> bool:
    child = os.fork()
    if child == 0:
        try:
            kill_self_before_operation(number, root)
            action()
            os._exit(0)
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return True
    assert os.WEXITSTATUS(status) == 0, "the action failed"
    return False


def kill_self_before_operation(number: int, root: Path) -> None:
    """Installs an audit hook, which is called just before the operating system is; hooks cannot be removed, so only in
    a child."""
    left = number

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal left
        is_path_below_root = any(isinstance(a, str | Path) and str(a).startswith(str(root)) for a in arguments)
        if event.startswith(_OPERATIONS) and is_path_below_root:
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            left -= 1

    sys.addaudithook(hook)
