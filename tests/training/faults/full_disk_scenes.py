"""What happens to runs on small disks; played by `tests.tools.small_disk.play`."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Sequence

from mtrain.base import fault_points
from tests.tools.small_disk import SmallDisk


def full_then_read_only(disk: SmallDisk, command: Sequence[str]) -> list[int]:
    """Returns the exit codes of two starts."""
    codes = [disk.run("first", command)]
    disk.make_read_only()
    codes.append(disk.run("second", command))
    disk.keep()
    return codes


def full_for_a_while(disk: SmallDisk, command: Sequence[str]) -> tuple[list[int], int]:
    """Returns the exit codes of three starts, and the last step of the last one."""
    started = disk.start("first", [*command, "train.num_steps=1000000"])
    disk.wait_for(1, '"save"', "run/events.jsonl")
    with disk.filled():
        disk.wait_for(1, "could not write run/metrics.jsonl", "first.err")
        disk.wait_for(1, "could not write run/tensorboard", "first.err")
        disk.wait_for(1, "no checkpoint of step", "first.err")
    disk.wait_for(1, "run/metrics.jsonl has what was waiting", "first.err")
    disk.wait_for(1, "tfevents.* has what was waiting", "first.err")
    # a checkpoint later than what waited: the next start will not write those steps again
    disk.wait_for(disk.count('"save"', "run/events.jsonl") + 1, '"save"', "run/events.jsonl")
    with disk.filled():
        disk.wait_for(2, "could not write run/metrics.jsonl", "first.err")
        os.kill(started, signal.SIGTERM)
        codes = [disk.exit_code(started)]
        codes.append(disk.run("full", [*command, "train.num_steps=1"]))
    newest = max(int(path.name.removeprefix("step_")) for path in disk.run_folder.glob("checkpoints/step_*"))
    codes.append(disk.run("last", [*command, f"train.num_steps={newest + 5}"]))
    disk.keep()
    return codes, newest + 5


def leftovers_fill_the_disk(disk: SmallDisk, command: Sequence[str], fault: str) -> tuple[list[int], int]:
    """Returns exit codes of a start killed in a save and of the next one, and the bytes left over between them."""
    codes = [disk.run("first", command, {fault_points.VARIABLE: fault})]
    (left,) = disk.run_folder.glob("checkpoints/.tmp-step_*")
    with (left / "rest").open("wb", buffering=0) as rest:
        try:
            while True:
                rest.write(bytes(4096))
        except OSError:
            free = shutil.disk_usage(disk.run_folder).free
    return [*codes, disk.run("second", command)], free
