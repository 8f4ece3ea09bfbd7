"""A user's Slurm options and their defaults from the environment; each is checked, so none becomes shell code."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast, get_args

from mtrain.base.errors import ConfigError
from mtrain.launch.checked import check_printable

ContainerRuntime = Literal["pyxis", "apptainer"]

_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_VALUE = re.compile(r"[A-Za-z0-9._,:=@%+*&|!()\[\]/-]{1,256}")
"""Value of a Slurm option: sbatch reads it from a comment line, which quotes and blanks would end; bash runs nothing
there."""
_OPTION = re.compile(r"([a-z][a-z-]*)(?:=(.*))?", re.DOTALL)
_TIME = re.compile(r"\d+|\d+:\d{1,2}(:\d{1,2})?|\d+-\d{1,2}(:\d{1,2}){0,2}|UNLIMITED")
"""Time limit: minutes, minutes:seconds, hours:minutes:seconds, days-hours[:minutes[:seconds]]."""
_OURS = frozenset(
    (
        *(
            "job-name",
            "output",
            "error",
            "open-mode",
            "requeue",
            "no-requeue",
            "signal",
            "dependency",
            "export",
            "chdir",
        ),
        *("nodes", "ntasks", "ntasks-per-node", "gpus-per-node", "gpus-per-task", "cpus-per-task"),
        *("partition", "account", "qos", "time", "wrap", "array", "parsable", "wait", "test-only"),
    )
)
"""Options of sbatch that `mtrain launch slurm` sets, or that would break its script."""


@dataclass(frozen=True)
class SlurmOptions:
    nodes: int
    gpus_per_node: int | None = None
    """GPUs on each node; None if gpus_per_task counts them, or there are none."""
    gpus_per_task: int | None = None
    """GPUs for each rank, which sees no others; replaces gpus_per_node."""
    tasks_per_node: int | None = None
    """Ranks on each node; None: one per GPU, or 1."""
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
    """Restarts of a failed job."""
    more: tuple[str, ...] = ()
    """Further options of sbatch, such as `reservation=weekend`."""
    certifies: bool = False
    """Whether the job first runs `mtrain verify backend` on a node if its layers have no certificate there."""

    def __post_init__(self) -> None:
        """Refuses a value that Slurm does not accept or could misread."""
        for option in ("nodes", "gpus_per_node", "gpus_per_task", "tasks_per_node", "cpus_per_task"):
            number = getattr(self, option)
            if number is not None and number < 1:
                raise ConfigError(f"--{option.replace('_', '-')} is {number}, but must be at least 1; change it")
        if self.max_retries < 0:
            raise ConfigError(f"--max-retries is {self.max_retries}, but must be at least 0; change it")
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
            _check_option(option)

    @property
    def ranks_per_node(self) -> int:
        return next((each for each in (self.tasks_per_node, self.gpus_per_node) if each is not None), 1)

    @property
    def num_ranks(self) -> int:
        return self.nodes * self.ranks_per_node

    @property
    def time_limit_s(self) -> float | None:
        """Returns the time limit in seconds; None for the partition's limit, or none."""
        return None if self.time is None else seconds_of(self.time)

    def directives(self) -> Iterator[str]:
        """Yields the options for sbatch, without those that every job has."""
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
    """Converts one of Slurm's time limits to seconds; None for UNLIMITED and malformed texts."""
    if time == "UNLIMITED" or not _TIME.fullmatch(time):
        return None
    days, _, clock = time.rpartition("-")
    parts = [int(part) for part in clock.split(":")]
    # without days one number means minutes, two mean minutes and seconds; with days the first means hours
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
    """Returns how a rank starts: (options for srun, command before the verb); a container has its own Python instead of
    `python`."""
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
        raise ConfigError(f"{option} is {value!r}, but may hold only {form.pattern}; change it")


def _check_option(option: str) -> None:
    found = _OPTION.fullmatch(option)
    if found is None or not (found[2] is None or _VALUE.fullmatch(found[2])):
        raise ConfigError(f"--sbatch {option!r} is not of the form name=value, without blanks and quotes; change it")
    ours = next((name for name in sorted(_OURS) if name.startswith(found[1])), None)  # sbatch accepts abbreviated names
    if ours is not None:
        raise ConfigError(f"--sbatch {option!r}: --{ours} is set by mtrain itself; use its own option, if it has one")


def checked_paths(paths: Sequence[Path]) -> None:
    """Refuses paths that would break lines of the script."""
    for path in paths:
        check_printable("a path", str(path))


_DEFAULTS = {
    "SBATCH_ACCOUNT": "account",
    "SBATCH_PARTITION": "partition",
    "SBATCH_QOS": "qos",
    "SBATCH_TIMELIMIT": "time",
}
"""Variable of sbatch -> the option that it sets; sites set these variables for all jobs."""
_CONNECTION = frozenset(("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT", "SLURM_CLUSTERS"))
"""Variables that say which Slurm it is, and who asks."""


def with_defaults(options: SlurmOptions, environ: Mapping[str, str]) -> tuple[SlurmOptions, list[str]]:
    """Completes the options from the environment; returns them with notes on the variables that were used."""
    given = {name: value for name, value in environ.items() if name.startswith("SBATCH_") and value}
    taken = {name: field for name, field in _DEFAULTS.items() if name in given and getattr(options, field) is None}
    notes = [f"note: --{field}={given[name]} is given by {name} of the environment" for name, field in taken.items()]
    ignored = sorted(given.keys() - taken.keys())
    if ignored:
        notes.append(
            f"note: {', '.join(ignored)} of the environment has no effect on the job; what it asks for can be given as "
            "an option here, or as --sbatch name=value"
        )
    values: dict[str, Any] = {field: given[name] for name, field in taken.items()}
    return replace(options, **values), notes


_READ_BY_SLURM = (
    *("SLURM", "SBATCH_", "SRUN_", "SALLOC_", "SCANCEL_", "SCONTROL_", "SINFO_", "SQUEUE_"),
    *("SPANK_", "_SLURM_"),  # options of a site's plugins
)
"""Prefixes of variables that override options of a script, or filter answers of Slurm's commands."""


def for_slurm(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment for Slurm's commands.

    SBATCH_* override the options of a script, and SLURM_* reach the job, whose srun reads them; there are dozens inside
    another job. SQUEUE_STATES and others hide jobs and nodes.
    """
    return {
        name: value for name, value in environ.items() if name in _CONNECTION or not name.startswith(_READ_BY_SLURM)
    }
