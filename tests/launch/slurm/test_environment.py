"""Nothing of the submitter's environment changes what `mtrain launch slurm` asks of Slurm."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtrain.launch.slurm.options import SlurmOptions, for_slurm, with_defaults
from tests.launch.slurm.test_submit import folder, install, launch

__all__ = ["folder"]

OF_SBATCH = re.findall(
    r"\w+",
    """
ACCOUNT ACCTG_FREQ ARRAY_INX BATCH CLUSTERS CONSTRAINT CONTAINER CORE_SPEC CPUS_PER_GPU DEBUG DELAY_BOOT DISTRIBUTION
ERROR EXCLUSIVE EXPORT GET_USER_ENV GPU_BIND GPU_FREQ GPUS GPUS_PER_NODE GPUS_PER_TASK GRES GRES_FLAGS HINT IGNORE_PBS
INPUT JOB_NAME MEM_BIND MEM_PER_CPU MEM_PER_GPU MEM_PER_NODE NETWORK NO_KILL NO_REQUEUE OPEN_MODE OUTPUT OVERCOMMIT
PARTITION POWER PROFILE QOS REQUEUE RESERVATION SIGNAL SPREAD_JOB THREAD_SPEC THREADS_PER_CORE TIMELIMIT USE_MIN_NODES
WAIT WAIT_ALL_NODES WAIT4SWITCH WCKEY A_LATER_ONE
""",
)
"""Input variables of `man sbatch`, without SBATCH_, and one of a later Slurm."""
OF_OTHERS = re.findall(
    r"\w+",
    """
SLURM_NTASKS SLURM_EXPORT_ENV SLURM_KILL_BAD_EXIT SLURM_CPU_BIND SLURM_ARRAY_JOB_ID SLURM_RESTART_COUNT SLURM_HINT
SLURM_CPUS_PER_TASK SLURM_EXIT_ERROR SLURM_UMASK SLURM_TIME_FORMAT SLURM_BITSTR_LEN SLURM_STEP_KILLED_MSG_NODE_ID
SLURM_A_LATER_ONE SLURMD_NODENAME SRUN_DEBUG SALLOC_PARTITION SCANCEL_INTERACTIVE SCANCEL_SIGNAL SCANCEL_STATE
SCANCEL_USER SCONTROL_ALL SCONTROL_FUTURE SINFO_FORMAT SINFO_PARTITION SINFO_SORT SQUEUE_FORMAT SQUEUE_PARTITION
SQUEUE_STATES SQUEUE_USERS SQUEUE_NAMES SPANK_X11 _SLURM_SPANK_OPTION_x11_x11
""",
)
"""Variables that Slurm's other commands and its plugins read."""
KEPT = {"SLURM_CONF": "/etc/x", "SLURM_JWT": "k", "PATH": "/bin", "LANG": "C"}
DEFAULTS = {"ACCOUNT": "account", "PARTITION": "partition", "QOS": "qos", "TIMELIMIT": "time"}


@given(st.sets(st.sampled_from([*(f"SBATCH_{name}" for name in OF_SBATCH), *OF_OTHERS])))
def test_slurms_commands_see_nothing_that_asks_for_another_job(names: set[str]) -> None:
    assert for_slurm({**dict.fromkeys(names, "7"), **KEPT}) == KEPT


@given(
    st.dictionaries(st.sampled_from(OF_SBATCH), st.sampled_from(["7", "x", ""])),
    st.sets(st.sampled_from(sorted(DEFAULTS))),
)
def test_a_variable_counts_only_where_its_option_is_not_given(site: dict[str, str], given_too: set[str]) -> None:
    site["TIMELIMIT"] = "7"
    own = {DEFAULTS[name]: "9" for name in given_too}
    options, notes = with_defaults(SlurmOptions(2, **own), {f"SBATCH_{name}": text for name, text in site.items()})  # type: ignore[arg-type]
    defaults = {DEFAULTS[name]: text for name, text in site.items() if name in DEFAULTS and text}
    assert options == SlurmOptions(2, **{**defaults, **own})  # type: ignore[arg-type]
    said = " ".join(notes)
    assert all(f"SBATCH_{name}" in said for name, text in site.items() if text), "named, as counting or not"


ENVIRONMENT = """#!/bin/bash
env | grep -E '^_?(SLURM|SBATCH|SRUN|SALLOC|SCANCEL|SCONTROL|SINFO|SQUEUE|SPANK)' >> environment
echo "${0##*/}" >> commands
echo 4711
"""
COMMANDS = ("sbatch", "scontrol", "sinfo", "squeue")


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.nightly)])
def test_nothing_of_the_submitters_environment_overrides_an_option(folder: Path, seed: int) -> None:
    drawn = random.Random(seed).sample(OF_SBATCH, 20)
    options = ["--nodes=2", "--partition=gpu", "--account=team", "--qos=high", "--time=60"]
    environment = dict.fromkeys([*(f"SBATCH_{name}" for name in drawn), *OF_OTHERS], "7")
    install(folder, dict.fromkeys(COMMANDS, ENVIRONMENT))
    for _ in range(2):  # the second one asks for the first
        done = launch(folder, "run.dir=runs/a", *options, SLURM_CONF="/etc/x", **environment)
        assert done.returncode == 0, done.stderr
    assert set((folder / "environment").read_text().splitlines()) == {"SLURM_CONF=/etc/x"}
    assert set((folder / "commands").read_text().split()) == set(COMMANDS)
    of_sbatch = ", ".join(sorted(f"SBATCH_{name}" for name in drawn))
    assert f"note: {of_sbatch} in the environment has no effect on the job" in done.stderr
    script = (folder / "runs" / "a" / "submissions" / "0002" / "job.sbatch").read_text()
    assert {"#SBATCH " + option for option in options} <= set(script.splitlines())
