"""Stop signals are remembered, and handlers put back."""

import os
import signal
import subprocess
import sys

import pytest

from mtrain.health.signals import STOP_SIGNALS, StopSignal


def send(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_stop_signal_is_remembered_and_ends_nothing(number: signal.Signals) -> None:
    with StopSignal() as stop:
        assert stop.received is None
        send(number)
        assert stop.received == number


def test_the_first_signal_is_the_one_told() -> None:
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


def test_a_process_that_is_told_to_stop_finishes_its_step() -> None:
    program = (
        "from mtrain.health.signals import StopSignal\n"
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
            output, _ = process.communicate(timeout=20)
        finally:
            process.kill()
    assert (output, process.returncode) == ("saved\n", 0)
