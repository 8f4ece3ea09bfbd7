"""Rendering of a chat template in a separate process, within limits of time and memory that hold for any template."""

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
from typing import Any, NamedTuple

from mtrain.base.errors import DataError, MachineError

OPEN, CLOSE = "\U000f0002", "\U000f0003"
"""Private characters around the text that a template marks with `{% generation %}`."""
_PROGRAM = Path(__file__).with_name("worker.py")
_CHUNK_BYTES = 1 << 20
_BYTES_PER_CHAR = 12
"""Largest number of bytes of a character in JSON, which escapes it as a surrogate pair."""
_KEPT_VARIABLES = ("LANG", "LC_ALL", "LD_LIBRARY_PATH", "PATH", "PYTHONHOME", "TZ")
"""Names of the environment variables that the process keeps; the others may hold secrets, which a template must not
see."""


@dataclass(frozen=True)
class RenderLimits:
    """Limits for the renderings of one conversation."""

    cpu_s: float = 10.0
    """Processor time of each rendering, so that a busy machine refuses nothing."""
    wall_s: float = 600.0
    """Wall time of all renderings together, which also ends a process that does not run at all."""
    memory_bytes: int = 1 << 30
    """Address space of the process."""
    max_chars: int = 1 << 26
    """Number of characters of all renderings together, each without the beginning that it shares with the first one."""


class Cut(NamedTuple):
    """Part of a conversation to render."""

    num_messages: int
    """Number of messages, counted from the first."""
    prompt: bool
    """Whether the beginning of an answer follows (add_generation_prompt)."""
    marked: bool = False
    """Whether `OPEN` and `CLOSE` surround the text that the template marks by `{% generation %}`."""


class Rendered(NamedTuple):
    """A text, given by its difference from the first text of its request."""

    common: int
    """Number of characters at its beginning that it shares with the first text; 0 for the first text itself."""
    rest: str
    """Text after these characters."""


class NotRendered(NamedTuple):
    """Result in the place of a text: the template does not render these messages."""

    why: str


class LimitError(DataError):
    """A template exceeds a limit, or is damaged: no conversation can be rendered by it."""


class Sandbox:
    """One template and the process that renders it, which starts at the first request, and again after it was ended.

    May be pickled, and used in forked processes and from several threads.
    """

    def __init__(self, template: str, name: str, date: str | None, limits: RenderLimits) -> None:
        """
        Args:
            template: Text of the template; compiled at the first request.
            name: Name of the template in messages.
            date: Date as YYYY-MM-DD for `strftime_now`; None refuses a template that asks for it.
            limits: Limits of each request.
        """
        self._template, self._name, self._date = template, name, date
        self.limits = limits
        """Limits of a request; a change of wall_s takes effect at once, a change of the others in the next process."""
        self._reset()

    def _reset(self) -> None:
        self._process: _Process | None = None
        self._variables: list[str] = []
        self._lock = threading.Lock()
        self._owner = os.getpid()

    @property
    def process_id(self) -> int | None:
        """Returns the id of the process that renders; None before the first request and after the process was ended."""
        return None if self._process is None or self._owner != os.getpid() else self._process.id

    def variables(self) -> list[str]:
        """Returns the names that the template reads and does not set, in the order of the alphabet.

        Raises:
            LimitError: The template is damaged.
            MachineError: No process can be started.
        """
        with self._locked():
            self._running()
            return self._variables

    def __getstate__(self) -> dict[str, Any]:
        return {key: getattr(self, key) for key in ("_template", "_name", "_date", "limits")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reset()

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[object] | None,
        variables: Mapping[str, object],
        cut: Cut,
    ) -> str | NotRendered:
        """Renders one text; arguments and errors are those of `compare`."""
        (found,) = self.compare(messages, tools, variables, [cut])
        return found if isinstance(found, NotRendered) else found.rest

    def compare(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[object] | None,
        variables: Mapping[str, object],
        cuts: Sequence[Cut],
    ) -> list[Rendered | NotRendered]:
        """Renders one text for each cut, given by its difference from the first: the size of the result grows with the
        conversation, and not with its square.

        Args:
            messages: Messages of the whole conversation, plain JSON values.
            tools: Descriptions of tools.
            variables: Other values that the template may read, such as bos_token.
            cuts: Parts of the conversation to render.

        Raises:
            LimitError: The template is damaged, or exceeds a limit.
            DataError: A value is not JSON.
            MachineError: No process can be started.
        """
        asked = {"messages": messages, "tools": tools, "variables": variables, "cuts": cuts}
        try:
            line = json.dumps(asked).encode()
        except (TypeError, ValueError, RecursionError) as fault:
            raise DataError(f"contains a value that is not JSON ({fault}); remove it") from None
        with self._locked():
            answer = self._ask(self._running(), line, None)
        if "error" in answer:
            raise LimitError(f"{self._name} does not render the conversation: {answer['error']}")
        return [NotRendered(each["error"]) if isinstance(each, dict) else Rendered(*each) for each in answer["texts"]]

    def _locked(self) -> threading.Lock:
        if self._owner != os.getpid():
            self._reset()  # forked: the process belongs to the parent
        return self._lock

    def _running(self) -> _Process:
        if self._process is None:
            process = _Process()
            self._variables = self._ask(process, self._settings(), "is damaged")["variables"]
            self._process = process
        return self._process

    def _ask(self, process: _Process, line: bytes, damaged: str | None) -> dict[str, Any]:
        answer = None
        try:
            answer = process.ask(line, self.limits)
        except _EndedError as fault:
            raise LimitError(f"{self._name} {fault}; take the template from its source again") from None
        finally:
            if answer is None:  # the state of the process is not known any more
                process.end()
                self._process = None
        if damaged is not None and "error" in answer:
            process.end()
            raise LimitError(f"{self._name} {damaged}: {answer['error']}; take the template from its source again")
        return answer

    def _settings(self) -> bytes:
        limits = asdict(self.limits)
        return json.dumps({"template": self._template, "date": self._date, "marks": [OPEN, CLOSE], **limits}).encode()


class _EndedError(Exception):
    """Error of a request that was ended; says why."""


class _Process:
    """The running program, which ends when nothing uses it any more."""

    def __init__(self) -> None:
        # -I -S: nothing of the user's is imported, and starting takes a third of the time
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
                f"no process for chat templates can be started ({fault.strerror}); allow more processes"
            ) from fault
        assert self._program.stdin is not None, "it is a pipe"
        assert self._program.stdout is not None, "it is a pipe"
        self.id = self._program.pid
        self._input, self._output = self._program.stdin.fileno(), self._program.stdout.fileno()
        os.set_blocking(self._input, False)  # a stopped process reads nothing, and a full pipe would wait for ever
        self.end = weakref.finalize(self, _end, self._program, os.getpid())

    def ask(self, line: bytes, limits: RenderLimits) -> dict[str, Any]:
        """Sends one line and returns the answer to it.

        Raises:
            _EndedError: No answer came within the limits.
        """
        rest, received = memoryview(line + b"\n"), bytearray()
        until = time.monotonic() + limits.wall_s
        waiting = select.poll()  # and not select, which takes no file descriptor above 1023
        waiting.register(self._output, select.POLLIN)
        waiting.register(self._input, select.POLLOUT)
        while not received.endswith(b"\n"):
            ready = dict(waiting.poll(max(0.0, until - time.monotonic()) * 1000))
            if not ready:
                raise _EndedError(f"takes longer than {limits.wall_s:g} s")
            if self._input in ready:
                with contextlib.suppress(BrokenPipeError):  # it ended; why is read from its exit code below
                    rest = rest[os.write(self._input, rest[:_CHUNK_BYTES]) :]
                if not rest:
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
        return f"ends the process that renders it (exit code {code}), as one that needs too much memory does"


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
    """Returns the folders in which the program finds the packages that it imports."""
    origins = [spec.origin for name in ("jinja2", "markupsafe") if (spec := importlib.util.find_spec(name)) is not None]
    return sorted({str(Path(origin).resolve().parent.parent) for origin in origins if origin is not None})
