"""What a user asks Kubernetes for; every value is checked here, so that a manifest is refused before a cluster sees
it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

from mtrain.base.errors import ConfigError
from mtrain.launch.checked import check_printable

_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
"""A name of RFC 1123, as namespaces, claims and secrets have."""
_NAME = re.compile(r"[a-z]([a-z0-9-]*[a-z0-9])?")
"""Of a JobSet: its service has it too, and services begin with a letter."""
_QUANTITY = re.compile(r"\d+(\.\d+)?(m|[kMGTPE]i?)?")
_LONGEST_NAME = 40
"""Of a JobSet: a pod's host name is this with `-nodes-0-` and its number, and has at most 63 characters."""


class Volume(NamedTuple):
    """A claim that every pod mounts; ranks of several nodes share it, so it has to be ReadWriteMany."""

    claim: str
    path: str

    @classmethod
    def parsed(cls, text: str) -> Volume:
        """Reads CLAIM:/PATH.

        Raises:
            ConfigError: It is neither.
        """
        claim, _, path = text.partition(":")
        if not _LABEL.fullmatch(claim) or not path.startswith("/") or len(path) == 1 or ":" in path:
            raise ConfigError(f"--volume is {text!r}, but has the form CLAIM:/PATH; change it")
        check_printable("--volume", path)
        return cls(claim, path.rstrip("/"))


@dataclass(frozen=True)
class KubernetesOptions:
    """Of one JobSet."""

    nodes: int
    image: str
    gpus_per_node: int | None = None
    """As many ranks each; without, one rank a node and no GPU."""
    volumes: tuple[Volume, ...] = ()
    cpus: str | None = None
    """Of a pod, as Kubernetes writes quantities; so is memory."""
    memory: str | None = None
    shm: str = "16Gi"
    """Of /dev/shm, over which NCCL and gloo talk inside a node; 64 MiB without."""
    namespace: str | None = None
    name: str | None = None
    queue: str | None = None
    """Of Kueue."""
    env_secret: str | None = None
    """A Secret whose keys become environment variables of the ranks."""
    node_selector: tuple[tuple[str, str], ...] = ()
    max_retries: int = 3
    grace_s: int = 300
    """From the request to stop, as when a node is drained, to the kill: the time for a step and a save."""

    def __post_init__(self) -> None:
        """Raises:
        ConfigError: A value is not what Kubernetes takes.
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
        """How many ranks every node gets."""
        return self.gpus_per_node or 1

    @property
    def num_ranks(self) -> int:
        """Of the whole run."""
        return self.nodes * self.ranks_per_node


def shorten(name: str) -> str:
    """A name that Kubernetes takes, from any text; not empty."""
    text = re.sub("[^a-z0-9]+", "-", name.lower()).strip("-")
    text = text if text[:1].isalpha() else f"run-{text}"
    return text[: _LONGEST_NAME - len("-00000000")].strip("-")
