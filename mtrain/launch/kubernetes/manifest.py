"""The manifest: the configuration, frozen in a ConfigMap, and a JobSet of one pod per node.

A JobSet, not a PyTorchJob: it starts all pods again when one is lost, distinguishes a run that was asked to stop from
one that failed, and is maintained by Kubernetes' own batch group.

The exit code of a pod decides what happens to the run (`mtrain.base.errors`, and STOPPED of torchrun's start). A Job
states in words why it failed, so the rules of the JobSet look for these words; they come from the Job controller of
Kubernetes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from mtrain.base.errors import ConfigError, DataError, NumericError, RunFolderError
from mtrain.config.load import config_yaml
from mtrain.config.schema.root import Config
from mtrain.launch.checked import checked_config
from mtrain.launch.kubernetes.options import KubernetesOptions, shorten
from mtrain.launch.torchrun import STOPPED, torchrun_arguments

_PORT = 29500
_FINAL = (ConfigError.exit_code, DataError.exit_code, NumericError.exit_code, RunFolderError.exit_code)
"""Exit codes of failures that another try does not change."""


@dataclass(frozen=True)
class KubernetesJob:
    """The run that one manifest describes."""

    options: KubernetesOptions
    config: Config
    run_dir: str
    """Absolute path of the run folder in the pods."""

    @property
    def name(self) -> str:
        """Returns the name of the JobSet, the same for every manifest of a run folder: the cluster refuses a second
        one."""
        if self.options.name is not None:
            return self.options.name
        # two run folders of the same name are two runs
        return f"{shorten(PurePosixPath(self.run_dir).name)}-{_code(self.run_dir)}"

    @property
    def config_text(self) -> str:
        """Returns the configuration that the ranks read, as YAML."""
        return config_yaml(self.config)

    @property
    def config_name(self) -> str:
        """Returns the name of the ConfigMap; another configuration has another name, since neither changes under a
        running JobSet."""
        return f"{self.name}-{_code(self.config_text)}"


def kubernetes_job(paths: Sequence[Path], overrides: Sequence[str], options: KubernetesOptions) -> KubernetesJob:
    """Checks a run without touching a cluster.

    Raises:
        ConfigError: The configuration is wrong, does not run on the given ranks, or its run folder is in no volume.
    """
    config = checked_config(paths, overrides, options.num_ranks)
    run_dir = PurePosixPath(config.run.dir)
    if not run_dir.is_absolute() or not any(run_dir.is_relative_to(volume.path) for volume in options.volumes):
        raise ConfigError(
            f"run.dir={config.run.dir!r} is in no volume, and what a pod writes elsewhere is lost with it; "
            f"give --volume CLAIM:/PATH and a run.dir below that path"
        )
    return KubernetesJob(options, config, str(run_dir))


def render(job: KubernetesJob) -> str:
    """Writes the manifest, two documents of YAML for `kubectl apply`."""
    options = job.options
    first = f"{job.name}-nodes-0-0.{job.name}"  # JobSet's name for pod 0
    # Kubernetes itself replaces $(...) by the variable of its environment
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
    """Writes a value as JSON, which no YAML reader takes for anything else; Markup is YAML already."""
    return value if isinstance(value, Markup) else json.dumps(value, ensure_ascii=False)


def _code(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]
