"""The identity of a rank among those that meet, and whether two of them belong to one world.

A world has one run folder, one configuration, one program and one launch. Launches are compared if launchers name them;
ranks started by hand have no launch.
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
"""Variables that name a launch of all ranks of a world."""
_JOB, _STEP, _JOB_RESTART = "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"
_RESTART = "TORCHELASTIC_RESTART_COUNT"
_WORLD_SIZE, _WORK, _FOLDER = "world size", "work", "run folder"
_FOLDER_KEY = "run.dir"
_PYTHON, _SOURCE = "python", "source of mtrain"
_MOST_SHOWN = 4
_LONGEST_VALUE = 120


class Purpose(NamedTuple):
    """Purpose for which a process opens a world; the same on every rank."""

    work: str
    """Verb of the command line, or another name."""
    folder: Path
    """Folder that the work is done on, such as the run folder."""
    agreed: Mapping[str, str]
    """Name -> value, as JSON, of everything else that the ranks must agree on."""


def purpose_of(
    work: str, config: Config, folder: Path | None = None, more: Mapping[str, str] = MappingProxyType({})
) -> Purpose:
    """Returns the purpose of work that a configuration describes, on its run folder if no other is given; `more` has
    further values that the ranks must agree on, as text."""
    # run.dir may differ, as each rank may start in its own working directory
    keys = {name: json.dumps(value) for name, value in flat_keys(config).items() if name != _FOLDER_KEY}
    return Purpose(work, Path(config.run.dir) if folder is None else folder, {**keys, **more})


class Difference(NamedTuple):
    """One value in which two ranks differ; None where a rank has no such value."""

    name: str
    first: str | None
    second: str | None

    def __str__(self) -> str:
        return f"{self.name} ({_shown(self.first)} and {_shown(self.second)})"


@dataclass(frozen=True)
class Member:
    """The facts that a rank brings to the place where ranks meet."""

    rank: int
    world_size: int
    process: str
    """Number and machine of the process, for people."""
    agent: str
    """Name of the torchrun agent that started it, else empty."""
    group: str
    """Number of that agent."""
    launch: Mapping[str, str]
    """Environment variables by which launchers name a launch."""
    folders: tuple[str, str]
    """Paths of the run folder: with symbolic links resolved, and as given; both absolute."""
    agreed: Mapping[str, str]
    """Name -> value of everything that is compared literally."""

    @classmethod
    def of(cls, environment: RankEnvironment, purpose: Purpose, environ: Mapping[str, str]) -> Member:
        """Describes this process by a launcher's variables."""
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
        """Reads what `text` wrote."""
        content = json.loads(text)
        return cls(**content | {"folders": tuple(content["folders"])})

    @property
    def text(self) -> str:
        """Everything about the rank, for the store."""
        return json.dumps(asdict(self), sort_keys=True)

    @property
    def brief(self) -> str:
        """Identity of the rank alone, for the store."""
        return replace(self, agreed={}).text

    @property
    def digest(self) -> str:
        """Digest of `agreed`: equal where that is equal."""
        return hashlib.sha256(json.dumps(self.agreed, sort_keys=True).encode()).hexdigest()

    @property
    def restart(self) -> int:
        """Number of times that its torchrun agent has restarted its ranks."""
        text = self.launch.get(_RESTART, "0")
        return int(text) if text.isdecimal() else 0

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.process})"

    def follows(self, other: Member) -> bool:
        """Says whether a torchrun agent started this process after it had ended the other."""
        return bool(self.agent) and self.agent == other.agent and self.restart > other.restart

    def replaces(self, other: Member) -> bool:
        """Says the same of a start that the agent does not count, because another node's ranks failed."""
        is_sibling = bool(self.agent) and (self.agent, self.restart) == (other.agent, other.restart)
        return is_sibling and self.rank == other.rank and self.process != other.process

    def shares_launch(self, other: Member) -> bool:
        """Says whether one launcher is known to have started both, so that their logs are one."""
        return bool(self.launch) and self.launch == other.launch


def differences(first: Member, second: Member, elastic: bool = False) -> list[Difference]:
    """Lists everything in which two ranks differ that should be of one world; the second may come from a later restart,
    with another number of ranks (`elastic`)."""
    found = [] if elastic else [Difference(_WORLD_SIZE, str(first.world_size), str(second.world_size))]
    if not set(first.folders) & set(second.folders):
        found.append(Difference(_FOLDER, first.folders[0], second.folders[0]))
    names = list(_LAUNCHERS)
    shared = first.launch.keys() & second.launch.keys()
    if _JOB in shared:
        names += (_JOB, _JOB_RESTART, _STEP) if _STEP in shared else (_JOB, _JOB_RESTART)
    # agents of several nodes count separately, and only restarts after failures of their own ranks
    if not elastic and first.group == second.group:
        names.append(_RESTART)
    found += [Difference(name, first.launch.get(name), second.launch.get(name)) for name in names]
    names = [*first.agreed, *(name for name in second.agreed if name not in first.agreed)]
    found += [Difference(name, first.agreed.get(name), second.agreed.get(name)) for name in names]
    return [difference for difference in found if difference.first != difference.second]


def explained(one: Member, other: Member) -> str:
    """Says what is wrong with two ranks that differ, or are the same rank, and what to change."""
    first, second = sorted((one, other), key=lambda member: member.rank)
    found = differences(first, second)
    if not found:
        return f"two processes are rank {first.rank}: {first.process} and {second.process}; {_advice([_RANK])}"
    names = [difference.name for difference in found]
    shown = ", ".join(map(str, found[:_MOST_SHOWN]))
    more = f" and {len(found) - _MOST_SHOWN} more" if len(found) > _MOST_SHOWN else ""
    who = f"{first} and {second}"
    return f"{who} are not of one launch: they differ in {shown}{more}; {_advice(names)}"


_RANK = "rank"


def _advice(names: Sequence[str]) -> str:
    """Says what to change, by the most telling of the names."""
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
    """Returns the variables that are set by which launchers name a launch and its restarts."""
    found = {name: environ[name] for name in (*_LAUNCHERS, _RESTART, _JOB, _STEP) if environ.get(name)}
    if _JOB in found:
        found[_JOB_RESTART] = environ.get(_JOB_RESTART) or "0"  # Slurm sets none before the first one
    if "TORCHELASTIC_RUN_ID" in found:
        found.pop(_STEP, None)  # some users start torchrun by a step for each node
    return found


@cache
def _program() -> dict[str, str]:
    """Returns versions that can change the numbers of a run, and a digest of this program's own source."""
    versions = {name: version for name, version in program_versions().items() if name != _PYTHON}
    source, digest = PACKAGE_FOLDER, hashlib.sha256()
    for path in sorted(source.rglob("*.py")):
        digest.update(str(path.relative_to(source)).encode() + b"\0" + path.read_bytes() + b"\0")
    return {**versions, _SOURCE: digest.hexdigest()[:12]}


def _shown(value: str | None) -> str:
    if value is None:
        return "none"
    return value if len(value) <= _LONGEST_VALUE else f"{value[:_LONGEST_VALUE]}..."
