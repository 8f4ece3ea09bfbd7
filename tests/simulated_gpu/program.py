"""Runs the trainer on a simulated GPU, and lists what the host waited for in each step.

    python -m tests.simulated_gpu.program LIBRARY FOLDER < CASES

CASES is JSON: name -> {"sections": a configuration, "ranks": number}. Prints JSON: name -> one result for each rank.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import traceback
from pathlib import Path
from typing import Any

from tests.simulated_gpu import cuda

if __name__ == "__main__":
    cuda.load(Path(sys.argv[1]))
    cuda.install()

import mtrain.core.ranks  # noqa: F401
from mtrain.base.errors import MtrainError
from mtrain.checkpoint.state import save
from mtrain.checkpoint.state.save import Saver
from mtrain.config import Config
from mtrain.core.layers.offload import activations
from mtrain.training import trainer
from mtrain.training.bad_steps import StepTrial
from tests.simulated_gpu.probe import probed
from tests.simulated_gpu.tensors import MEMORY, SimulatedGpu
from tests.simulated_gpu.transfers import begin_step, found


def train(sections: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Runs one rank of a run."""
    make = StepTrial.make

    held, peaks = {}, {}

    def noted(self: StepTrial, own: Any, lr: float, step: int, *others: Any) -> Any:
        begin_step(step)
        MEMORY.peak = held[step] = before = MEMORY.now
        made = make(self, own, lr, step, *others)
        peaks[step] = MEMORY.peak - before
        return made

    tried: Any = StepTrial
    tried.make = noted
    _hold_saves()
    activations.SMALLEST_MOVED_BYTES = 2**10  # so that activations of small models move, too
    sections["run"] = {"dir": str(folder)}
    error = None
    try:
        with SimulatedGpu():
            trainer.train(Config.model_validate(sections))
    except MtrainError as refused:
        error = str(refused)
    except Exception:  # the program that asked for the run shows the error
        error = traceback.format_exc()
    return {"steps": found(), "held": held, "peaks": peaks, "error": error}


def _hold_saves() -> None:
    """Holds saves until the end of the run, so that one is in flight in every later step."""
    is_over, saver, write, finish = threading.Event(), vars(save)["Saver"], Saver._write, Saver.finish

    def held(self: Saver, *given: Any) -> Any:
        is_over.wait()
        return write(self, *given)

    def finished(self: Saver) -> None:
        begin_step(0)
        is_over.set()
        finish(self)

    saver._write, saver.finish = held, finished


def run(name: str, sections: dict[str, Any], ranks: int, folder: Path) -> list[dict[str, Any]]:
    """Runs all ranks, each in a process forked from this one."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    readers = []
    for rank in range(ranks):
        reader, writer = os.pipe()
        if os.fork() == 0:
            os.close(reader)
            environment: dict[str, Any] = {
                "RANK": rank,
                "WORLD_SIZE": ranks,
                "LOCAL_RANK": 0,
                "LOCAL_WORLD_SIZE": ranks,
            }
            environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            os.environ.update({key: str(value) for key, value in environment.items()})
            with os.fdopen(writer, "w") as out:
                json.dump(train(sections, folder / name), out)
            os._exit(0)
        os.close(writer)
        readers.append(reader)
    results: list[dict[str, Any]] = []
    for reader in readers:
        with os.fdopen(reader) as given:
            text = given.read()
        results.append(json.loads(text) if text else {"steps": {}, "error": "the rank has died"})
        os.wait()
    return results


def main() -> None:
    """Runs all cases, one after the other."""
    cases = json.load(sys.stdin)
    folder = Path(sys.argv[2])
    results: dict[str, Any] = {name: run(name, case["sections"], case["ranks"], folder) for name, case in cases.items()}
    print(json.dumps(results | {"probe": probed()}))


if __name__ == "__main__":
    main()
