"""Cost of the watchdog's pulse to a rank, for each phase, collective and tick: `python -m tools.bench.parts.pulse`."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from mtrain.base.heartbeat import Heartbeat, Phase, Pulse, beating, tick
from mtrain.watch.node import node_folder

_REPEATS = 20_000


def main() -> None:
    """Prints a line for each action."""
    folder = node_folder({"MTRAIN_LAUNCH": "bench"})
    folder.mkdir(exist_ok=True)
    pulse = Pulse(folder / "rank_00000", 0)

    def wait() -> None:
        pulse.begin_wait(1)
        pulse.end_wait(1)

    with tempfile.TemporaryDirectory() as run, beating(pulse):
        actions: dict[str, Callable[[], object]] = {
            "a phase, in the pulse": lambda: pulse.enter("forward_backward", 7),
            "a wait, begun and ended": wait,
            "a tick": tick,
        }
        with Heartbeat(Path(run), 0, 1, 600.0) as heartbeat:
            actions["a phase, with the heartbeat's thread"] = lambda: heartbeat.enter(Phase.UPDATE, 7)
            for name, action in actions.items():
                began = time.perf_counter()
                for _ in range(_REPEATS):
                    action()
                print(f"{name}: {(time.perf_counter() - began) / _REPEATS * 1e6:.2f} us")
    pulse.path.unlink()
    folder.rmdir()


if __name__ == "__main__":
    main()
