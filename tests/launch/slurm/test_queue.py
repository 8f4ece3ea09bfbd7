"""What a job of `mtrain launch slurm` waits for: the jobs before it in its run folder, and Slurm's own reasons."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtrain.launch.slurm.submit import fields_of, reason_to_wait
from mtrain.runs.folder import RunFolder
from tests.launch.slurm.test_submit import folder, install, launch, shown
from tests.messages import check_message
from tests.warm import completed

__all__ = ["folder"]


PASSING = [
    *("None", "Priority", "Resources", "Dependency", "BeginTime", "Licenses", "Reservation", "Cleaning"),
    *("JobArrayTaskLimit", "AssocGrpCpuLimit", "AssocMaxJobsLimit", "QOSGrpGRES", "QOSMaxCpuPerUserLimit"),
]
LASTING = [
    *("PartitionTimeLimit", "PartitionNodeLimit", "PartitionConfig", "PartitionDown", "PartitionInactive"),
    *("BadConstraints", "ReqNodeNotAvail,_UnavailableNodes:n[1-2]", "NodeDown", "DependencyNeverSatisfied"),
    *("JobHeldUser", "JobHeldAdmin", "InvalidAccount", "InvalidQOS", "AccountNotAllowed", "ReservationDeleted"),
    *(
        "AssocMaxWallDurationPerJobLimit",
        "AssocMaxNodePerJobLimit",
        "QOSMaxWallDurationPerJobLimit",
        "QOSMinCpuNotSatisfied",
    ),
    "Nodes_required_for_job_are_DOWN,_DRAINED_or_reserved_for_jobs_in_higher_priority_partitions",
    "AReasonOfALaterSlurm",
]


@given(st.sampled_from([*PASSING, *LASTING]), st.sampled_from(["PENDING", "RUNNING", "CONFIGURING"]))
def test_a_reason_that_time_does_not_end_is_said(reason: str, state: str) -> None:
    warning = reason_to_wait("4711", fields_of(shown(JobState=state, Reason=reason)))
    assert (warning is not None) == (state == "PENDING" and reason in LASTING)
    if warning is not None:
        assert f"job 4711 waits for {reason}, " in warning


LATER = """#!/bin/bash
echo asked >> asked
case $(wc -l < asked) in 1) reason=None ;; 2) reason=PartitionConfig ;; *) reason=PartitionTimeLimit ;; esac
echo "${SHOWN%$'\n'} Reason=$reason"
"""


@pytest.mark.waits
def test_a_job_that_cannot_start_is_said_once_slurms_scheduler_has_looked_at_it(folder: Path) -> None:
    """Slurm first shows no reason, or another one."""
    install(folder, {"scontrol": LATER})
    made = shown(JobName="n", Partition="gpu", NumTasks="2", TimeLimit="UNLIMITED", **{"NtasksPerN:B:S:C": "1:0:*:*"})
    done = launch(folder, "run.dir=runs/a", "--nodes=2", "--name=n", "--partition=gpu", SHOWN=made)
    assert done.returncode == 0, done.stderr
    check_message(done.stderr.splitlines()[-1], "job 4711 waits for PartitionTimeLimit", "--time", "scancel 4711")
    assert (folder / "runs" / "a" / "submissions" / "0001" / "job_id").exists(), "it stays in the queue"


def test_a_job_is_submitted_while_the_one_before_it_runs(folder: Path) -> None:
    """Whoever works in the folder now has ended when the job starts, or the job says so then."""
    (run := RunFolder(folder / "runs" / "a")).create()
    with run.locked():
        refused = completed(
            [sys.executable, "-m", "mtrain", "check", "run.yaml", "run.dir=runs/a", "--world-size=2"], folder
        )
        assert refused.returncode == 6, "of a start now"
        for more in (["--dry-run"], [], [], ["--name=x", "train.num_steps=8"]):
            done = launch(folder, "run.dir=runs/a", "--nodes=2", *more)
            assert done.returncode == 0, done.stderr
    assert len(list((folder / "runs" / "a" / "submissions").iterdir())) == 3


SQUEUE = """#!/bin/bash
echo "squeue $*" >> asked
echo "$LIVING"
"""


def test_jobs_of_one_folder_follow_each_other_whatever_they_are_called(folder: Path) -> None:
    """Another --name, or another mount of the folder, gives a name that `singleton` does not know."""
    number = "#!/bin/bash\nprintf '%s ' \"$@\" > calls\necho $NEXT\n"
    install(folder, {"sbatch": number, "squeue": SQUEUE})
    for next_number in ("100", "200", "300"):
        launch(folder, "run.dir=runs/a", "--nodes=2", NEXT=next_number, LIVING="")
    assert "--dependency" not in (folder / "calls").read_text()
    done = launch(folder, "run.dir=runs/a", "--nodes=2", "--name=x", NEXT="4", LIVING="300 7 100")
    assert done.returncode == 0, done.stderr
    assert "--dependency=singleton,afterany:100:300 " in (folder / "calls").read_text()
    assert "--jobs=100,200,300" in (folder / "asked").read_text()
