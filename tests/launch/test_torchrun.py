"""torchrun as `mtrain.launch.torchrun` runs it, where it cannot start ranks."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import pytest

from tests.fault_table import Notice
from tests.paths import ROOT
from tests.pool import Pool
from tests.warm import completed


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
