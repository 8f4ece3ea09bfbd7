"""Being asked to stop: Slurm's and torchrun's signals, and Ctrl-C.

A handler may run between any two instructions, so it notes the signal and nothing else. The step loop asks at the end
of a step, all ranks agree there, save and leave.
"""

import signal
from types import FrameType, TracebackType
from typing import Any, Self

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


class StopSignal:
    """Inside the `with` block, a stop signal is remembered instead of ending the process.

    Ctrl-C twice ends the process at once, by KeyboardInterrupt. Only the main thread can enter (Python's rule).
    """

    def __init__(self) -> None:
        """No signal has been seen."""
        self._received: signal.Signals | None = None
        self._is_interrupted = False
        self._previous: dict[signal.Signals, Any] = {}

    @property
    def received(self) -> signal.Signals | None:
        """The first stop signal that this rank was sent; other ranks may have been sent none."""
        return self._received

    def __enter__(self) -> Self:
        for number in STOP_SIGNALS:
            self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            # None: the handler was not installed from Python and cannot be put back by it.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._previous.clear()

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            if self._is_interrupted:
                raise KeyboardInterrupt
            self._is_interrupted = True
        if self._received is None:
            self._received = signal.Signals(number)
