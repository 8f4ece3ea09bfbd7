"""Nodes that a Slurm job leaves out after a rank was lost there, and what its user has asked for."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fault_table import Notice
from tests.launch.test_scripts import finish, start
from tests.paths import ROOT

NODES = ["n1", "n2", "n3", "n4", "n5"]


def failed_on(folder: Path, says: str, **fields: str) -> list[str]:
    """Returns the nodes that a job leaves out after an end of which srun says this; the job has these fields."""
    shown = " ".join(f"{name}={value}" for name, value in {"Partition": "p", "Account": "(null)", **fields}.items())
    job = {"SRUN_CODE": "137", "SRUN_SAYS": says, "FIELDS": shown, "SLURM_JOB_NUM_NODES": fields["NumNodes"]}
    job["CLUSTER"] = "n1=a n2=a n3=b n4=b n5=b"
    assert finish(start(folder, str(folder / "run"), "run.yaml", SBATCH_PARTITION="q", **job)) == 0
    assert (folder / "requeued").exists(), "with the node or without"
    updated = folder / "updated"
    return updated.read_text().strip().removeprefix("ExcNodeList=").split(",") if updated.exists() else []


@given(
    node=st.sampled_from(NODES),
    count=st.integers(1, 4),
    needed=st.sets(st.sampled_from(NODES), max_size=2),
    left_out=st.sets(st.sampled_from(NODES), max_size=2),
    feature=st.sampled_from(["", "a", "b"]),
    by_hand=st.booleans(),
)
@settings(max_examples=12)
def test_a_node_is_left_out_where_the_job_as_its_user_asked_for_it_can_start_without(
    tmp_path_factory: pytest.TempPathFactory,
    node: str,
    count: int,
    needed: set[str],
    left_out: set[str],
    feature: str,
    by_hand: bool,
) -> None:
    """The user's options stand in the script, or, where it was submitted by hand, only in what Slurm knows."""
    folder = tmp_path_factory.mktemp("drawn")
    fields = {"NumNodes": str(count), "ExcNodeList": ",".join(sorted(left_out)) or "(null)"}
    if by_hand:
        fields |= {"ReqNodeList": ",".join(sorted(needed)) or "(null)", "Features": feature or "(null)"}
    else:
        options = [f"--nodelist={','.join(sorted(needed))}", *([f"--constraint={feature}"] if feature else [])]
        own = "#!/usr/bin/env bash\n" + "".join(f"#SBATCH {option}\n" for option in [*options, "--partition=q"])
        (folder / "job.sbatch").write_text(own + (ROOT / "launch" / "slurm.sbatch").read_text())
    found = failed_on(folder, f"srun: error: {node}: task 1: Killed", **fields)
    usable = set({"a": NODES[:2], "b": NODES[2:], "": NODES}[feature]) - left_out - {node}
    can_start = needed <= usable and len(usable) >= count
    assert sorted(set(found)) == (sorted(left_out | {node}) if can_start else [])


@contextmanager
def terms_after_the_requeue(folder: Path) -> Iterator[None]:
    """Sends SIGTERM to all shells of the script again and again once the job is requeued. Slurm sends it once, at any
    moment, and to the commands too, which the script then repeats."""
    ended = threading.Event()

    def send() -> None:
        while not (folder / "requeued").exists() and not ended.is_set():
            time.sleep(0.001)
        while not ended.is_set():
            for process in psutil.Process().children(recursive=True):
                with suppress(psutil.Error):
                    if str(ROOT / "launch" / "slurm.sbatch") in process.cmdline():
                        process.send_signal(signal.SIGTERM)

    sender = threading.Thread(target=send)
    sender.start()
    try:
        yield
    finally:
        ended.set()
        sender.join()


@pytest.mark.fault(
    "signals",
    "the SIGTERM that Slurm sends to every process of a job that it requeues, at any moment",
    happens="the script goes on: the faulty node is left out, and the held job is released",
    exit_code=0,
)
def test_a_held_job_is_released_whenever_the_requeue_signals_the_script(tmp_path: Path, notice: Notice) -> None:
    with terms_after_the_requeue(tmp_path), notice:
        assert failed_on(tmp_path, "srun: error: n2: task 1: Killed", NumNodes="2") == ["n2"]
    assert (tmp_path / "released").read_text() == "712345\n"


CANCELLED = "slurmstepd-n1: error: *** STEP 712345.0 ON n1 CANCELLED AT 2026-11-28T07:31:00 ***"
KILLED = [f"srun: error: {node}: tasks {rank}: Killed" for rank, node in enumerate(NODES)]


@given(st.lists(st.sampled_from(KILLED), max_size=1), st.permutations(KILLED))
@settings(max_examples=5)
def test_no_node_is_to_blame_for_ranks_that_a_user_cancels(
    tmp_path_factory: pytest.TempPathFactory, before: list[str], after: list[str]
) -> None:
    """`scancel JOB.0` kills the ranks that have not ended within KillWait, as srun does once one was lost."""
    says = "\n".join([*before, "srun: Job step aborted: Waiting up to 32 seconds.", CANCELLED, *after])
    found = failed_on(tmp_path_factory.mktemp("drawn"), says, NumNodes="2")
    assert found == [line.split(":")[2].strip() for line in before]


@given(
    nodes=st.lists(st.sampled_from(NODES), unique=True, min_size=1, max_size=4),
    tasks=st.integers(1, 8),
    end=st.sampled_from(["Killed", "Bus error"]),
)
@settings(max_examples=8)
def test_no_node_is_to_blame_for_a_signal_that_was_sent_to_every_task(
    tmp_path_factory: pytest.TempPathFactory, nodes: list[str], tasks: int, end: str
) -> None:
    """The form is that of Slurm 22.05.8 after `scancel --signal=7 JOB`: no line says that the step was cancelled."""
    lines = []
    for number, node in enumerate(nodes):
        first = number * tasks
        ranks = f"task {first}" if tasks == 1 else f"tasks {first}-{first + tasks - 1}"
        lines.append(f"srun: error: {node}: {ranks}: {end}")
    says = "\n".join([lines[0], "srun: launch/slurm: _step_signal: Terminating StepId=2.0", *lines[1:]])
    found = failed_on(tmp_path_factory.mktemp("drawn"), says, NumNodes=str(len(nodes)))
    # one task alone cannot be told from one that its machine has killed
    assert found == (nodes if len(nodes) == tasks == 1 else [])
