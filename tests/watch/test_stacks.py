"""Stacks of a stopped process show the place where it was stopped."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from mtrain.base.heartbeat import Beat, Phase
from mtrain.watch.stacks import ask, dump, innermost
from tests.watch.test_hanging_ranks import wait_until

STOPPED = """
import os, signal, sys, threading, time
from pathlib import Path
from mtrain.watch.stacks import answer_to_signal

def stand():
    os.kill(os.getpid(), signal.SIGSTOP)

answer_to_signal(Path(sys.argv[1]), 0)
for _ in range(95):
    threading.Thread(target=threading.Event().wait, daemon=True).start()
stand()
while True:
    pass
"""


@pytest.mark.parametrize("is_asked_before", [False, True], ids=["at the end", "early, too"])
def test_a_stopped_process_is_shown_where_it_was_stopped(tmp_path: Path, is_asked_before: bool) -> None:
    """The stack is not from where it got to until one of its many threads answered."""
    with subprocess.Popen([sys.executable, "-c", STOPPED, str(tmp_path)]) as process:
        try:
            wait_until(lambda: psutil.Process(process.pid).status() == psutil.STATUS_STOPPED)
            state = Beat(0, process.pid, 3, Phase.SAVE, 0.0, 0.0)
            assert ask([state] * is_asked_before) == [state] * is_asked_before
            found = dump(tmp_path, [state], 0, tmp_path / "out")[0].read_text()
        finally:
            process.kill()
    assert innermost(found)[0].endswith("in stand"), found
