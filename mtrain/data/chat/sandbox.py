"""Renders a chat template in a separate process with limits on time and memory."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from mtrain.base.errors import DataError, MachineError

OPEN, CLOSE = "\U000f0002", "\U000f0003"
"""Private characters around the text in `{% generation %}`."""
_PROGRAM = Path(__file__).with_name("worker.py")
_CHUNK_BYTES = 1 << 20
_BYTES_PER_CHAR = 12
"""Most bytes of a character in JSON, a surrogate pair."""
_KEPT_VARIABLES = ("LANG", "LC_ALL", "LD_LIBRARY_PATH", "PATH", "PYTHONHOME", "TZ")
"""Environment variables that the process inherits; others may hold secrets."""


@dataclass(frozen=True)
class RenderLimits:
    cpu_s: float = 10.0
    """Processor time of each rendering, in seconds, so that a busy machine refuses nothing."""
    wall_s: float = 600.0
    """Wall time of all renderings together; also ends a process that hangs."""
    memory_bytes: int = 1 << 30
    """Address space of the process."""
    max_chars: int = 1 << 26
    """Characters of all renderings, each without the beginning that it shares with the first one."""


class Cut(NamedTuple):
    """Part of a conversation to render."""

    num_messages: int
    """Counted from the first message."""
    prompt: bool
    """Whether the beginning of an answer follows (add_generation_prompt)."""
    marked: bool = False
    """Whether `OPEN` and `CLOSE` surround the text in `{% generation %}`."""


class Rendered(NamedTuple):
    """A text, as its difference from the first text of the request."""

    common: int
    """Characters that it shares with the beginning of the first text; 0 for the first text itself."""
    suffix: str


class NotRendered(NamedTuple):
    """The template refuses these messages."""

    why: str


class LimitError(DataError):
    """A template exceeds a limit or is damaged, so no conversation can be rendered."""


class Sandbox:
    """A template and the process that renders it, started at the first request and restarted after it ended. Can be
    pickled and used in forked processes and threads."""

    def __init__(
        self,
        template: str,
        name: str,
        date: str | None,
        limits: RenderLimits,
        replaced: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Args:
        date: YYYY-MM-DD for `strftime_now`; None refuses a template that uses it.
        replaced: Text -> what replaces it in everything that the template writes.
        """
        self._template, self._name, self._date, self._replaced = template, name, date, dict(replaced)
        self.limits = limits
        """Limits of a request; wall_s may change at any time, others take effect in the next process."""
        self._reset()

    def _reset(self) -> None:
        self._process: _Process | None = None
        self._variables: list[str] = []
        self._lock = threading.Lock()
        self._owner = os.getpid()

    @property
    def process_id(self) -> int | None:
        """Returns the id of the rendering process; None if it is not running."""
        return None if self._process is None or self._owner != os.getpid() else self._process.id

    def variables(self) -> list[str]:
        """Returns the names that the template reads and does not set, in alphabetical order."""
        with self._locked():
            self._running()
            return self._variables

    def __getstate__(self) -> dict[str, Any]:
        return {key: getattr(self, key) for key in ("_template", "_name", "_date", "_replaced", "limits")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reset()

    def answer(self, request: Mapping[str, object]) -> list[Rendered | NotRendered]:
        """Renders for `Renderer.compare`, within the limits."""
        try:
            line = json.dumps(request).encode()
        except (TypeError, ValueError, RecursionError) as fault:
            raise DataError(f"contains a value that is not JSON ({fault}); remove it") from None
        with self._locked():
            answer = self._ask(self._running(), line, None)
        if "error" in answer:
            raise LimitError(f"{self._name} does not render the conversation: {answer['error']}")
        return [NotRendered(text["error"]) if isinstance(text, dict) else Rendered(*text) for text in answer["texts"]]

    def _locked(self) -> threading.Lock:
        if self._owner != os.getpid():
            self._reset()  # forked: the process belongs to the parent
        return self._lock

    def _running(self) -> _Process:
        if self._process is None:
            process = _Process()
            settings: dict[str, Any] = {"template": self._template, "date": self._date, "replaced": self._replaced}
            settings |= {"marks": [OPEN, CLOSE], **asdict(self.limits)}
            self._variables = self._ask(process, json.dumps(settings).encode(), "is damaged")["variables"]
            self._process = process
        return self._process

    def _ask(self, process: _Process, line: bytes, damaged: str | None) -> dict[str, Any]:
        answer = None
        try:
            answer = process.ask(line, self.limits)
        except _EndedError as fault:
            raise LimitError(f"{self._name} {fault}; take the template from its source again") from None
        finally:
            if answer is None:  # the state of the process is unknown now
                process.end()
                self._process = None
        if damaged is not None and "error" in answer:
            process.end()
            raise LimitError(f"{self._name} {damaged}: {answer['error']}; take the template from its source again")
        return answer


@dataclass(frozen=True)
class Renderer:
    """A template with the messages, tools and variables of one conversation."""

    sandbox: Sandbox
    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[object] | None
    variables: Mapping[str, object]

    @property
    def whole(self) -> Cut:
        return Cut(len(self.messages), False)

    def render(self, cut: Cut) -> str | NotRendered:
        """Renders one text; raises as `compare` does."""
        (rendered,) = self.compare([cut])
        return rendered if isinstance(rendered, NotRendered) else rendered.suffix

    def compare(self, cuts: Sequence[Cut]) -> list[Rendered | NotRendered]:
        """Renders one text for each cut, as its difference from the first, so that results grow with the conversation
        and not with its square. Raises LimitError if the template is damaged, or exceeds a limit."""
        request = {"messages": self.messages, "tools": self.tools, "variables": self.variables, "cuts": cuts}
        return self.sandbox.answer(request)


class _EndedError(Exception):
    """Says why a request was ended."""


class _Process:
    """The running program; it ends when nothing uses it any more."""

    def __init__(self) -> None:
        # -I -S: imports nothing of the user's, and starts in a third less time
        command = [sys.executable, "-I", "-S", "-B", str(_PROGRAM), *_paths()]
        environment = {key: os.environ[key] for key in _KEPT_VARIABLES if key in os.environ}
        try:
            self._program = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=environment,
                cwd="/",
                start_new_session=True,  # Ctrl-C is for the run
            )
        except OSError as fault:
            raise MachineError(
                f"cannot start a process that renders chat templates ({fault.strerror}); allow more processes"
            ) from fault
        assert self._program.stdin is not None, "it is a pipe"
        assert self._program.stdout is not None, "it is a pipe"
        self.id = self._program.pid
        self._input, self._output = self._program.stdin.fileno(), self._program.stdout.fileno()
        os.set_blocking(self._input, False)  # a stopped process reads nothing, and a full pipe would wait for ever
        self.end = weakref.finalize(self, _end, self._program, os.getpid())

    def ask(self, line: bytes, limits: RenderLimits) -> dict[str, Any]:
        unsent, received = memoryview(line + b"\n"), bytearray()
        until = time.monotonic() + limits.wall_s
        waiting = select.poll()  # and not select, which accepts no file descriptor above 1023
        waiting.register(self._output, select.POLLIN)
        waiting.register(self._input, select.POLLOUT)
        while not received.endswith(b"\n"):
            ready = dict(waiting.poll(max(0.0, until - time.monotonic()) * 1000))
            if not ready:
                raise _EndedError(f"takes longer than {limits.wall_s:g} s")
            if self._input in ready:
                with contextlib.suppress(BrokenPipeError):  # it ended; why is read from its exit code below
                    unsent = unsent[os.write(self._input, unsent[:_CHUNK_BYTES]) :]
                if not unsent:
                    waiting.unregister(self._input)
            if self._output in ready:
                chunk = os.read(self._output, _CHUNK_BYTES)
                received += chunk
                if not chunk:
                    raise _EndedError(self._why_ended(limits))
                if len(received) > _BYTES_PER_CHAR * limits.max_chars:
                    raise _EndedError(f"writes more than {limits.max_chars} characters")
        answer = json.loads(received)
        assert isinstance(answer, dict), "the program answers with an object"
        return answer

    def _why_ended(self, limits: RenderLimits) -> str:
        code = self._program.wait()
        if code == -signal.SIGPROF:
            return f"takes more than {limits.cpu_s:g} s of processor time"
        return f"makes the process that renders it die (exit code {code}), probably for lack of memory"


def _end(program: subprocess.Popen[bytes], owner: int) -> None:
    if os.getpid() != owner:
        return  # forked: it is the parent's
    for pipe in (program.stdin, program.stdout):
        assert pipe is not None
        with contextlib.suppress(OSError):
            pipe.close()
    program.kill()
    program.wait()


def _paths() -> list[str]:
    """Returns the folders of the packages that the program imports."""
    origins = [spec.origin for name in ("jinja2", "markupsafe") if (spec := importlib.util.find_spec(name)) is not None]
    return sorted({str(Path(origin).resolve().parent.parent) for origin in origins if origin is not None})
