"""Stop requests: signals from Slurm and torchrun, a closed terminal, and Ctrl-C.

A handler may run between any two instructions, so it only records the signal. Ranks check for it before the first step
and after every step, agree to stop, save and exit.
"""

from __future__ import annotations

import _thread
import contextlib
import functools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import FrameType, TracebackType
from typing import Any, NoReturn

from mtrain.base.errors import StopRequestedError

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT)


class StopSignal:
    """Context manager that records stop signals instead of ending the process.

    Nested blocks see all signals that the outermost block received. A second Ctrl-C raises KeyboardInterrupt at once.
    SIGHUP stays ignored if it was ignored before, as under `nohup`. Signals that a launcher blocked are unblocked after
    the handlers are installed.

    Python allows handlers only in the main thread. In another thread a block sees the signals of the main thread's
    enclosing block; without such a block, signals end the process as usual.
    """

    def __init__(self) -> None:
        self._sent: list[signal.Signals] = []
        self._outer: StopSignal | None = None
        self._previous: dict[signal.Signals, Any] = {}
        self._is_held = False

    @property
    def sent(self) -> Sequence[signal.Signals]:
        """Stop signals that this process received, in order."""
        return self._sent if self._outer is None else self._outer.sent

    @property
    def received(self) -> signal.Signals | None:
        """First stop signal that this process received, or None; other ranks may differ."""
        return next(iter(self.sent), None)

    @property
    def is_outermost(self) -> bool:
        """Whether no other block encloses this one, so only this block sees its signals."""
        return self._outer is None

    @contextlib.contextmanager
    def interrupt_held(self) -> Iterator[None]:
        """Delays the KeyboardInterrupt of a second Ctrl-C to the end of the block.

        The handler implements the delay: if the signal were blocked, another thread would receive it, and the handler
        would still run in the main thread.
        """
        owner = self if self._outer is None else self._outer
        num_before = owner._num_interrupts()
        owner._is_held = True
        try:
            yield
        finally:
            owner._is_held = False
        if owner._num_interrupts() > max(num_before, 1):
            _interrupt()

    def __enter__(self) -> StopSignal:
        self._outer = _enclosing()
        if self._outer is None and threading.current_thread() is threading.main_thread():
            for number in STOP_SIGNALS:
                if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                    self._previous[number] = signal.signal(number, self._note)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            # None: the handler was not installed from Python, so Python cannot restore it
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._previous.clear()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._sent.append(signal.Signals(number))
        if number == signal.SIGINT and self._num_interrupts() > 1 and not self._is_held:
            _interrupt()

    def _num_interrupts(self) -> int:
        return self._sent.count(signal.SIGINT)


def leave_if_stopped(what: str) -> None:
    """Raises if this process received a stop signal; long work before the first step calls it often.

    Args:
        what: Current work, as the words after "while" in the message.

    Raises:
        StopRequestedError: A StopSignal block of this process received a signal.
    """
    owner = _enclosing()
    if owner is not None and owner.sent:
        raise StopRequestedError(f"stopped by a signal while {what}")


def end_at_interrupt() -> None:
    """Makes Ctrl-C raise KeyboardInterrupt, also where Python would lose it, and set `was_interrupted`."""
    signal.signal(signal.SIGINT, _interrupt)


def was_interrupted() -> bool:
    """Says whether Ctrl-C raised KeyboardInterrupt in this process, even if a library replaced the exception."""
    return bool(_interrupts)


def at_interrupt(action: Callable[[str], object]) -> None:
    """Registers an action that is called first, with the reason, when Ctrl-C ends this process.

    Args:
        action: Function that is safe between any two instructions, such as a write to memory.
    """
    _last_words.append(action)


_interrupts: list[int] = []
_last_words: list[Callable[[str], object]] = []


def _interrupt(number: int = signal.SIGINT, frame: FrameType | None = None) -> NoReturn:
    _interrupts.append(number)
    for action in _last_words:
        action(KeyboardInterrupt.__name__)
    # in a finalizer or compiled code, Python cannot raise the exception; it would print and forget it
    sys.unraisablehook = functools.partial(_raise_later, sys.unraisablehook)
    raise KeyboardInterrupt


def _raise_later(previous_hook: Callable[[Any], object], unraisable: Any) -> None:
    if not issubclass(unraisable.exc_type, KeyboardInterrupt):
        previous_hook(unraisable)
        return

    def send() -> None:
        time.sleep(0.01)  # inside the hook, the exception would be lost again
        os.kill(os.getpid(), signal.SIGINT)  # to the process: it also ends the main thread's sleep

    # not threading.Thread: the code that this finalizer interrupted may hold its lock
    _thread.start_new_thread(send, ())


@contextlib.contextmanager
def interrupts_blocked() -> Iterator[None]:
    """Blocks Ctrl-C in processes that the block starts; a terminal sends it to all, but we end them ourselves."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def hold_stop_signals() -> None:
    """Records stop signals from now on, for every later StopSignal block."""
    StopSignal().__enter__()


def ignore_stop_signals() -> None:
    """Ignores stop signals at the end of the program, when all is saved and the interpreter drops its handlers."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def _enclosing() -> StopSignal | None:
    owner = getattr(signal.getsignal(signal.SIGTERM), "__self__", None)
    return owner if isinstance(owner, StopSignal) else None
