"""Order, repetition and forgetting of requests."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtrain.base.signals import StopSignal
from mtrain.serve.desk import Desk, FullError, Request
from mtrain.serve.link import Link
from mtrain.serve.operations import Done, Failed, Operation, Unload
from mtrain.serve.run import _next_request

NOTHING = Unload((), ())


@given(order=st.permutations(range(1, 9)), again=st.lists(st.integers(0, 7), max_size=5))
def test_calls_run_in_the_order_of_their_numbers(order: list[int], again: list[int]) -> None:
    """However they arrive, and also where some are sent again."""
    begun: deque[Request] = deque()
    desk, ran = Desk(begun.append), []
    desk.open_line("model")
    for place, number in enumerate(order):
        desk.submit_in_order(NOTHING, "model", number)
        for repeated in again:
            if repeated <= place:
                desk.submit_in_order(NOTHING, "model", order[repeated])
        while begun:
            ran.append(begun[0].id)
            desk.finish(begun.popleft(), Done({}))
    assert ran == [f"model:{number}" for number in range(1, 9)]


def test_calls_that_wait_for_one_that_never_came_fail_with_the_session() -> None:
    desk = Desk(lambda request: None)
    desk.open_line("model")
    waiting = desk.submit_in_order(NOTHING, "model", 2)
    heard: list[bool] = []
    assert desk.listen(waiting, lambda: heard.append(True))
    desk.close_line("model")
    assert isinstance(waiting.result, Failed)
    assert heard == [True]
    assert not desk.has_line("model")


def test_too_many_requests_are_refused_and_old_results_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mtrain.serve.desk._MOST_WAITING", 3)
    monkeypatch.setattr("mtrain.serve.desk._MOST_RESULTS", 2)
    begun: deque[Request] = deque()
    desk = Desk(begun.append)
    desk.open_line("model")
    for number in (1, 2, 3):
        desk.submit_in_order(NOTHING, "model", number)
    with pytest.raises(FullError):
        desk.submit(NOTHING)
    for request in list(begun)[:2]:
        desk.finish(request, Done({}))
    assert desk.find("model:1") is not None, "waiting requests are no results"
    desk.finish(begun[2], Done({}))
    assert desk.find("model:1") is None
    assert desk.find("model:3") is not None
    with pytest.raises(KeyError):
        desk.submit_in_order(NOTHING, "model", 1)
    desk.submit(NOTHING)


def test_large_results_are_forgotten_by_their_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """And what was asked is forgotten at once."""
    monkeypatch.setattr("mtrain.serve.desk._MOST_BYTES", 100)
    desk = Desk(lambda request: None)
    made = [desk.submit(NOTHING) for _ in range(5)]
    for request in made:
        desk.finish(request, Done(b"x" * 40))
        assert request.operation is None
    assert [desk.find(each.id) is not None for each in made] == [False, False, False, True, True]


class _Signalled(Link):
    """An engine's end that is asked to stop while it waits."""

    def take(self, timeout_s: float) -> tuple[str, Operation] | None:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        return super().take(timeout_s)


def test_a_signal_ends_the_wait_for_a_request() -> None:
    before = signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    own, other = socket.socketpair()
    start = time.monotonic()
    try:
        with own, other, StopSignal() as stop:
            assert _next_request(_Signalled(own), stop, 60) is None
            assert stop.received is signal.SIGTERM
    finally:
        signal.signal(signal.SIGALRM, before)
    assert time.monotonic() - start < 30
