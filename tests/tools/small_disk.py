"""A disk of a few megabytes for the commands of a test: a tmpfs in a mount namespace of its own.

No rights are needed, and nothing stays mounted. A process of the fork server of `tests/warm.py` enters the namespace,
runs a scene of commands there, each forked from it, and passes on the scene's result.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import re
import signal
import subprocess
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests import warm

DEADLINE_S = 1200
_CLONE_NEWNS, _CLONE_NEWUSER = 0x20000, 0x10000000
_PR_SET_PDEATHSIG = 1


class SmallDisk:
    """Environment of a scene: the folder `run` on the small disk, and commands that it starts."""

    def __init__(self, folder: Path, server: str) -> None:
        """Takes the folder of the test, which contains `run`, and the address of the fork server.

        Records of commands are written to the folder, too.
        """
        self.folder, self.run_folder, self._server = folder, folder / "run", server

    def start(self, name: str, arguments: Sequence[str], variables: Mapping[str, str] | None = None) -> int:
        """Starts `python -m mtrain ...`, whose output goes to `NAME.out` and `NAME.err`; returns its process id."""
        outputs = [self.folder / f"{name}.{kind}" for kind in ("out", "err")]
        for path in outputs:
            path.touch()
        environment = {**warm.program_environment(self.folder), **(variables or {})}
        pid = os.fork()
        if pid == 0:
            try:
                ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
                output, errors = map(str, outputs)
                warm.run_here(None, arguments[3:], str(self.folder), environment, output, errors, self._server)
            finally:
                os._exit(70)  # only after a fault of this helper: the command ends the process itself
        return pid

    def exit_code(self, pid: int) -> int:
        """Waits for a command and returns its exit code, as a shell shows it."""
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        return code if code >= 0 else 128 - code

    def run(self, name: str, arguments: Sequence[str], variables: Mapping[str, str] | None = None) -> int:
        """Starts a command and waits for it; returns its exit code."""
        return self.exit_code(self.start(name, arguments, variables))

    def count(self, pattern: str, file: str) -> int:
        """Counts the lines of a file that match a pattern."""
        path = self.folder / file
        return len(re.findall(f".*{pattern}", path.read_text())) if path.exists() else 0

    def wait_for(self, count: int, pattern: str, file: str) -> None:
        """Waits until `count` lines of a file match a pattern."""
        deadline = time.monotonic() + DEADLINE_S
        while self.count(pattern, file) < count:
            assert time.monotonic() < deadline, f"{file} never says {pattern!r}"
            time.sleep(0.05)

    @contextlib.contextmanager
    def filled(self) -> Iterator[None]:
        """Fills the disk and keeps it full, whatever is deleted; then makes room again."""
        filler = self.run_folder / "filler"
        # writes with what bash has built in: a child that outlived bash could make the file anew and fill it again
        loop = 'while :; do while printf "%65536s" >> "$1"; do :; done; sleep 0.05; done 2>/dev/null'
        with subprocess.Popen(["bash", "-c", loop, "bash", str(filler)]) as process:
            try:
                yield
            finally:
                process.kill()
        filler.unlink()

    def make_read_only(self) -> None:
        """Makes the disk read-only with a flag of the mount, which works without root."""
        subprocess.run(["mount", "-o", "remount,bind,ro", str(self.run_folder)], check=True)

    def keep(self) -> None:
        """Copies `run` to `kept`, which outlives the disk."""
        subprocess.run(["cp", "-a", str(self.run_folder), str(self.folder / "kept")], check=True)


Scene = Callable[..., Any]


def play(scene: Scene, size: str, folder: Path, *arguments: Any) -> Any:
    """Runs `scene(disk, *arguments)` with a disk of this size, and returns its result.

    Args:
        scene: Function that can be imported by its name, from a module that is no test file.
        size: Size of the disk in the form of tmpfs, such as 2m.
        folder: Folder for `run`, where the disk is mounted, and for the output of commands.
        *arguments: Further arguments of the scene, which are pickled.
    """
    context = multiprocessing.get_context("forkserver")
    here, there = context.Pipe()
    process = context.Process(
        target=_play, args=(there, scene, size, folder, warm.server_address(), arguments), daemon=True
    )
    process.start()
    there.close()
    try:
        assert here.poll(DEADLINE_S), "the scene has no end"
        succeeded, value = here.recv()
    finally:
        process.kill()
        process.join()
    assert succeeded, value
    return value


def _play(pipe: Any, scene: Scene, size: str, folder: Path, server: str, arguments: tuple[Any, ...]) -> None:
    try:
        _enter_namespace()
        disk = SmallDisk(folder, server)
        disk.run_folder.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(disk.run_folder)], check=True)
        answer = (True, scene(disk, *arguments))
    except BaseException:  # whatever it is, the test has to show it
        answer = (False, traceback.format_exc())
    pipe.send(answer)


def _enter_namespace() -> None:
    """Enters namespaces as `unshare --map-root-user --mount` does, but without a new program."""
    user, group = os.getuid(), os.getgid()
    library = ctypes.CDLL(None, use_errno=True)
    if library.unshare(_CLONE_NEWUSER | _CLONE_NEWNS) != 0:
        raise OSError(ctypes.get_errno(), "unshare")
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"0 {user} 1")
    Path("/proc/self/gid_map").write_text(f"0 {group} 1")
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
