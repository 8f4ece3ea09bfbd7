"""Writes the manifest: the configuration, frozen in a ConfigMap, and a JobSet with one pod per node.

A JobSet rather than a PyTorchJob, because it restarts all pods when one is lost, distinguishes a run that was asked to
stop from one that failed, and is maintained by Kubernetes' own batch group.

A pod's exit code decides what happens to the run (`mtrain.base.errors`, and STOPPED in `mtrain.launch.torchrun`). A Job
reports the reason for its failure as text, so the JobSet's rules match the text of Kubernetes' Job controller.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from mtrain.base.errors import ConfigError, DataError, NumericError, RunFolderError
from mtrain.config.load import config_yaml
from mtrain.config.schema.root import Config
from mtrain.launch.checked import check_at_least, check_printable, checked_config
from mtrain.launch.torchrun import STOPPED, torchrun_arguments

_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
"""An RFC 1123 label, the name of a namespace, claim or secret."""
_NAME = re.compile(r"[a-z]([a-z0-9-]*[a-z0-9])?")
"""A JobSet's name, which its service shares; a service's name begins with a letter."""
_QUANTITY = re.compile(r"\d+(\.\d+)?(m|[kMGTPE]i?)?")
_LONGEST_NAME = 40
"""A pod's host name, `NAME-nodes-0-NUMBER`, has at most 63 characters."""


class Volume(NamedTuple):
    """A claim that every pod mounts; on several nodes it must be ReadWriteMany."""

    claim: str
    path: str

    @classmethod
    def parsed(cls, text: str) -> Volume:
        claim, _, path = text.partition(":")
        if not _LABEL.fullmatch(claim) or not path.startswith("/") or len(path) == 1 or ":" in path:
            raise ConfigError(f"--volume is {text!r}, but must have the form CLAIM:/PATH; change it")
        check_printable("--volume", path)
        return cls(claim, path.rstrip("/"))


@dataclass(frozen=True)
class KubernetesOptions:
    nodes: int
    image: str
    gpus_per_node: int | None = None
    """GPUs, and ranks, on each node; None means one rank per node and no GPU."""
    volumes: tuple[Volume, ...] = ()
    cpus: str | None = None
    """Processors of a pod, as a Kubernetes quantity; None leaves it to the cluster."""
    memory: str | None = None
    """Memory of a pod, as a Kubernetes quantity; None leaves it to the cluster."""
    shm: str = "16Gi"
    """Size of /dev/shm, which NCCL and gloo use inside a node; the cluster's default is 64 MiB."""
    namespace: str | None = None
    name: str | None = None
    queue: str | None = None
    env_secret: str | None = None
    """Secret whose keys become environment variables of the ranks."""
    node_selector: tuple[tuple[str, str], ...] = ()
    max_retries: int = 3
    """Restarts after a lost rank, node or disk."""
    grace_s: int = 300
    """Seconds between a request to stop, for example from a drained node, and the kill; must fit a step and a save."""

    def __post_init__(self) -> None:
        check_at_least(1, nodes=self.nodes, gpus_per_node=self.gpus_per_node)
        check_at_least(0, max_retries=self.max_retries)
        check_at_least(1, grace=self.grace_s)
        labels = {"--namespace": self.namespace, "--queue": self.queue, "--env-secret": self.env_secret}
        for option, name in labels.items():
            if name is not None and not _LABEL.fullmatch(name):
                raise ConfigError(f"{option} is {name!r}, but may contain only a-z, 0-9 and -; change it")
        if self.name is not None and not _NAME.fullmatch(self.name):
            raise ConfigError(
                f"--name is {self.name!r}, but must begin with a-z and contain only a-z, 0-9 and -; change it"
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
                raise ConfigError(f"--node-selector is {key}={value}, but must have the form LABEL=VALUE; change it")

    @property
    def ranks_per_node(self) -> int:
        return 1 if self.gpus_per_node is None else self.gpus_per_node

    @property
    def num_ranks(self) -> int:
        return self.nodes * self.ranks_per_node


def shorten(name: str) -> str:
    """Turns any text into a name that Kubernetes accepts; never empty."""
    text = re.sub("[^a-z0-9]+", "-", name.lower()).strip("-")
    text = text if text[:1].isalpha() else f"run-{text}"
    return text[: _LONGEST_NAME - len("-00000000")].strip("-")


_PORT = 29500
_FINAL = (ConfigError.exit_code, DataError.exit_code, NumericError.exit_code, RunFolderError.exit_code)
"""Exit codes of failures that a retry does not change."""


@dataclass(frozen=True)
class KubernetesJob:
    """The run in a manifest."""

    options: KubernetesOptions
    config: Config
    run_dir: str
    """Absolute path in the pods."""

    @property
    def name(self) -> str:
        """The JobSet's name, unique to the run folder, so that the cluster refuses a second JobSet for the same run."""
        if self.options.name is not None:
            return self.options.name
        # run folders with the same name but different paths are different runs
        return f"{shorten(PurePosixPath(self.run_dir).name)}-{_code(self.run_dir)}"

    @property
    def config_text(self) -> str:
        return config_yaml(self.config)

    @property
    def config_name(self) -> str:
        """The ConfigMap's name, with a hash of its content, so that a running JobSet's ConfigMap never changes."""
        return f"{self.name}-{_code(self.config_text)}"


def kubernetes_job(paths: Sequence[Path], overrides: Sequence[str], options: KubernetesOptions) -> KubernetesJob:
    """Checks a run without touching a cluster."""
    config = checked_config(paths, overrides, options.num_ranks)
    run_dir = PurePosixPath(config.run.dir)
    if not run_dir.is_absolute() or not any(run_dir.is_relative_to(volume.path) for volume in options.volumes):
        raise ConfigError(
            f"run.dir={config.run.dir!r} is not in a volume, so a pod's files there are lost when it ends; "
            f"give --volume CLAIM:/PATH and a run.dir below that path"
        )
    return KubernetesJob(options, config, str(run_dir))


def render(job: KubernetesJob) -> str:
    """Writes the manifest, two YAML documents for `kubectl apply`."""
    options = job.options
    first = f"{job.name}-nodes-0-0.{job.name}"  # JobSet's name for pod 0
    # Kubernetes replaces $(...) by the pod's environment variable
    arguments = torchrun_arguments(options.nodes, options.ranks_per_node, "$(JOB_COMPLETION_INDEX)", first, _PORT)
    train = ["-m", "mtrain", "train", "/etc/mtrain/config.yaml"]
    amounts = {"cpu": options.cpus, "memory": options.memory, "nvidia.com/gpu": options.gpus_per_node}
    environment = Environment(
        loader=PackageLoader(__package__),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_as_json,
    )
    return environment.get_template("jobset.yaml").render(
        job=job,
        options=options,
        config_text=Markup(job.config_text.rstrip("\n")),
        final=_FINAL,
        stopped=STOPPED,
        command=["python", "-m", "mtrain.launch.torchrun", *arguments, *train],
        amounts={name: str(amount) for name, amount in amounts.items() if amount is not None},
        claims={volume.claim: f"claim-{number}" for number, volume in enumerate(options.volumes)},
    )


def _as_json(value: object) -> object:
    """Writes a value as JSON, which every YAML reader parses alike; Markup is YAML already."""
    return value if isinstance(value, Markup) else json.dumps(value, ensure_ascii=False)


def _code(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]
