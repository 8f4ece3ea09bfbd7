"""A rank's side of the watchdog: its pulse, its answer to requests for stacks, and the start of the watchdog."""

import contextlib
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

from mtrain.base.environment import RankEnvironment
from mtrain.base.heartbeat import Pulse, beating
from mtrain.config import Config
from mtrain.watch.node import node_folder, pulse_file
from mtrain.watch.stacks import answer_to_signal, flight_recorder
from mtrain.watch.watchdog import Settings

_log = logging.getLogger(__name__)

_BEAT_S = 0.25
_MOST_STARTS = 2


@contextlib.contextmanager
def watched(config: Config, environment: RankEnvironment) -> Iterator[Pulse | None]:
    """Gives this rank a pulse inside the block; the node's first rank also starts the node's watchdog.

    Enter it before torch is loaded, so that the watchdog detects a rank that hangs during loading. Yields None without
    a watchdog: watch.enabled=false, or a single rank at a terminal, perhaps in a debugger.
    """
    has_launcher = environment.master_port != 0
    is_at_a_terminal = sys.stdin is not None and sys.stdin.isatty()
    if not config.watch.enabled or (is_at_a_terminal and not has_launcher):
        yield None
        return
    folder = node_folder(os.environ)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        pulse = Pulse(pulse_file(folder, environment.rank), environment.rank)
        answer_to_signal(folder, environment.rank)
    except OSError as fault:
        _log.warning(f"warning: this run has no watchdog: cannot write to {folder} ({fault.strerror or fault})")
        yield None
        return
    for name, value in flight_recorder(folder).items():
        os.environ.setdefault(name, value)  # read by torch when it opens NCCL
    ended = threading.Event()
    settings = None
    if environment.local_rank == 0:
        settings = Settings(
            node=str(folder),
            run_dir=str(Path(config.run.dir).absolute()),
            local_world_size=environment.local_world_size,
            world_size=environment.world_size,
            parent=os.getpid(),
            step_s=config.train.process_group_timeout_s,
            start_s=config.watch.start_timeout_s,
            save_s=config.checkpoint.save_timeout_s,
            launch=os.environ.get("MTRAIN_LAUNCH"),
        )
    thread = threading.Thread(target=_beat, args=(pulse, settings, ended), name="pulse", daemon=True)
    thread.start()
    try:
        with beating(pulse):
            yield pulse
    finally:
        ended.set()
        thread.join(1.0)


def _beat(pulse: Pulse, settings: Settings | None, ended: threading.Event) -> None:
    """Shows that the interpreter runs; on the node's first rank, starts the watchdog and restarts it once."""
    process, num_started = None, 0
    while True:
        pulse.beat()
        if settings is not None and num_started < _MOST_STARTS and (process is None or process.poll() is not None):
            if process is not None:
                _log.warning("warning: the watchdog has ended; restarting it once")
            process, num_started = _started(settings), num_started + 1
        elif settings is not None and process is not None and process.poll() is not None:
            _log.warning("warning: the watchdog has ended again; this run continues without one")
            settings = None
        if ended.wait(_BEAT_S):
            return


def _started(settings: Settings) -> subprocess.Popen[bytes] | None:
    # a new session, which neither Ctrl-C nor the end of the first rank's process group reaches
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    try:
        return subprocess.Popen(
            [sys.executable, "-m", "mtrain.watch.watchdog", settings.as_json()],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
    except OSError as fault:
        _log.warning(f"warning: the watchdog cannot be started ({fault.strerror or fault})")
        return None
