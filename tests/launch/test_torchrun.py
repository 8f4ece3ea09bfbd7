"""torchrun as `mtrain.launch.torchrun` runs it, where it cannot start ranks."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mtrain.launch.torchrun import STOPPED
from tests.fault_table import Notice
from tests.paths import ROOT
from tests.pool import Pool
from tests.warm import Command, completed, program_environment


@pytest.mark.fault(
    "ranks",
    "torchrun's port on the first node is in use",
    happens="one message names the port; no traceback",
    exit_code=7,
)
def test_a_port_in_use_is_named(pool: Pool, tmp_path: Path, notice: Notice) -> None:
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        port = int(other.getsockname()[1])
        where = ["--nnodes=2", "--node-rank=0", "--master-addr=127.0.0.1", f"--master-port={port}"]
        program = str(ROOT / "mtrain" / "launch" / "torchrun.py")
        with notice:
            done = completed([sys.executable, program, *where, "-m", "mtrain", "train", "none.yaml"], tmp_path)
    assert done.returncode == notice.exit_code, done.stderr
    assert f"error: port {port} of this machine, at which torchrun's nodes meet, is in use" in done.stderr
    assert done.stderr.count("error:") == 1
    assert "Traceback" not in done.stdout + done.stderr


@pytest.mark.fault(
    "signals",
    "stop signal while torchrun waits for another node",
    happens="ends after 5 s, since no rank has begun; nothing is left to save",
    exit_code=STOPPED,
)
@pytest.mark.waits
def test_a_stop_while_other_nodes_are_awaited_ends_it(pool: Pool, tmp_path: Path, notice: Notice) -> None:
    with socket.socket() as free:
        free.bind(("", 0))
        port = int(free.getsockname()[1])
    where = ["--nnodes=2", "--node-rank=0", "--master-addr=127.0.0.1", f"--master-port={port}"]
    program = str(ROOT / "mtrain" / "launch" / "torchrun.py")
    command = [sys.executable, program, *where, "-m", "mtrain", "train", "none.yaml"]
    waiting = Command(command, tmp_path, program_environment())
    while not listens(port):
        assert waiting.poll() is None, waiting.errors()
        time.sleep(0.05)
    with notice:
        waiting.send_signal(signal.SIGTERM)
        code = waiting.wait(600)
    assert code == notice.exit_code, waiting.errors()
    assert waiting.errors().splitlines()[-1] == "torchrun was stopped by SIGTERM before its ranks began"


LOADS_FOR_LONG = """
import os, signal, threading, time
from mtrain.launch import torchrun
signal.pthread_sigmask(signal.SIG_BLOCK, torchrun.STOP_SIGNALS)
torchrun._LONGEST_WAIT_S = 0.2
os.kill(os.getpid(), signal.SIGTERM)
waits = threading.Event()
threading.Thread(target=torchrun._let_through, args=["none", waits], daemon=True).start()
time.sleep(2)
print("loaded", flush=True)
waits.set()
time.sleep(600)
"""


@pytest.mark.waits
def test_a_stop_while_torchrun_loads_does_not_end_it(tmp_path: Path) -> None:
    """However long it takes on a busy machine."""
    done = subprocess.run(
        [sys.executable, "-c", LOADS_FOR_LONG], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == STOPPED, done.stderr
    assert done.stdout == "loaded\n"
    assert done.stderr == "torchrun was stopped by SIGTERM before its ranks began\n"


def listens(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0
