"""Stop signals are remembered, and handlers put back."""

import os
import signal
import subprocess
import sys
import threading

import pytest

from mtrain.base.signals import STOP_SIGNALS, StopSignal

pytestmark = pytest.mark.usefixtures("hangup")


def send(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_stop_signal_is_remembered_and_ends_nothing(number: signal.Signals) -> None:
    with StopSignal() as stop:
        assert stop.received is None
        send(number)
        assert stop.received == number


def test_the_first_signal_is_the_one_reported() -> None:
    with StopSignal() as stop:
        send(signal.SIGUSR1)
        send(signal.SIGTERM)
        send(signal.SIGUSR1)
        assert stop.received == signal.SIGUSR1


def test_the_second_interrupt_ends_at_once() -> None:
    with StopSignal() as stop:
        send(signal.SIGINT)
        assert stop.received == signal.SIGINT
        with pytest.raises(KeyboardInterrupt):
            send(signal.SIGINT)


def test_an_interrupt_after_another_signal_is_still_graceful_once() -> None:
    with StopSignal():
        send(signal.SIGTERM)
        send(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            send(signal.SIGINT)


def test_handlers_are_put_back_also_after_an_error() -> None:
    before = [signal.getsignal(number) for number in STOP_SIGNALS]
    with StopSignal():
        assert all(signal.getsignal(number) not in before for number in STOP_SIGNALS)
    assert [signal.getsignal(number) for number in STOP_SIGNALS] == before
    with pytest.raises(ZeroDivisionError), StopSignal():
        raise ZeroDivisionError
    assert [signal.getsignal(number) for number in STOP_SIGNALS] == before


def test_an_inner_block_sees_what_the_outer_one_was_sent() -> None:
    with StopSignal() as outer:
        send(signal.SIGTERM)
        with StopSignal() as inner:
            assert inner.received == signal.SIGTERM
            send(signal.SIGINT)
            assert list(inner.sent) == list(outer.sent) == [signal.SIGTERM, signal.SIGINT]
            with pytest.raises(KeyboardInterrupt):
                send(signal.SIGINT)
        send(signal.SIGUSR1)
        assert outer.sent[-1] == signal.SIGUSR1, "the outer block still holds"


def test_a_hangup_stays_ignored_under_nohup() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with StopSignal() as stop:
        send(signal.SIGHUP)
        assert stop.received is None
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN


BLOCKED = """
import os, signal
from mtrain.base.signals import STOP_SIGNALS, StopSignal
signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
os.kill(os.getpid(), signal.SIGUSR1)
with StopSignal() as stop:
    assert stop.received == signal.SIGUSR1
"""


def test_signals_that_were_blocked_come_through() -> None:
    """The test runs in a process of its own: another thread of this one would take the signal that one thread
    blocks."""
    done = subprocess.run([sys.executable, "-c", BLOCKED], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr


def seen_in_a_thread() -> list[signal.Signals | None]:
    """Returns what a block in another thread has received before and after a signal."""
    seen: list[signal.Signals | None] = []

    def work() -> None:
        with StopSignal() as stop:
            seen.append(stop.received)
            if isinstance(getattr(signal.getsignal(signal.SIGTERM), "__self__", None), StopSignal):
                send(signal.SIGTERM)
                while stop.received is None:
                    pass
            seen.append(stop.received)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(20)
    return seen


def test_a_thread_sees_what_the_main_thread_is_sent_and_installs_nothing() -> None:
    before = [signal.getsignal(number) for number in STOP_SIGNALS]
    assert seen_in_a_thread() == [None, None]
    assert [signal.getsignal(number) for number in STOP_SIGNALS] == before
    with StopSignal():
        assert seen_in_a_thread() == [None, signal.SIGTERM]


def test_a_process_that_is_asked_to_stop_finishes_its_step() -> None:
    program = (
        "from mtrain.base.signals import StopSignal\n"
        "with StopSignal() as stop:\n"
        "    print('ready', flush=True)\n"
        "    while stop.received is None: pass\n"
        "    print('saved', flush=True)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            process.send_signal(signal.SIGTERM)
            output, _ = process.communicate(timeout=600)
        finally:
            process.kill()
    assert (output, process.returncode) == ("saved\n", 0)


@pytest.mark.parametrize("prepare", ["end_at_interrupt()", "hold_stop_signals(); signal.raise_signal(signal.SIGINT)"])
def test_an_interrupt_inside_a_finalizer_still_ends_the_program(prepare: str) -> None:
    program = f"""
import signal, time
from mtrain.base.signals import end_at_interrupt, hold_stop_signals

class Held:
    def __del__(self):
        signal.raise_signal(signal.SIGINT)

{prepare}
try:
    held = Held()
    del held
    print("Python has dropped the exception", flush=True)
    time.sleep(60)
except KeyboardInterrupt:
    print("interrupted")
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=50)
    assert result.stdout == "Python has dropped the exception\ninterrupted\n"
    assert result.stderr == ""
