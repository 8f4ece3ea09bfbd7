"""Cost of `mtrain --help` and `mtrain check` next to an empty interpreter: `python tools/bench/startup.py`.

Commands alternate in rounds; each is a process of its own. Columns are wall seconds (best and median) and processor
seconds (median) of it and what it starts.
"""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

ROOT = Path(__file__).parents[2]
ALONE = ["--world-size", "1", "--without-files"]
COMMANDS = {
    "empty interpreter": ["-c", "pass"],
    "import typer": ["-c", "import typer"],
    "import typer, pydantic": ["-c", "import typer, pydantic.main"],
    "import torch": ["-c", "import torch"],
    "mtrain --help": ["-m", "mtrain", "--help"],
    "mtrain check": ["-m", "mtrain", "check", "configs/model/tiny.yaml", "configs/run/pretrain.yaml", *ALONE],
}


def seconds_of(arguments: list[str], compiled: str) -> tuple[float, float]:
    """Measures wall and processor seconds of one run.

    Bytecode is kept in the folder `compiled`, as for an installed program, whatever the environment says."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environment["PYTHONPYCACHEPREFIX"] = compiled
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run([sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, check=True)
    wall, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main(rounds: Annotated[int, typer.Option(min=1, help="of all commands")] = 7) -> None:
    """Prints the table."""
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in COMMANDS}
    with TemporaryDirectory() as compiled:
        for number in range(rounds + 1):
            for name, arguments in COMMANDS.items():
                times = seconds_of(arguments, compiled)
                if number:  # the first round fills the page cache and compiles
                    found[name].append(times)
    print("| command | best s | median s | cpu-s |\n|---|---|---|---|")
    for name, times_of in found.items():
        walls, cpus = zip(*times_of, strict=True)
        print(f"| {name} | {min(walls):.3f} | {statistics.median(walls):.3f} | {statistics.median(cpus):.3f} |")


if __name__ == "__main__":
    typer.run(main)
