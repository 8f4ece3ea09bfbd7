"""Freezes a job in its run folder and submits it to Slurm."""

from __future__ import annotations

import difflib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from mtrain.base.environment import git_checkout, program_versions
from mtrain.base.errors import ConfigError, MachineError
from mtrain.base.files import disk_faults
from mtrain.config.load import config_yaml
from mtrain.launch.checked import checked_config
from mtrain.launch.slurm.options import SlurmOptions, checked_paths, for_slurm, seconds_of
from mtrain.launch.slurm.script import SlurmJob, render
from mtrain.runs.folder import RunFolder
from mtrain.runs.goodput import read_starts

SCRIPT = "job.sbatch"
_JOB_ID = "job_id"
_SUBMISSIONS = "submissions"
_SIGNAL_S = 300
"""Seconds before the time limit at which the job is asked to stop, by default; a third of the time limit for a short
job."""
_SHORT_JOB = 3
_MARGIN_S = 120
"""Added seconds, since Slurm's signals and time limits come up to a minute late."""
_TIMEOUT_S = 60
_REASON_POLLS, _REASON_POLL_S = 3, 1.0
_FIRST_REASONS = ("None", "PartitionConfig")
"""Reasons that Slurm shows before its scheduler has looked at a job; the second may also be the last."""
_PASSES = re.compile(
    "None|Priority|Resources|Dependency|BeginTime|Licenses|Reservation|Cleaning|Prolog|JobArrayTaskLimit|FedJobLock"
    r"|BurstBuffer(Resources|StageIn)|(Assoc|QOS)(Grp\w+|Max(?!\w*(PerJob|PerNode|Wall))\w+)"
)
"""Reasons to wait that pass with time. Any other reason is reported, since Slurm's list grows."""
_CHANGES = {
    "PartitionTimeLimit": "submit it again with a shorter --time or another --partition",
    "PartitionNodeLimit": "submit it again with other --nodes or another --partition",
    "PartitionConfig": "submit it again with what the nodes of its partition have",
    "BadConstraints": "submit it again with what the nodes of its partition have",
    "ReqNodeNotAvail": "submit it again without the nodes that it names, or wait until they are back",
    "JobHeldUser": "run scontrol release with its number",
}
"""Reason for which a job may wait for ever -> what to do."""


@dataclass(frozen=True)
class Submission:
    """All files from which a job starts, by name."""

    folder: Path
    """Folder in the run folder; made by `freeze`."""
    files: dict[str, str]
    job: SlurmJob

    def freeze(self) -> None:
        with disk_faults(f"write {self.folder}"):
            # Slurm fails a job whose log folder is missing without any message
            (self.folder.parents[1] / "logs").mkdir(parents=True, exist_ok=True)
            self.folder.mkdir(parents=True)
            for name, text in self.files.items():
                (self.folder / name).write_text(text)

    def difference(self) -> str:
        """Returns the unified diff to the last submission of this run folder; empty if there is none."""
        before = previous(self.folder)
        if before is None:
            return ""
        old = {path.name: path.read_text() for path in sorted(before.iterdir()) if path.name != _JOB_ID}
        lines: list[str] = []
        for name in dict.fromkeys([*self.files, *old]):
            # each submission contains its own folder, which is no difference
            earlier = old.get(name, "").replace(str(before), "SUBMISSION").splitlines(keepends=True)
            now = self.files.get(name, "").replace(str(self.folder), "SUBMISSION").splitlines(keepends=True)
            lines += difflib.unified_diff(earlier, now, f"{before.name}/{name}", f"{self.folder.name}/{name}", n=1)
        return "".join(lines)


def prepare(
    paths: Sequence[Path], overrides: Sequence[str], options: SlurmOptions, verb: Sequence[str] = ("train",)
) -> Submission:
    """Checks a run as far as a login node can, and returns its submission; changes nothing."""
    config = checked_config(paths, overrides, options.num_ranks)
    run_dir, work_dir = Path(config.run.dir).absolute(), Path.cwd()
    _check_run_dir(run_dir)
    checked_paths([work_dir, *paths])
    folder = _next_folder(run_dir)
    copies = {f"{number}-{path.name}": path.read_text() for number, path in enumerate(paths, 1)}
    job = SlurmJob(
        options,
        run_dir,
        work_dir,
        [*(str(folder / name) for name in copies), *overrides],
        sys.executable,
        _signal_seconds_of(RunFolder(run_dir), options),
        verb,
    )
    files = {SCRIPT: render(job), **copies, "config.yaml": config_yaml(config), "program.json": _program()}
    patch = _uncommitted()
    return Submission(folder, files | ({"uncommitted.patch": patch} if patch else {}), job)


def submit(submission: Submission) -> tuple[str, list[str]]:
    """Submits a frozen submission; returns the number of the job, and warnings about it.

    The job's options are read back; if one differs from what was submitted, the job is cancelled.

    Raises:
        MachineError: Slurm is not installed here, or does not answer.
        ConfigError: Slurm refuses the job, in its own words, or has made a different one.
    """
    if shutil.which("sbatch") is None:
        raise MachineError(
            "sbatch is not on PATH, so nothing was submitted; run this on a login node, or use --dry-run"
        )
    done = ask_slurm("sbatch", "--parsable", *_dependency(submission), str(submission.folder / SCRIPT))
    if done.returncode != 0:
        shutil.rmtree(submission.folder)  # nothing ran from it, and the next submission is compared with one that ran
        raise ConfigError(f"Slurm refuses the job ({_words(done)}); change what it names")
    number, _, cluster = (done.stdout.split() or [""])[-1].partition(";")
    if not number.isdecimal():
        raise MachineError(f"sbatch names no job ({_words(done)}); look for one with squeue before you submit again")
    with disk_faults(f"write {submission.folder}"):
        (submission.folder / _JOB_ID).write_text(number + "\n")
    return number, _checked(submission.job, number, [f"--clusters={cluster}"] if cluster else [])


def _checked(job: SlurmJob, number: str, cluster: Sequence[str]) -> list[str]:
    """Compares Slurm's job with the submitted one, cancels it if they differ, and returns warnings."""
    shown = _shown(number, cluster)
    if shown.returncode != 0 or f"JobId={number} " not in shown.stdout:
        return [
            f"warning: job {number} is submitted, but its options could not be read back ({_words(shown)}); compare "
            f"`scontrol show job {number}` with what you gave"
        ]
    found = differences(job.options, job.name, shown.stdout)
    if not found:
        warning = reason_to_wait(number, _settled(fields_of(shown.stdout), number, cluster))
        return [] if warning is None else [warning]
    cancelled = ask_slurm("scancel", *cluster, number)
    so = "it is cancelled" if cancelled.returncode == 0 else f"cancel it ({_words(cancelled)})"
    raise ConfigError(
        f"Slurm has made another job of this one: job {number} has {', '.join(found)}; {so}; give what your site's "
        "rules allow"
    )


def _shown(number: str, cluster: Sequence[str]) -> subprocess.CompletedProcess[str]:
    try:
        return ask_slurm("scontrol", *cluster, "show", "job", "-o", number)
    except (OSError, MachineError) as fault:
        return subprocess.CompletedProcess([], 1, "", str(fault))


def _settled(known: dict[str, str], number: str, cluster: Sequence[str]) -> dict[str, str]:
    """Asks again until Slurm's scheduler has looked at the job, or for a few seconds."""
    for _ in range(_REASON_POLLS):
        if known.get("JobState") != "PENDING" or known.get("Reason") not in _FIRST_REASONS:
            break
        time.sleep(_REASON_POLL_S)
        known = fields_of(_shown(number, cluster).stdout) or known
    return known


def reason_to_wait(number: str, known: dict[str, str]) -> str | None:
    """Describes why a job may never start; None if it runs, or waits for what comes with time."""
    reason = known.get("Reason", "None")
    if known.get("JobState") != "PENDING" or _PASSES.fullmatch(reason):
        return None
    change = _CHANGES.get(reason.split(",")[0], "see the reason codes in `man squeue`, change the option that it names")
    return f"warning: job {number} waits for {reason}, which time alone may not end; {change}, or run scancel {number}"


def _dependency(submission: Submission) -> list[str]:
    """Returns options that make the job wait for unfinished jobs from this folder, whatever their names."""
    found = (_job_number(folder) for folder in _all(submission.folder.parent) if folder != submission.folder)
    earlier = [number for number in found if number is not None]
    if not earlier or shutil.which("squeue") is None:
        return []
    waiting = ask_slurm("squeue", "--noheader", f"--jobs={','.join(earlier)}", "--format=%A").stdout.split()
    living = [number for number in earlier if number in waiting]
    # replaces the script's own, which holds back only jobs of the same name
    return [f"--dependency=singleton,afterany:{':'.join(living)}"] if living else []


def _job_number(folder: Path) -> str | None:
    path = folder / _JOB_ID
    number = path.read_text().strip() if path.is_file() else ""
    return number if number.isdecimal() else None


def ask_slurm(*command: str) -> subprocess.CompletedProcess[str]:
    """Runs a command of Slurm without another job's environment."""
    try:
        return subprocess.run(
            command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False, env=for_slurm(os.environ)
        )
    except subprocess.TimeoutExpired:
        raise MachineError(
            f"{command[0]} has not answered within {_TIMEOUT_S} s, and the job may be submitted or not; look at squeue "
            "before you try again"
        ) from None


def _words(done: subprocess.CompletedProcess[str]) -> str:
    return " ".join((done.stderr.strip() or done.stdout).split()) or f"exit code {done.returncode}"


def previous(folder: Path) -> Path | None:
    """Returns the newest submission before this one; None if there is none."""
    earlier = [path for path in _all(folder.parent) if path.name < folder.name]
    return earlier[-1] if earlier else None


def _signal_seconds_of(folder: RunFolder, options: SlurmOptions) -> int:
    """Returns `signal_seconds` from this run's earlier timings on as many ranks."""
    starts = [start for start in read_starts(folder.starts) if start.world_size == options.num_ranks]
    paces = [(start.start_up_s, start.step_s) for start in starts if start.step_s is not None]
    return signal_seconds(folder.save_seconds(), options.time_limit_s, *(paces[-1] if paces else ()))


def signal_seconds(
    save_s: float | None, time_limit_s: float | None, start_s: float | None = None, step_s: float | None = None
) -> int:
    """Returns how many seconds before the time limit the job is asked to stop.

    Args:
        save_s: Seconds of this run's latest save; None before the first.
        time_limit_s: Time limit in seconds; None if the options give none.
        start_s: Seconds from the latest start to its first step; None if unknown.
        step_s: Seconds of one of its steps; None if unknown.
    """
    if save_s is None and step_s is None:
        return round(_SIGNAL_S if time_limit_s is None else min(_SIGNAL_S, time_limit_s / _SHORT_JOB))
    known = {"its latest start": start_s, "a step": step_s, "its latest save": save_s}
    times = {name: seconds for name, seconds in known.items() if seconds is not None}
    start, step, save = (0.0 if seconds is None else seconds for seconds in known.values())
    ahead = max(_SIGNAL_S, round(step + 2 * save) + _MARGIN_S)  # a step that has begun is finished before the save
    least = max(2 * ahead, round(start + step) + ahead)
    if time_limit_s is not None and time_limit_s < least:
        took = ", ".join(f"{seconds:.0f} s for {name}" for name, seconds in times.items())
        raise ConfigError(
            f"--time is {time_limit_s:.0f} s, but this run took {took}, and Slurm has to ask for the end {ahead} s "
            f"before the limit; give at least {least // 60 + 1} minutes"
        )
    return ahead


def _all(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("[0-9]*") if path.is_dir()) if folder.is_dir() else []


def _next_folder(run_dir: Path) -> Path:
    before = _all(run_dir / _SUBMISSIONS)
    return run_dir / _SUBMISSIONS / f"{int(before[-1].name) + 1 if before else 1:04d}"


def _check_run_dir(run_dir: Path) -> None:
    """Refuses a path that sbatch cannot read from a line of its own, in double quotes."""
    if not str(run_dir).isprintable() or set(str(run_dir)) & set('"\\'):
        raise ConfigError(f"run.dir={str(run_dir)!r} holds a quote, backslash or control character; choose another")


def _program() -> str:
    """Describes versions and commit of the submitted program."""
    git = git_checkout()
    facts = {"versions": program_versions(), "git": None if git is None else dict(git._asdict())}
    return json.dumps(facts, indent=2) + "\n"


def _uncommitted() -> str:
    """Returns the difference of tracked files from the commit that `_program` names."""
    git = git_checkout()
    if git is None or not git.dirty:
        return ""
    source = Path(__file__).parent
    return subprocess.run(
        ["git", "-C", str(source), "diff", "HEAD"],
        capture_output=True,
        text=True,
        check=True,
        timeout=_TIMEOUT_S,
    ).stdout


_MINUTE_S = 60
_MORE = {"reservation": "Reservation", "constraint": "Features", "comment": "Comment", "wckey": "WCKey"}
"""Further options of sbatch -> scontrol's name for the same text."""


def differences(options: SlurmOptions, name: str, shown: str) -> list[str]:
    """Describes the options that differ, each with the job's value and the submitted one."""
    return [
        f"{field}={known} instead of {wanted}"
        for field, wanted, known, is_same in _compared(options, name, fields_of(shown))
        if known is not None and not is_same
    ]


def _compared(
    options: SlurmOptions, name: str, known: dict[str, str]
) -> Iterator[tuple[str, object, str | None, bool]]:
    """Yields (name in scontrol, submitted value, value of the job, whether they agree)."""
    counts = {
        "Requeue": 1,
        "NumNodes": options.nodes,
        "NumTasks": options.num_ranks,
        "NtasksPerN:B:S:C": options.ranks_per_node,
        "CPUs/Task": options.cpus_per_task,
    }
    for field, wanted in counts.items():
        if wanted is not None:
            number = re.match(r"\d+", known.get(field, ""))  # of 2-2 nodes, or 2:0:*:* tasks of a node
            yield field, wanted, known.get(field), number is None or int(number[0]) == wanted
    yield "JobName", name, known.get("JobName"), known.get("JobName") == name
    yield "ArrayJobId", "no array", known.get("ArrayJobId"), False
    if options.partition is not None:  # while it waits several may be named
        now = known.get("Partition", "").split(",")
        yield "Partition", options.partition, known.get("Partition"), set(now) <= set(options.partition.split(","))
    texts = {"Account": options.account, "QOS": options.qos}
    texts |= {_MORE[key]: value for key, _, value in (each.partition("=") for each in options.more) if key in _MORE}
    for field, text in texts.items():
        now_text = known.get(field, "")
        # without accounting Slurm knows no accounts; with it, it writes them in small letters
        yield field, text, known.get(field), text is None or now_text.casefold() in (text.casefold(), "(null)")
    if options.time is not None:
        limit = known.get("TimeLimit", "")
        yield "TimeLimit", options.time, known.get("TimeLimit"), _minutes(limit) == _minutes(options.time)
    for field, gpus in {"TresPerNode": options.gpus_per_node, "TresPerTask": options.gpus_per_task}.items():
        found = re.search(r"gpu(?::[^:,=\s]+)?[:=](\d+)", known.get(field, ""))
        if gpus is not None and found is not None:
            yield field, f"{gpus} GPUs", known.get(field), int(found[1]) == gpus


def fields_of(shown: str) -> dict[str, str]:
    """Reads the fields of `scontrol show` for one job: JobState, Partition, ..."""
    return dict(re.findall(r"(?:^|\s)([A-Z][\w/:]*)=(\S*)", shown))


def _minutes(text: str) -> float | None:
    """Converts a time limit to minutes, rounded up as Slurm does; None for no limit and malformed texts."""
    seconds = seconds_of(text)
    return None if seconds is None else -(-seconds // _MINUTE_S)
