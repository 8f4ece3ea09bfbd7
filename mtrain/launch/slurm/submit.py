"""Slurm jobs: fills in the batch script launch/slurm.sbatch, freezes it in the run folder together with everything that
it starts, and submits it."""

import difflib
import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from mtrain.base.environment import git_checkout, program_versions
from mtrain.base.errors import ConfigError, MachineError
from mtrain.base.files import disk_faults
from mtrain.base.spelling import counted
from mtrain.base.version import PACKAGE_FOLDER
from mtrain.config.load import config_yaml
from mtrain.launch.checked import check_printable, checked_config
from mtrain.launch.slurm.options import SlurmOptions, container_command, for_slurm, seconds_of
from mtrain.runs.folder import RunFolder
from mtrain.runs.goodput import read_starts

SCRIPT = "job.sbatch"
_JOB_ID = "job_id"
_SUBMISSIONS = "submissions"
_SIGNAL_S = 300
"""Seconds before the time limit at which the job is asked to stop; at most a third of the limit."""
_SHORT_JOB = 3
_MARGIN_S = 120
"""Added seconds, because Slurm's signals and time limits come up to a minute late."""
_TIMEOUT_S = 60
_REASON_POLLS, _REASON_POLL_S = 3, 1.0
_FIRST_REASONS = ("None", "PartitionConfig")
"""Reasons that Slurm shows before its scheduler has looked at a job; PartitionConfig may also be the final one."""
_PASSES = re.compile(
    "None|Priority|Resources|Dependency|BeginTime|Licenses|Reservation|Cleaning|Prolog|JobArrayTaskLimit|FedJobLock"
    r"|BurstBuffer(Resources|StageIn)|(Assoc|QOS)(Grp\w+|Max(?!\w*(PerJob|PerNode|Wall))\w+)"
)
"""Reasons to wait that pass with time; any other is reported, because Slurm's list grows."""
_CHANGES = {
    "PartitionTimeLimit": "submit it again with a shorter --time or another --partition",
    "PartitionNodeLimit": "submit it again with other --nodes or another --partition",
    "PartitionConfig": "submit it again with resources that its partition has",
    "BadConstraints": "submit it again with resources that its partition has",
    "ReqNodeNotAvail": "submit it again without the nodes that it names, or wait until they are available",
    "JobHeldUser": "run scontrol release with its number",
}
"""Reason why a job may wait forever -> what to do."""


TEMPLATE = PACKAGE_FOLDER / "_share" / "launch" / "slurm.sbatch"
_BODY = "# --- from here on the same in every job ---\n"
"""Line of the template that separates the job's settings from the part that every job shares."""
_NAME_LENGTH = 48


@dataclass(frozen=True)
class SlurmJob:
    """The run that a script starts."""

    options: SlurmOptions
    run_dir: Path
    """Absolute path."""
    work_dir: Path
    """Absolute path of the folder to which paths in the configuration are relative."""
    config: Sequence[str]
    """Files and overrides for the verb."""
    python: str
    signal_s: int
    """Seconds before the time limit at which Slurm asks the job to stop."""
    verb: Sequence[str] = ("train",)
    """Verb of mtrain that the ranks run, with its options."""

    @property
    def name(self) -> str:
        """The job's name, the same whatever path leads to the run folder; jobs of one name run one after the other."""
        if self.options.name is not None:
            return self.options.name
        folder = main_path(self.run_dir)
        # different run folders with the same name must not wait for each other
        code = hashlib.sha256(os.fsencode(folder)).hexdigest()[:8]
        return f"{re.sub('[^A-Za-z0-9._-]', '_', folder.name)[:_NAME_LENGTH]}-{code}"


def render(job: SlurmJob) -> str:
    _, body = TEMPLATE.read_text().split(_BODY)
    in_container, command = container_command(job.options, job.python, job.work_dir)
    log = str(job.run_dir / "logs" / "job-%j.log").replace(str(job.run_dir), str(job.run_dir).replace("%", "%%"))
    directives = [
        f"--job-name={job.name}",
        "--dependency=singleton",  # by name: one job at a time for each run folder
        f'--output="{log}"',
        "--open-mode=append",
        "--requeue",
        f"--signal=B:USR1@{job.signal_s}",
        "--export=NONE",  # the ranks must not depend on the submitting user's environment
        *job.options.directives(),
    ]
    counts = {
        "nodes": job.options.nodes,
        "ntasks": job.options.num_ranks,
        "ntasks-per-node": job.options.ranks_per_node,
    }
    ranks = [f"--{name}={count}" for name, count in counts.items()]  # srun would take them from variables of a profile
    env_file = "" if job.options.env_file is None else shlex.quote(str(job.options.env_file.absolute()))
    settings = [
        f"cd {shlex.quote(str(job.work_dir))} || exit 7",
        f"run_dir={shlex.quote(str(job.run_dir))}",
        f"config=({shlex.join(job.config)})",
        f"command=({shlex.join(command)})",
        f"verb=({shlex.join(job.verb)})",
        f"srun_options=({shlex.join([*ranks, *in_container])})",
        f"env_file={env_file}",
        f"max_retries={job.options.max_retries}",
        f"certify={'yes' if job.options.certifies else ''}",
    ]
    head = ["#!/usr/bin/env bash", "# Written by `mtrain launch slurm`; may be submitted again with sbatch."]
    lines = [*head, *(f"#SBATCH {directive}" for directive in directives), "", "# What this job runs.", *settings, ""]
    return "\n".join(lines) + _BODY + body


_MOUNTS = Path("/proc/self/mountinfo")


class _Mount(NamedTuple):
    device: str
    """Device number of the file system."""
    root: Path
    """Mounted folder of the file system; not / for a bind mount."""
    point: Path


def main_path(folder: Path, mounts: str | None = None) -> Path:
    """Returns the folder's path without links, through the mount that shows most of its file system."""
    path = folder.resolve()
    if mounts is None:
        with suppress(OSError):
            mounts = _MOUNTS.read_text(errors="surrogateescape")
    all_mounts = []
    for line in (mounts or "").splitlines():
        fields = [re.sub(r"\\(\d{3})", lambda match: chr(int(match[1], 8)), field) for field in line.split(" ")]
        all_mounts.append(_Mount(fields[2], Path(fields[3]), Path(fields[4])))
    above = [mount for mount in all_mounts if path.is_relative_to(mount.point)]
    if not above:
        return path
    longest = max(len(mount.point.parts) for mount in above)
    nearest = [mount for mount in above if len(mount.point.parts) == longest][-1]  # a later mount hides an earlier one
    inside = nearest.root / path.relative_to(nearest.point)
    same = [mount for mount in all_mounts if mount.device == nearest.device and inside.is_relative_to(mount.root)]
    main = min(same, key=lambda mount: len(mount.root.parts))  # the first mount among equals
    return main.point / inside.relative_to(main.root)


@dataclass(frozen=True)
class Submission:
    """The files that a job starts from."""

    folder: Path
    """Folder in the run folder; created by `freeze`."""
    files: dict[str, str]
    """File name -> content."""
    job: SlurmJob

    def freeze(self) -> None:
        with disk_faults(f"write {self.folder}"):
            # without a log folder, Slurm fails the job silently
            (self.folder.parents[1] / "logs").mkdir(parents=True, exist_ok=True)
            self.folder.mkdir(parents=True)
            for name, text in self.files.items():
                (self.folder / name).write_text(text)

    def difference(self) -> str:
        """Returns the unified diff from this run folder's previous submission; empty for the first one."""
        earlier = [folder for folder in _all(self.folder.parent) if folder.name < self.folder.name]
        if not earlier:
            return ""
        before = earlier[-1]
        old = {path.name: path.read_text() for path in sorted(before.iterdir()) if path.name != _JOB_ID}
        lines: list[str] = []
        for name in dict.fromkeys([*self.files, *old]):
            # every submission contains the path of its own folder
            then = old.get(name, "").replace(str(before), "SUBMISSION").splitlines(keepends=True)
            now = self.files.get(name, "").replace(str(self.folder), "SUBMISSION").splitlines(keepends=True)
            lines += difflib.unified_diff(then, now, f"{before.name}/{name}", f"{self.folder.name}/{name}", n=1)
        return "".join(lines)


def prepare(
    paths: Sequence[Path], overrides: Sequence[str], options: SlurmOptions, verb: Sequence[str] = ("train",)
) -> Submission:
    """Checks a run as far as a login node can, and returns its submission; writes no file."""
    config = checked_config(paths, overrides, options.num_ranks)
    run_dir, work_dir = Path(config.run.dir).absolute(), Path.cwd()
    # sbatch reads run.dir in double quotes, from one line
    if not str(run_dir).isprintable() or set(str(run_dir)) & set('"\\'):
        raise ConfigError(
            f"run.dir={str(run_dir)!r} contains a quote, backslash or control character; choose another path"
        )
    for path in (work_dir, *paths):
        check_printable("a path", str(path))
    before = _all(run_dir / _SUBMISSIONS)
    folder = run_dir / _SUBMISSIONS / f"{int(before[-1].name) + 1 if before else 1:04d}"
    copies = {f"{number}-{path.name}": path.read_text() for number, path in enumerate(paths, 1)}
    of_run = RunFolder(run_dir)
    starts = [start for start in read_starts(of_run.starts) if start.world_size == options.num_ranks]
    paces = [(start.start_up_s, start.step_s) for start in starts if start.step_s is not None]
    signal_s = signal_seconds(of_run.save_seconds(), options.time_limit_s, *(paces[-1] if paces else ()))
    arguments = [*(str(folder / name) for name in copies), *overrides]
    job = SlurmJob(options, run_dir, work_dir, arguments, sys.executable, signal_s, verb)
    git = git_checkout()
    program = {"versions": program_versions(), "git": None if git is None else dict(git._asdict())}
    files = {
        SCRIPT: render(job),
        **copies,
        "config.yaml": config_yaml(config),
        "program.json": json.dumps(program, indent=2) + "\n",
    }
    patch = "" if git is None or not git.dirty else _uncommitted()
    return Submission(folder, files | ({"uncommitted.patch": patch} if patch else {}), job)


def submit(submission: Submission) -> tuple[str, list[str]]:
    """Submits a frozen submission; returns the job's number, and warnings about it.

    Reads the job's options back, and cancels the job if Slurm has changed one.

    Raises:
        MachineError: Slurm is not installed here, or does not answer.
        ConfigError: Slurm refuses the job, or has changed its options.
    """
    if shutil.which("sbatch") is None:
        raise MachineError(
            "sbatch is not on PATH, so nothing was submitted; run this on a login node, or use --dry-run"
        )
    done = ask_slurm("sbatch", "--parsable", *_dependency(submission), str(submission.folder / SCRIPT))
    if done.returncode != 0:
        shutil.rmtree(submission.folder)  # nothing ran from it, and the next submission is compared with one that ran
        raise ConfigError(f"Slurm refuses the job ({_words(done)}); change the option that it names")
    number, _, cluster = (done.stdout.split() or [""])[-1].partition(";")
    if not number.isdecimal():
        raise MachineError(f"sbatch printed no job number ({_words(done)}); check squeue before you submit again")
    with disk_faults(f"write {submission.folder}"):
        (submission.folder / _JOB_ID).write_text(number + "\n")
    return number, _checked(submission.job, number, [f"--clusters={cluster}"] if cluster else [])


def _checked(job: SlurmJob, number: str, cluster: Sequence[str]) -> list[str]:
    """Compares Slurm's job with the submitted one, and cancels it if they differ; returns warnings."""
    shown = _shown(number, cluster)
    if shown.returncode != 0 or f"JobId={number} " not in shown.stdout:
        return [
            f"warning: job {number} is submitted, but its options could not be read back ({_words(shown)}); compare "
            f"`scontrol show job {number}` with your options"
        ]
    changes = differences(job.options, job.name, shown.stdout)
    if not changes:
        warning = reason_to_wait(number, _settled(fields_of(shown.stdout), number, cluster))
        return [] if warning is None else [warning]
    cancelled = ask_slurm("scancel", *cluster, number)
    outcome = "it is cancelled" if cancelled.returncode == 0 else f"cancel it ({_words(cancelled)})"
    raise ConfigError(
        f"Slurm has changed the job's options: job {number} has {', '.join(changes)}; {outcome}; use options that your "
        "site's rules allow"
    )


def _shown(number: str, cluster: Sequence[str]) -> subprocess.CompletedProcess[str]:
    try:
        return ask_slurm("scontrol", *cluster, "show", "job", "-o", number)
    except (OSError, MachineError) as fault:
        return subprocess.CompletedProcess([], 1, "", str(fault))


def _settled(known: dict[str, str], number: str, cluster: Sequence[str]) -> dict[str, str]:
    """Polls for a few seconds, until Slurm's scheduler has looked at the job."""
    for _ in range(_REASON_POLLS):
        if known.get("JobState") != "PENDING" or known.get("Reason") not in _FIRST_REASONS:
            break
        time.sleep(_REASON_POLL_S)
        known = fields_of(_shown(number, cluster).stdout) or known
    return known


def reason_to_wait(number: str, known: dict[str, str]) -> str | None:
    """Describes why a job may never start; None if it runs, or waits for a reason that passes with time."""
    reason = known.get("Reason", "None")
    if known.get("JobState") != "PENDING" or _PASSES.fullmatch(reason):
        return None
    change = _CHANGES.get(reason.split(",")[0], "look it up in `man squeue`, change the option that it names")
    return f"warning: job {number} waits for {reason}, which may never end; {change}, or run scancel {number}"


def _dependency(submission: Submission) -> list[str]:
    """Returns options that make the job wait for this folder's unfinished jobs, whatever their names."""
    earlier = []
    for folder in _all(submission.folder.parent):
        path = folder / _JOB_ID
        if folder != submission.folder and path.is_file() and (number := path.read_text().strip()).isdecimal():
            earlier.append(number)
    if not earlier or shutil.which("squeue") is None:
        return []
    waiting = ask_slurm("squeue", "--noheader", f"--jobs={','.join(earlier)}", "--format=%A").stdout.split()
    living = [number for number in earlier if number in waiting]
    # replaces the script's dependency, which makes only jobs of the same name wait
    return [f"--dependency=singleton,afterany:{':'.join(living)}"] if living else []


def ask_slurm(*command: str) -> subprocess.CompletedProcess[str]:
    """Runs a Slurm command, without the variables of a surrounding job."""
    try:
        return subprocess.run(
            command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False, env=for_slurm(os.environ)
        )
    except subprocess.TimeoutExpired:
        raise MachineError(
            f"{command[0]} has not answered within {_TIMEOUT_S} s, and may have submitted the job; check squeue "
            "before you try again"
        ) from None


def _words(done: subprocess.CompletedProcess[str]) -> str:
    return " ".join((done.stderr.strip() or done.stdout).split()) or f"exit code {done.returncode}"


def signal_seconds(
    save_s: float | None, time_limit_s: float | None, start_s: float | None = None, step_s: float | None = None
) -> int:
    """Returns how many seconds before the time limit Slurm asks the job to stop.

    Args:
        save_s: Seconds that this run's latest save took; None before the first.
        time_limit_s: Time limit in seconds; None if the options set none.
        start_s: Seconds from the latest start to its first step; None if unknown.
        step_s: Seconds that a step took; None if unknown.
    """
    if save_s is None and step_s is None:
        return round(_SIGNAL_S if time_limit_s is None else min(_SIGNAL_S, time_limit_s / _SHORT_JOB))
    known = {"its latest start": start_s, "a step": step_s, "its latest save": save_s}
    times = {name: seconds for name, seconds in known.items() if seconds is not None}
    start, step, save = (0.0 if seconds is None else seconds for seconds in known.values())
    ahead = max(_SIGNAL_S, round(step + 2 * save) + _MARGIN_S)  # the current step ends before the save
    least = max(2 * ahead, round(start + step) + ahead)
    if time_limit_s is not None and time_limit_s < least:
        took = ", ".join(f"{seconds:.0f} s for {name}" for name, seconds in times.items())
        raise ConfigError(
            f"--time is {time_limit_s:.0f} s, but this run took {took}, and Slurm must signal the end {ahead} s before "
            f"the limit; give at least {counted(least // 60 + 1, 'minute')}"
        )
    return ahead


def _all(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("[0-9]*") if path.is_dir()) if folder.is_dir() else []


def _uncommitted() -> str:
    command = ["git", "-C", str(PACKAGE_FOLDER), "diff", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=_TIMEOUT_S).stdout


_MINUTE_S = 60
_MORE = {"reservation": "Reservation", "constraint": "Features", "comment": "Comment", "wckey": "WCKey"}
"""Further sbatch options -> scontrol's name for the same text."""


def differences(options: SlurmOptions, name: str, shown: str) -> list[str]:
    """Describes each option that Slurm has changed, with the job's value and the submitted one."""
    known, changes = fields_of(shown), list[str]()

    def compare(field: str, submitted: object, is_same: bool) -> None:
        if submitted is not None and field in known and not is_same:
            changes.append(f"{field}={known[field]} instead of {submitted}")

    counts = {
        "Requeue": 1,
        "NumNodes": options.nodes,
        "NumTasks": options.num_ranks,
        "NtasksPerN:B:S:C": options.ranks_per_node,
        "CPUs/Task": options.cpus_per_task,
    }
    for field, count in counts.items():
        number = re.match(r"\d+", known.get(field, ""))  # of 2-2 nodes, or 2:0:*:* tasks of a node
        compare(field, count, number is None or int(number[0]) == count)
    compare("JobName", name, known.get("JobName") == name)
    compare("ArrayJobId", "no array", False)
    # a waiting job may name several
    partitions = set(known.get("Partition", "").split(","))
    compare("Partition", options.partition, partitions <= set((options.partition or "").split(",")))
    texts = {"Account": options.account, "QOS": options.qos}
    texts |= {_MORE[key]: value for key, _, value in (option.partition("=") for option in options.more) if key in _MORE}
    for field, text in texts.items():
        # Slurm without accounting shows (null); with accounting it shows names in lower case
        compare(field, text, known.get(field, "").casefold() in ((text or "").casefold(), "(null)"))
    compare("TimeLimit", options.time, _minutes(known.get("TimeLimit", "")) == _minutes(options.time or ""))
    for field, gpus in {"TresPerNode": options.gpus_per_node, "TresPerTask": options.gpus_per_task}.items():
        number = re.search(r"gpu(?::[^:,=\s]+)?[:=](\d+)", known.get(field, ""))
        compare(field, counted(gpus or 0, "GPU"), gpus is None or number is None or int(number[1]) == gpus)
    return changes


def fields_of(shown: str) -> dict[str, str]:
    """Reads the fields of `scontrol show` for one job: JobState, Partition, ..."""
    return dict(re.findall(r"(?:^|\s)([A-Z][\w/:]*)=(\S*)", shown))


def _minutes(text: str) -> float | None:
    """Converts a time limit to minutes, rounded up as Slurm does; None for no limit and malformed texts."""
    seconds = seconds_of(text)
    return None if seconds is None else -(-seconds // _MINUTE_S)
