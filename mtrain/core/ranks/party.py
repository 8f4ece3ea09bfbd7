"""The identity of a rank that meets others, and the check that two ranks belong to one world.

All ranks of a world share the run folder, the configuration, the program and the launch. Launches are compared only if
a launcher names them; ranks started by hand have no launch.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from mtrain.base.environment import PACKAGES, RankEnvironment, program_versions
from mtrain.base.version import PACKAGE_FOLDER
from mtrain.config import Config
from mtrain.config.changes import flat_keys

_LAUNCHERS = ("MTRAIN_LAUNCH", "TORCHELASTIC_RUN_ID")
"""Environment variables that name a launch of all ranks of a world."""
_JOB, _STEP, _JOB_RESTART = "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"
_RESTART = "TORCHELASTIC_RESTART_COUNT"
_WORLD_SIZE, _WORK, _FOLDER = "world size", "work", "run folder"
_FOLDER_KEY = "run.dir"
_PYTHON, _SOURCE = "python", "source of mtrain"
_MOST_SHOWN = 4
_LONGEST_VALUE = 120


class Purpose(NamedTuple):
    """What a process opens a world for; the same on every rank."""

    work: str
    """Verb of the command line, or another name."""
    folder: Path
    """Folder that the work uses, such as the run folder."""
    agreed: Mapping[str, str]
    """All other values that ranks must agree on, as JSON, by name."""


def purpose_of(
    work: str, config: Config, folder: Path | None = None, more: Mapping[str, str] = MappingProxyType({})
) -> Purpose:
    """Returns the purpose of work with a configuration. The folder is the run folder by default; `more` has further
    values that ranks must agree on, as text."""
    # run.dir may differ, since each rank may start in its own working directory
    keys = {name: json.dumps(value) for name, value in flat_keys(config).items() if name != _FOLDER_KEY}
    return Purpose(work, Path(config.run.dir) if folder is None else folder, {**keys, **more})


class Difference(NamedTuple):
    """One value in which two ranks differ; None for a rank without the value."""

    name: str
    first: str | None
    second: str | None

    def __str__(self) -> str:
        return f"{self.name} ({_shown(self.first)} and {_shown(self.second)})"


@dataclass(frozen=True)
class Member:
    """What a rank tells the others when they meet."""

    rank: int
    world_size: int
    process: str
    """Process id and machine, for messages."""
    agent: str
    """Name of the torchrun agent that started the process, or ""."""
    group: str
    """Number of that agent, or ""."""
    launch: Mapping[str, str]
    """Environment variables by which launchers name a launch."""
    folders: tuple[str, str]
    """Absolute paths of the run folder: with symbolic links resolved, and as given."""
    agreed: Mapping[str, str]
    """All values that are compared literally, by name."""

    @classmethod
    def of(cls, environment: RankEnvironment, purpose: Purpose, environ: Mapping[str, str]) -> Member:
        """Describes this process."""
        host, is_of_torchrun = socket.gethostname(), "TORCHELASTIC_RUN_ID" in environ
        return cls(
            rank=environment.rank,
            world_size=environment.world_size,
            process=f"process {os.getpid()} on {host}",
            agent=f"{host}:{os.getppid()}" if is_of_torchrun else "",
            group=environ.get("GROUP_RANK", ""),
            launch=_launch(environ),
            folders=(str(purpose.folder.resolve()), os.path.abspath(purpose.folder)),
            agreed={_WORK: purpose.work, **_program(), **purpose.agreed},
        )

    @classmethod
    def parsed(cls, text: str | bytes) -> Member:
        """Reads a member from its `text` or `brief`."""
        content = json.loads(text)
        return cls(**content | {"folders": tuple(content["folders"])})

    @property
    def text(self) -> str:
        """All fields as JSON, for the store."""
        return json.dumps(asdict(self), sort_keys=True)

    @property
    def brief(self) -> str:
        """All fields but `agreed` as JSON, for the store."""
        return replace(self, agreed={}).text

    @property
    def digest(self) -> str:
        """Digest of `agreed`, to compare ranks cheaply."""
        return hashlib.sha256(json.dumps(self.agreed, sort_keys=True).encode()).hexdigest()

    @property
    def restart(self) -> int:
        """Number of times that the torchrun agent has restarted its ranks."""
        text = self.launch.get(_RESTART, "0")
        return int(text) if text.isdecimal() else 0

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.process})"

    def follows(self, other: Member) -> bool:
        """Says whether a torchrun agent started this process in a later restart than the other one."""
        return bool(self.agent) and self.agent == other.agent and self.restart > other.restart

    def replaces(self, other: Member) -> bool:
        """Says whether a torchrun agent replaced the other process by this one in a restart that it does not count,
        because ranks of another node failed."""
        is_sibling = bool(self.agent) and (self.agent, self.restart) == (other.agent, other.restart)
        return is_sibling and self.rank == other.rank and self.process != other.process

    def shares_launch(self, other: Member) -> bool:
        """Says whether one launcher started both processes, so that they share a log; False if unknown."""
        return bool(self.launch) and self.launch == other.launch


def differences(first: Member, second: Member, elastic: bool = False) -> list[Difference]:
    """Returns all values that differ between two ranks but must agree in one world.

    With `elastic`, the second rank may come from a later restart with another number of ranks.
    """
    candidates = [] if elastic else [Difference(_WORLD_SIZE, str(first.world_size), str(second.world_size))]
    if not set(first.folders) & set(second.folders):
        candidates.append(Difference(_FOLDER, first.folders[0], second.folders[0]))
    names = list(_LAUNCHERS)
    shared = first.launch.keys() & second.launch.keys()
    if _JOB in shared:
        names += (_JOB, _JOB_RESTART, _STEP) if _STEP in shared else (_JOB, _JOB_RESTART)
    # agents of several nodes count separately, and only restarts caused by failures of their own ranks
    if not elastic and first.group == second.group:
        names.append(_RESTART)
    candidates += [Difference(name, first.launch.get(name), second.launch.get(name)) for name in names]
    names = [*first.agreed, *(name for name in second.agreed if name not in first.agreed)]
    candidates += [Difference(name, first.agreed.get(name), second.agreed.get(name)) for name in names]
    return [difference for difference in candidates if difference.first != difference.second]


def explained(one: Member, other: Member) -> str:
    """Explains why two ranks do not belong together, or claim the same rank, and what to change."""
    first, second = sorted((one, other), key=lambda member: member.rank)
    mismatches = differences(first, second)
    if not mismatches:
        return f"two processes are rank {first.rank}: {first.process} and {second.process}; {_advice([_RANK])}"
    names = [difference.name for difference in mismatches]
    shown = ", ".join(map(str, mismatches[:_MOST_SHOWN]))
    more = f" and {len(mismatches) - _MOST_SHOWN} more" if len(mismatches) > _MOST_SHOWN else ""
    who = f"{first} and {second}"
    return f"{who} are not of one launch: they differ in {shown}{more}; {_advice(names)}"


_RANK = "rank"


def _advice(names: Sequence[str]) -> str:
    """Returns what to change, judged by the most telling of the names that differ."""
    if _STEP in names and _JOB not in names:
        return "unset MASTER_PORT, so that each step of a job gets its own port, or set another one for each step"
    if {_FOLDER, _WORK, _JOB, *_LAUNCHERS} & set(names):
        return "set another MASTER_PORT for one of the two, or end processes left over from an earlier launch"
    if {_RESTART, _JOB_RESTART} & set(names):
        return "end the rank that is left over from the earlier start"
    if _RANK in names:
        return "give every process its own RANK, or end processes left over from an earlier launch"
    if _WORLD_SIZE in names:
        return "start all ranks with the same WORLD_SIZE"
    if {*PACKAGES, "mtrain", _SOURCE} & set(names):
        return "install the same versions on every machine"
    return "start every rank with the same configuration and arguments"


def _launch(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment variables by which launchers name a launch and its restarts."""
    variables = {name: environ[name] for name in (*_LAUNCHERS, _RESTART, _JOB, _STEP) if environ.get(name)}
    if _JOB in variables:
        variables[_JOB_RESTART] = environ.get(_JOB_RESTART) or "0"  # Slurm sets none before the first restart
    if "TORCHELASTIC_RUN_ID" in variables:
        variables.pop(_STEP, None)  # some users start torchrun in one step per node
    return variables


@cache
def _program() -> dict[str, str]:
    """Returns all versions that can change the numbers of a run, and a digest of the source of mtrain."""
    versions = {name: version for name, version in program_versions().items() if name != _PYTHON}
    source, digest = PACKAGE_FOLDER, hashlib.sha256()
    for path in sorted(source.rglob("*.py")):
        digest.update(str(path.relative_to(source)).encode() + b"\0" + path.read_bytes() + b"\0")
    return {**versions, _SOURCE: digest.hexdigest()[:12]}


def _shown(value: str | None) -> str:
    if value is None:
        return "none"
    return value if len(value) <= _LONGEST_VALUE else f"{value[:_LONGEST_VALUE]}..."
