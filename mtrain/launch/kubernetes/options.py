"""Options of a user for Kubernetes; every value is checked here, so that a manifest is refused before a cluster sees
it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

from mtrain.base.errors import ConfigError
from mtrain.launch.checked import check_printable

_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
"""Pattern of a name of RFC 1123, as for namespaces, claims and secrets."""
_NAME = re.compile(r"[a-z]([a-z0-9-]*[a-z0-9])?")
"""Pattern of a JobSet's name, which its service also has; services begin with a letter."""
_QUANTITY = re.compile(r"\d+(\.\d+)?(m|[kMGTPE]i?)?")
_LONGEST_NAME = 40
"""Longest name of a JobSet: a pod's host name is this with `-nodes-0-` and its number, and has at most 63
characters."""


class Volume(NamedTuple):
    """A claim that every pod mounts; ranks of several nodes share it, so it has to be ReadWriteMany."""

    claim: str
    path: str

    @classmethod
    def parsed(cls, text: str) -> Volume:
        """Reads CLAIM:/PATH.

        Raises:
            ConfigError: The text does not have the form CLAIM:/PATH.
        """
        claim, _, path = text.partition(":")
        if not _LABEL.fullmatch(claim) or not path.startswith("/") or len(path) == 1 or ":" in path:
            raise ConfigError(f"--volume is {text!r}, but has the form CLAIM:/PATH; change it")
        check_printable("--volume", path)
        return cls(claim, path.rstrip("/"))


@dataclass(frozen=True)
class KubernetesOptions:
    """Options of one JobSet."""

    nodes: int
    image: str
    gpus_per_node: int | None = None
    """Number of GPUs, and of ranks, on each node; None: one rank a node and no GPU."""
    volumes: tuple[Volume, ...] = ()
    cpus: str | None = None
    """Number of processors of a pod, as Kubernetes writes quantities; None leaves it to the cluster."""
    memory: str | None = None
    """Memory of a pod, as Kubernetes writes quantities; None leaves it to the cluster."""
    shm: str = "16Gi"
    """Size of /dev/shm, over which NCCL and gloo communicate inside a node; the cluster's default is 64 MiB."""
    namespace: str | None = None
    name: str | None = None
    queue: str | None = None
    """Name of the queue of Kueue; None: no queue."""
    env_secret: str | None = None
    """Name of a Secret whose keys become environment variables of the ranks; None: there is none."""
    node_selector: tuple[tuple[str, str], ...] = ()
    max_retries: int = 3
    """Number of restarts after a lost rank, node or disk."""
    grace_s: int = 300
    """Seconds from the request to stop, as when a node is drained, to the kill: the time for a step and a save."""

    def __post_init__(self) -> None:
        """Checks every value.

        Raises:
            ConfigError: A value is not accepted by Kubernetes.
        """
        for option, number, least in (
            ("--nodes", self.nodes, 1),
            ("--gpus-per-node", self.gpus_per_node, 1),
            ("--max-retries", self.max_retries, 0),
            ("--grace", self.grace_s, 1),
        ):
            if number is not None and number < least:
                raise ConfigError(f"{option} is {number}, but must be at least {least}; change it")
        for option, name in (
            ("--namespace", self.namespace),
            ("--queue", self.queue),
            ("--env-secret", self.env_secret),
        ):
            if name is not None and not _LABEL.fullmatch(name):
                raise ConfigError(f"{option} is {name!r}, but may hold only a-z, 0-9 and -; change it")
        if self.name is not None and not _NAME.fullmatch(self.name):
            raise ConfigError(
                f"--name is {self.name!r}, but must begin with a-z and hold only a-z, 0-9 and -; change it"
            )
        if self.name is not None and len(self.name) > _LONGEST_NAME:
            raise ConfigError(f"--name has {len(self.name)} characters, but at most {_LONGEST_NAME} fit; shorten it")
        for option, quantity in (("--cpus", self.cpus), ("--memory", self.memory), ("--shm", self.shm)):
            if quantity is not None and not _QUANTITY.fullmatch(quantity):
                raise ConfigError(f"{option} is {quantity!r}, but Kubernetes takes 64, 500m or 200Gi; change it")
        if not self.image or not self.image.isprintable() or " " in self.image:
            raise ConfigError(f"--image is {self.image!r}, but must name one image; change it")
        for key, value in self.node_selector:
            if not key or not (key + value).isprintable():
                raise ConfigError(f"--node-selector is {key}={value}, but has the form LABEL=VALUE; change it")

    @property
    def ranks_per_node(self) -> int:
        """Returns the number of ranks on each node."""
        return self.gpus_per_node or 1

    @property
    def num_ranks(self) -> int:
        """Returns the number of ranks in the whole run."""
        return self.nodes * self.ranks_per_node


def shorten(name: str) -> str:
    """Turns any text into a name that Kubernetes accepts; never empty."""
    text = re.sub("[^a-z0-9]+", "-", name.lower()).strip("-")
    text = text if text[:1].isalpha() else f"run-{text}"
    return text[: _LONGEST_NAME - len("-00000000")].strip("-")
