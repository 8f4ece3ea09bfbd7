"""A user's Slurm options, with defaults from the environment and from the nodes of the partition.

Every option is checked, so that none becomes shell code.
"""

import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast, get_args

from mtrain.base.errors import ConfigError
from mtrain.base.spelling import counted
from mtrain.launch.checked import check_at_least, check_printable

ContainerRuntime = Literal["pyxis", "apptainer"]

_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_VALUE = re.compile(r"[A-Za-z0-9._,:=@%+*&|!()\[\]/-]{1,256}")
"""Value of a Slurm option; sbatch reads it from a #SBATCH comment, where quotes and blanks would end it."""
_OPTION = re.compile(r"([a-z][a-z-]*)(?:=(.*))?", re.DOTALL)
_TIME = re.compile(r"\d+|\d+:\d{1,2}(:\d{1,2})?|\d+-\d{1,2}(:\d{1,2}){0,2}|UNLIMITED")
"""Time limit: minutes, minutes:seconds, hours:minutes:seconds, days-hours[:minutes[:seconds]]."""
_OURS = frozenset(
    (
        *("job-name", "output", "error", "open-mode", "requeue", "no-requeue", "signal", "dependency"),
        *("export", "chdir"),
        *("nodes", "ntasks", "ntasks-per-node", "gpus-per-node", "gpus-per-task", "cpus-per-task"),
        *("partition", "account", "qos", "time", "wrap", "array", "parsable", "wait", "test-only"),
    )
)
"""sbatch options that `mtrain launch slurm` sets, or that would break its script."""
_SINFO_TIMEOUT_S = 15
_GPUS = re.compile(r"\bgpu(?::[^:,()]+)?:(\d+)")
"""GPUs in a node's generic resources: gpu:8, gpu:h100:8(S:0-1)."""


@dataclass(frozen=True)
class SlurmOptions:
    nodes: int
    gpus_per_node: int | None = None
    """GPUs on each node; None if gpus_per_task counts them, or for nodes without GPUs."""
    gpus_per_task: int | None = None
    """GPUs that each rank sees; replaces gpus_per_node."""
    tasks_per_node: int | None = None
    """Ranks on each node; None means one per GPU, or 1 without GPUs."""
    cpus_per_task: int | None = None
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    time: str | None = None
    name: str | None = None
    container: str | None = None
    container_runtime: ContainerRuntime = "pyxis"
    mounts: tuple[str, ...] = ()
    """Mounts of the container, as HOST[:CONTAINER[:FLAGS]]."""
    env_file: Path | None = None
    """File with NAME=VALUE lines for the ranks; read when the job runs, not copied."""
    max_retries: int = 3
    more: tuple[str, ...] = ()
    """Further sbatch options, such as `reservation=weekend`."""
    certifies: bool = False
    """Whether the job first runs `mtrain verify backend` on a node that has no certificate for its layers."""

    def __post_init__(self) -> None:
        """Refuses a value that Slurm would reject or could misread."""
        counts = ("nodes", "gpus_per_node", "gpus_per_task", "tasks_per_node", "cpus_per_task")
        check_at_least(1, **{name: getattr(self, name) for name in counts})
        check_at_least(0, max_retries=self.max_retries)
        for option in ("partition", "account", "qos"):
            _check(f"--{option}", getattr(self, option), _VALUE)
        _check("--name", self.name, _NAME)
        if self.time is not None and not _TIME.fullmatch(self.time):
            raise ConfigError(f"--time is {self.time!r}, but Slurm takes 90, 24:00:00 or 2-12:00:00; change it")
        if self.gpus_per_node is not None and self.gpus_per_task is not None:
            raise ConfigError("--gpus-per-node and --gpus-per-task are both given; keep one")
        if self.container is None and self.mounts:
            raise ConfigError("--mounts is given without --container; name the image, or remove it")
        for text in (self.container, *self.mounts):
            check_printable("--container or --mounts", text)
        self._check_env_file()
        for option in self.more:
            match = _OPTION.fullmatch(option)
            if match is None or not (match[2] is None or _VALUE.fullmatch(match[2])):
                raise ConfigError(
                    f"--sbatch {option!r} is not of the form name=value, without blanks and quotes; change it"
                )
            # sbatch accepts abbreviated names
            if (ours := next((name for name in sorted(_OURS) if name.startswith(match[1])), None)) is not None:
                raise ConfigError(
                    f"--sbatch {option!r}: mtrain sets --{ours} itself; use mtrain's option for it, if it has one"
                )

    @property
    def ranks_per_node(self) -> int:
        return next((count for count in (self.tasks_per_node, self.gpus_per_node) if count is not None), 1)

    @property
    def num_ranks(self) -> int:
        return self.nodes * self.ranks_per_node

    @property
    def time_limit_s(self) -> float | None:
        """The time limit in seconds; None if it is UNLIMITED or left to the partition."""
        return None if self.time is None else seconds_of(self.time)

    def directives(self) -> Iterator[str]:
        """Yields sbatch's options, except those that are the same for every job."""
        yield f"--nodes={self.nodes}"
        yield f"--ntasks-per-node={self.ranks_per_node}"
        for option in ("gpus_per_node", "gpus_per_task", "cpus_per_task", "partition", "account", "qos", "time"):
            value = getattr(self, option)
            if value is not None:
                yield f"--{option.replace('_', '-')}={value}"
        yield from (f"--{option}" for option in self.more)

    def _check_env_file(self) -> None:
        """Refuses a line that the job would skip silently."""
        if self.env_file is None:
            return
        check_printable("--env-file", str(self.env_file))
        try:
            lines = self.env_file.read_text().splitlines()
        except (OSError, UnicodeDecodeError) as fault:
            raise ConfigError(f"--env-file {self.env_file} cannot be read ({fault}); fix the path") from None
        for number, line in enumerate(lines, 1):
            if line and not line.startswith("#") and not re.match(r"[A-Za-z_][A-Za-z0-9_]*=", line):
                raise ConfigError(f"{self.env_file} line {number} is not NAME=VALUE; fix it, or begin it with #")
        if self.env_file.stat().st_mode & 0o077:
            raise ConfigError(f"{self.env_file} may hold secrets, but others can read it; run chmod 600 on it")


def seconds_of(time: str) -> float | None:
    """Converts a Slurm time limit to seconds; None for UNLIMITED and malformed texts."""
    if time == "UNLIMITED" or not _TIME.fullmatch(time):
        return None
    days, _, clock = time.rpartition("-")
    parts = [int(part) for part in clock.split(":")]
    # without days, one number means minutes, and two mean minutes and seconds; with days, the first means hours
    if days:
        hours, minutes, seconds = [*parts, 0, 0][:3]
    else:
        hours, minutes, seconds = {1: [0, *parts, 0], 2: [0, *parts], 3: parts}[len(parts)]
    return 86400 * int(days or 0) + 3600 * hours + 60 * minutes + seconds


def runtime_named(name: str) -> ContainerRuntime:
    for runtime in get_args(ContainerRuntime):
        if runtime == name:
            return cast(ContainerRuntime, runtime)
    raise ConfigError(
        f"--container-runtime is {name!r}, but must be {' or '.join(get_args(ContainerRuntime))}; change it"
    )


def container_command(options: SlurmOptions, python: str, work_dir: Path) -> tuple[list[str], list[str]]:
    """Returns srun's options, and the command that precedes the verb; a container has its own Python."""
    if options.container is None:
        return [], [python, "-m", "mtrain"]
    mounts = (str(work_dir), *options.mounts)
    match options.container_runtime:
        case "pyxis":
            pairs = [mount if ":" in mount else f"{mount}:{mount}" for mount in mounts]
            flags = [f"--container-image={options.container}", f"--container-mounts={','.join(pairs)}"]
            return [*flags, f"--container-workdir={work_dir}"], ["python", "-m", "mtrain"]
        case "apptainer":
            binds = [text for mount in mounts for text in ("--bind", mount)]
            gpu = ["--nv"] if options.gpus_per_node or options.gpus_per_task else []
            enter = ["apptainer", "exec", *gpu, *binds, "--pwd", str(work_dir), options.container]
            return [], [*enter, "python", "-m", "mtrain"]


def _check(option: str, value: str | None, form: re.Pattern[str]) -> None:
    if value is not None and not form.fullmatch(value):
        raise ConfigError(f"{option} is {value!r}, but must match {form.pattern}; change it")


_DEFAULTS = {
    "SBATCH_ACCOUNT": "account",
    "SBATCH_PARTITION": "partition",
    "SBATCH_QOS": "qos",
    "SBATCH_TIMELIMIT": "time",
}
"""sbatch variable -> the field it sets; sites set these variables for all jobs."""
_CONNECTION = frozenset(("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT", "SLURM_CLUSTERS"))
"""Variables that identify the Slurm cluster and the user."""


def with_defaults(options: SlurmOptions, environ: Mapping[str, str]) -> tuple[SlurmOptions, list[str]]:
    """Fills options in from SBATCH_* variables; also returns notes on the variables it used or ignored."""
    variables = {name: value for name, value in environ.items() if name.startswith("SBATCH_") and value}
    used = {name: field for name, field in _DEFAULTS.items() if name in variables and getattr(options, field) is None}
    notes = [
        f"note: --{field}={variables[name]} comes from the environment variable {name}" for name, field in used.items()
    ]
    ignored = sorted(variables.keys() - used.keys())
    if ignored:
        notes.append(
            f"note: {', '.join(ignored)} in the environment has no effect on the job; set it with an option here, or "
            "with --sbatch name=value"
        )
    values: dict[str, Any] = {field: variables[name] for name, field in used.items()}
    return replace(options, **values), notes


_READ_BY_SLURM = (
    *("SLURM", "SBATCH_", "SRUN_", "SALLOC_", "SCANCEL_", "SCONTROL_", "SINFO_", "SQUEUE_"),
    *("SPANK_", "_SLURM_"),  # options of a site's plugins
)
"""Prefixes of variables that override a script's options, or filter the answers of Slurm's commands."""


def for_slurm(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment for Slurm's commands.

    Leaves out SBATCH_*, which override a script's options; SLURM_*, which a surrounding job sets by the dozen and this
    job's srun would read; and variables such as SQUEUE_STATES, which hide jobs and nodes.
    """
    return {
        name: value for name, value in environ.items() if name in _CONNECTION or not name.startswith(_READ_BY_SLURM)
    }


class Nodes(NamedTuple):
    """Resources that every node of a partition has."""

    cpus: int
    gpus: int
    """GPUs; 0 if Slurm does not count them."""


def nodes_of(partition: str | None) -> Nodes | None:
    """Asks Slurm for the nodes of one or, with commas, several partitions; None: the default one, or no answer."""
    if shutil.which("sinfo") is None:
        return None
    filters = [f"--partition={partition}"] if partition is not None else []
    try:
        done = subprocess.run(
            ["sinfo", "--noheader", *filters, "--format=%P|%c|%G"],
            capture_output=True,
            text=True,
            timeout=_SINFO_TIMEOUT_S,
            check=False,
            env=for_slurm(os.environ),
        )
    except subprocess.TimeoutExpired:
        return None
    rows = [line.strip().split("|", 2) for line in done.stdout.splitlines()]
    # a star marks the default partition
    rows = [row for row in rows if len(row) == 3 and (row[0].endswith("*") or partition is not None)]
    cpus = [int(number[0]) for row in rows if (number := re.match(r"\d+", row[1]))]
    if done.returncode != 0 or not rows or len(cpus) < len(rows):
        return None
    return Nodes(min(cpus), min(sum(map(int, _GPUS.findall(row[2]))) for row in rows))


def completed_by(options: SlurmOptions, nodes: Nodes | None, device: str) -> tuple[SlurmOptions, list[str]]:
    """Gives each rank its share of a node's cores, where Slurm would give it one; also returns a note if it does."""
    if nodes is None:
        return options, []
    job_gpus = options.gpus_per_node
    if job_gpus is None:
        job_gpus = (options.gpus_per_task or 0) * options.ranks_per_node
    if nodes.gpus and not job_gpus and device != "cpu":
        raise ConfigError(
            f"each node has {counted(nodes.gpus, 'GPU')}, but neither --gpus-per-node nor --gpus-per-task is given; "
            f"add --gpus-per-node {nodes.gpus}, or train.device=cpu to run without GPUs"
        )
    share = min(1.0, job_gpus / nodes.gpus) if nodes.gpus and job_gpus else 1.0
    cpus = int(nodes.cpus * share) // options.ranks_per_node
    if options.cpus_per_task is not None or cpus < 1:
        return options, []
    note = f"note: --cpus-per-task={cpus} follows from the {nodes.cpus} cores of a node; set the option to change it"
    return replace(options, cpus_per_task=cpus), [note]
