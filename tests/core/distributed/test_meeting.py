"""Ranks that meet belong to one launch of one run; else all of them stop with one message that names both sides."""

from __future__ import annotations

import os
import re
import signal
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from mtrain.arch.layout import Layout
from mtrain.core.ranks.party import Purpose
from mtrain.launch.local import free_port
from tests.core.distributed import init_ranks
from tests.core.distributed.meeting_ranks import DEADLINE_S, AgentStore, Came, Rank
from tests.fault_table import Notice
from tests.pool import Pool

ALL_OF = {2: 0b11, 3: 0b111}
SEED = {"train.seed": "1"}
SLURM = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"}
TORCHRUN = {"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "0", "GROUP_RANK": "0"}
pytestmark = pytest.mark.usefixtures("pool")


def environ(rank: int, port: int, size: int = 2, **more: str) -> dict[str, str]:
    """Returns the environment of a rank as a launcher sets it."""
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    return {**place, **{name: str(number) for name, number in numbers.items()}, **more}


def purpose(folder: Path, work: str = "train", agreed: Mapping[str, str] = SEED) -> Purpose:
    return Purpose(work, folder, agreed)


def met(*ranks: Rank) -> list[Came]:
    return [rank.came() for rank in ranks]


DIFFERENT: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "run folder": ({}, {"folder": "other"}, "run folder"),
    "configuration": ({}, {"agreed": {"train.seed": "2"}}, r"train\.seed \(1 and 2\)"),
    "a key that one rank lacks": ({}, {"agreed": {**SEED, "adapter.rank": "8"}}, r"adapter\.rank \(none and 8\)"),
    "verb": ({}, {"work": "generate"}, r"work \(train and generate\)"),
    "world size": ({}, {"size": 3}, r"world size \(2 and 3\)"),
    "local launch": ({"MTRAIN_LAUNCH": "a"}, {"MTRAIN_LAUNCH": "b"}, r"MTRAIN_LAUNCH \(a and b\)"),
    "one by a launcher, one by hand": ({"MTRAIN_LAUNCH": "a"}, {}, r"MTRAIN_LAUNCH \(a and none\)"),
    "torchrun": (TORCHRUN, {**TORCHRUN, "TORCHELASTIC_RUN_ID": "x"}, r"TORCHELASTIC_RUN_ID \(none and x\)"),
    "Slurm job": (SLURM, {**SLURM, "SLURM_JOB_ID": "8"}, r"SLURM_JOB_ID \(7 and 8\)"),
    "Slurm step": (SLURM, {**SLURM, "SLURM_STEP_ID": "1"}, r"SLURM_STEP_ID \(0 and 1\).*unset MASTER_PORT"),
    "Slurm restart": (SLURM, {**SLURM, "SLURM_RESTART_COUNT": "1"}, r"SLURM_RESTART_COUNT \(0 and 1\)"),
    "torchrun's restart": (
        TORCHRUN,
        {**TORCHRUN, "TORCHELASTIC_RESTART_COUNT": "1"},
        r"TORCHELASTIC_RESTART_COUNT .*rank that is left over",
    ),
    "program": ({}, {"PYTHONPATH": "fake"}, r"transformer-engine \(none and 99\.0\).*same versions"),
}


@pytest.mark.parametrize("which", DIFFERENT)
@pytest.mark.fault(
    "ranks",
    "ranks of two launches at one MASTER_ADDR and MASTER_PORT: another run folder, configuration, program, verb, world "
    "size, launch, job, step or restart",
    happens="nobody trains; one message names both ranks and what differs, also for those that wait",
    exit_code=7,
)
def test_ranks_of_two_launches_do_not_meet(tmp_path: Path, which: str, notice: Notice) -> None:
    (fake := tmp_path / "fake" / "transformer_engine-99.0.dist-info").mkdir(parents=True)
    (fake / "METADATA").write_text("Metadata-Version: 2.1\nName: transformer-engine\nVersion: 99.0\n")
    *sides, words = DIFFERENT[which]
    port, ranks = free_port(), []
    for number, side in enumerate(sides):
        own = {"folder": "run", "agreed": SEED, "work": "train", "size": 2, **side}
        aim = purpose(tmp_path / own.pop("folder"), own.pop("work"), own.pop("agreed"))
        if "PYTHONPATH" in own:
            own["PYTHONPATH"] = str(tmp_path / own["PYTHONPATH"])
        ranks.append(Rank(environ(number, port, own.pop("size"), **own), aim))
    with notice:
        first, second = met(*ranks)
    assert (first.met, second.met) == (0, 0)
    assert (first.exit_code, second.exit_code) == (notice.exit_code, notice.exit_code)
    for each in (first, second):
        assert re.search(words, each.text), each
        for number, rank in enumerate(ranks):
            assert f"rank {number} (process {rank.process.pid} on " in each.text
        assert "\n" not in each.text


def test_of_one_launch_one_rank_speaks(tmp_path: Path) -> None:
    """The others exit with the same code and print nothing."""
    port, launch = free_port(), {"MTRAIN_LAUNCH": "a"}
    wrong = purpose(tmp_path, agreed={"train.seed": "2"})
    ranks = [Rank(environ(rank, port, 3, **launch), wrong if rank == 2 else purpose(tmp_path)) for rank in range(3)]
    found = met(*ranks)
    assert [each.exit_code for each in found] == [7, 7, 7]
    assert len([each for each in found if each.text]) == 1
    assert "train.seed" in "".join(each.text for each in found)


@pytest.mark.fault(
    "ranks",
    "two processes with the same RANK, on one machine or on two",
    happens="one message names both processes; nobody waits",
    exit_code=7,
)
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.waits
def test_two_processes_of_one_rank_are_refused(tmp_path: Path, rank: int, notice: Notice) -> None:
    port = free_port()
    numbers = [0, rank, rank] if rank else [0, 0]
    with notice:
        found = met(*(Rank(environ(number, port, 3), purpose(tmp_path)) for number in numbers))
    assert [each.exit_code for each in found] == [notice.exit_code] * len(numbers)
    assert all(("two processes are rank 1" if rank else f"port {port}") in each.text for each in found)


def test_ranks_that_have_met_are_not_disturbed(tmp_path: Path) -> None:
    """A straggler is refused by its number or its run, even where it should have opened the port itself."""
    store = AgentStore()
    environments = [{**environ(rank, 0), **store.environ} for rank in range(2)]
    assert [each.met for each in met(*(Rank(each, purpose(tmp_path)) for each in environments))] == [3, 3]
    other = Rank(environments[1], purpose(tmp_path / "other")).came()
    assert other.exit_code == 7
    assert "run folder" in other.text


@pytest.mark.fault(
    "ranks",
    "torchrun --max-restarts: a rank crashes, before the ranks have met or after; agents of several nodes count apart",
    happens="the ranks that torchrun starts anew meet at the same store, and go on",
    exit_code=0,
)
@pytest.mark.parametrize(
    "story",
    [
        # (restart count, rank, number of the agent) of those that come, in each start
        [[(0, 0, 0), (0, 1, 0)], [(1, 0, 0), (1, 1, 0)], [(2, 1, 0), (2, 0, 0)]],
        [[(0, 0, 0)], [(1, 0, 0), (1, 1, 0)]],
        [[(0, 1, 0)], [(1, 0, 0), (1, 1, 0)]],
        [[(0, 0, 0), (0, 1, 1)], [(1, 0, 0), (0, 1, 1)], [(1, 0, 0), (1, 1, 1)]],
    ],
    ids=["after the meeting", "rank 1 never came", "rank 0 never came", "two nodes"],
)
def test_what_torchrun_starts_anew_meets_again(tmp_path: Path, story: Any, notice: Notice) -> None:
    store = AgentStore()
    with notice:
        for number, start in enumerate(story):
            ranks = []
            for count, rank, group in start:
                own = {"TORCHELASTIC_RESTART_COUNT": str(count), "GROUP_RANK": str(group)}
                ranks.append(Rank({**environ(rank, 0), **store.environ, **own}, purpose(tmp_path)))
            if len(start) == 2:
                assert [each.met for each in met(*ranks)] == [3, 3]
            else:  # ended by the agent, since the other rank crashed
                store.wait_for(start[0][1], number)
                ranks[0].process.kill()
                ranks[0].process.join()


def test_a_rank_that_waits_goes_over_to_the_later_start(tmp_path: Path) -> None:
    """A rank crashed while it waited and its agent restarts it; the agent of the other node has noticed nothing."""
    store = AgentStore()
    gone = Rank({**environ(0, 0, 3), **store.environ}, purpose(tmp_path))
    store.wait_for(0, 0)
    gone.process.kill()
    gone.process.join()
    waits = Rank({**environ(1, 0, 3), **store.environ, "GROUP_RANK": "1"}, purpose(tmp_path))
    store.wait_for(1, 0)
    anew = {**store.environ, "TORCHELASTIC_RESTART_COUNT": "1"}
    ranks = [waits, *(Rank({**environ(rank, 0, 3), **anew}, purpose(tmp_path)) for rank in (0, 2))]
    assert [each.met for each in met(*ranks)] == [ALL_OF[3]] * 3


@pytest.mark.fault(
    "ranks",
    "a rank of an earlier start of torchrun, which still waits when the next start comes",
    happens="nobody trains; one message says which rank is left over",
    exit_code=7,
)
def test_a_rank_that_is_left_over_from_an_earlier_start_is_refused(tmp_path: Path, notice: Notice) -> None:
    store = AgentStore()
    old = Rank({**environ(0, 0), **store.environ}, purpose(tmp_path))
    store.wait_for(0, 0)
    new = Rank({**environ(1, 0), **store.environ, "TORCHELASTIC_RESTART_COUNT": "1"}, purpose(tmp_path))
    with notice:
        found = met(old, new)
    assert [each.exit_code for each in found] == [notice.exit_code] * 2
    assert all("TORCHELASTIC_RESTART_COUNT (" in each.text and "left over" in each.text for each in found)


def test_a_process_opens_several_worlds_one_after_the_other(tmp_path: Path) -> None:
    port = free_port()
    ranks = [Rank(environ(rank, port, 3), purpose(tmp_path), num_worlds=3) for rank in range(3)]
    assert [each.met for each in met(*ranks)] == [ALL_OF[3]] * 3


def test_a_rank_that_was_interrupted_may_come_again(tmp_path: Path) -> None:
    """The place of the interrupted rank is free again."""
    store = AgentStore()
    gone = Rank({**environ(1, 0), **store.environ}, purpose(tmp_path))
    store.wait_for(1, 0)
    assert gone.process.pid is not None
    os.kill(gone.process.pid, signal.SIGINT)
    gone.process.join()
    ranks = [Rank({**environ(rank, 0), **store.environ}, purpose(tmp_path)) for rank in range(2)]
    came = met(*ranks)
    assert [each.met for each in came] == [ALL_OF[2]] * 2, "\n".join(each.text for each in came)


def test_run_folders_are_compared_as_they_are_resolved(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "run")
    port = free_port()
    ranks = [Rank(environ(n, port), purpose(tmp_path / name)) for n, name in enumerate(("run", "link"))]
    came = met(*ranks)
    assert [each.met for each in came] == [ALL_OF[2]] * 2, "\n".join(each.text for each in came)


@pytest.mark.fault(
    "ranks",
    "a rank that never comes",
    happens="the others wait train.process_group_timeout_s, and one message names the missing ranks",
    exit_code=7,
)
@pytest.mark.waits
def test_ranks_that_do_not_come_are_named(tmp_path: Path, notice: Notice) -> None:
    port = free_port()
    with notice:
        found = met(*(Rank(environ(rank, port, 4), purpose(tmp_path), timeout_s=3) for rank in (0, 2)))
    assert [each.exit_code for each in found] == [notice.exit_code] * 2
    assert all("2 of them (rank 1, 3) have not come within 3 s" in each.text for each in found)


@pytest.mark.waits
def test_time_in_which_a_rank_is_suspended_is_no_waiting(tmp_path: Path) -> None:
    port = free_port()
    first = Rank(environ(0, port), purpose(tmp_path), timeout_s=8)
    while True:
        with suppress(dist.DistError):
            store = TCPStore("127.0.0.1", port, None, False, wait_for_workers=False)
            break
    store.wait(["mtrain/0/rank-0"], timedelta(seconds=DEADLINE_S))  # it waits for the other rank
    assert first.process.pid is not None
    os.kill(first.process.pid, signal.SIGSTOP)
    second = Rank(environ(1, port), purpose(tmp_path))  # comes when the first one, which has the store, goes on
    time.sleep(9)
    os.kill(first.process.pid, signal.SIGCONT)
    assert [each.met for each in met(first, second)] == [ALL_OF[2]] * 2


@pytest.mark.fault(
    "ranks",
    "a program that is silent listens at MASTER_PORT",
    happens="one message names the port; torch alone would wait for ever",
    exit_code=7,
)
@pytest.mark.waits
def test_a_silent_program_at_the_port_is_named(tmp_path: Path, notice: Notice) -> None:
    with socket.socket() as other, notice:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = int(other.getsockname()[1])
        found = met(*(Rank(environ(rank, port), purpose(tmp_path), timeout_s=1) for rank in range(2)))
    assert [each.exit_code for each in found] == [notice.exit_code] * 2
    assert f"port {port} of this machine is in use by another program" in found[0].text
    assert f"127.0.0.1:{port}: the program that listens there is not rank 0" in found[1].text


def test_a_world_of_the_programs_own_has_one_purpose(pool: Pool) -> None:
    """All ranks raise the same error, and one shows it; the next world opens."""
    found = pool.run(init_ranks.purposes_in_an_open_world, Layout(dp=3))
    assert {text for _, text, _ in found} == {found[0][1]}
    assert "rank 0 (process" in found[0][1]
    assert "rank 2 (process" in found[0][1]
    assert "train.seed (1 and 2)" in found[0][1]
    assert [is_everywhere for _, _, is_everywhere in found] == [True] * 3
