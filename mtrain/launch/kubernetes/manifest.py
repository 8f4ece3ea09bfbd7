"""The manifest: the configuration, frozen in a ConfigMap, and a JobSet of one pod per node.

A JobSet, not a PyTorchJob: it starts all pods again when one is lost, distinguishes a run that was asked to stop from
one that failed, and is maintained by Kubernetes' own batch group.

The exit code of a pod decides what happens to the run (`mtrain.base.errors`, and STOPPED of torchrun's start). A Job
states in words why it failed, so the rules of the JobSet look for these words; they come from the Job controller of
Kubernetes.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.scalarstring import LiteralScalarString

from mtrain.base.errors import ConfigError, DataError, NumericError, RunFolderError
from mtrain.config.load import config_yaml
from mtrain.config.schema.root import Config
from mtrain.launch.checked import checked_config
from mtrain.launch.kubernetes.options import KubernetesOptions, shorten
from mtrain.launch.torchrun import STOPPED, torchrun_arguments

_CONFIG_DIR = "/etc/mtrain"
_CONFIG_FILE = "config.yaml"
_JOB = "nodes"
_CONTAINER = "ranks"
_PORT = 29500
_FINAL = (ConfigError.exit_code, DataError.exit_code, NumericError.exit_code, RunFolderError.exit_code)
"""Exit codes of failures that another try does not change."""
_POD_FAILURE_POLICY = "PodFailurePolicy"
"""Reason of a Job that was ended by one of its rules."""
_DISRUPTED = "DisruptionTarget"
"""Condition of a pod that was preempted, evicted, or whose node went away."""


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
    yaml = YAML()
    yaml.width = 120
    yaml.indent(mapping=2, sequence=4, offset=2)
    text = io.StringIO()
    text.write("# Written by `mtrain launch kubernetes`; needs JobSet 0.10 or newer in the cluster.\n")
    yaml.dump_all([_config_map(job), _job_set(job)], text)
    return text.getvalue()


def _config_map(job: KubernetesJob) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": _metadata(job, job.config_name),
        "immutable": True,
        "data": {_CONFIG_FILE: LiteralScalarString(job.config_text)},
    }


def _job_set(job: KubernetesJob) -> dict[str, Any]:
    metadata = _metadata(job, job.name)
    if job.options.queue is not None:
        metadata["labels"]["kueue.x-k8s.io/queue-name"] = job.options.queue
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": metadata,
        "spec": {
            "network": {"enableDNSHostnames": True, "subdomain": job.name, "publishNotReadyAddresses": True},
            "failurePolicy": {"maxRestarts": job.options.max_retries, "rules": list(_restart_rules())},
            "replicatedJobs": [{"name": _JOB, "replicas": 1, "template": {"spec": _job(job)}}],
        },
    }


def _restart_rules() -> Iterator[dict[str, Any]]:
    """Yields the rules, of which the first that fits counts; other failures (a lost rank, node or disk) restart within
    maxRestarts."""
    yield {
        "name": "wronginput",
        "action": "FailJobSet",
        "onJobFailureReasons": [_POD_FAILURE_POLICY],
        "onJobFailureMessagePatterns": [f"exit code {code}\\b" for code in _FINAL],
    }
    yield {
        "name": "askedtostop",
        "action": "RestartJobSetAndIgnoreMaxRestarts",
        "onJobFailureReasons": [_POD_FAILURE_POLICY],
        "onJobFailureMessagePatterns": [f"exit code {STOPPED}\\b", _DISRUPTED],
    }


def _job(job: KubernetesJob) -> dict[str, Any]:
    nodes = job.options.nodes
    of_exit_codes = {"containerName": _CONTAINER, "operator": "In", "values": sorted([*_FINAL, STOPPED])}
    return {
        "completionMode": "Indexed",  # each pod knows its number, which is its node rank
        "completions": nodes,
        "parallelism": nodes,
        "backoffLimit": 0,  # a single pod cannot start again: the others have to as well
        "podFailurePolicy": {
            "rules": [
                {"action": "FailJob", "onExitCodes": of_exit_codes},
                {"action": "FailJob", "onPodConditions": [{"type": _DISRUPTED, "status": "True"}]},
            ]
        },
        "template": {"spec": _pod(job)},
    }


def _pod(job: KubernetesJob) -> dict[str, Any]:
    options = job.options
    claims = {volume.claim: f"claim-{number}" for number, volume in enumerate(options.volumes)}
    pod: dict[str, Any] = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": options.grace_s,
        "containers": [_container(job, claims)],
        "volumes": [
            {"name": "config", "configMap": {"name": job.config_name}},
            {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": options.shm}},
            *({"name": name, "persistentVolumeClaim": {"claimName": claim}} for claim, name in claims.items()),
        ],
    }
    if options.node_selector:
        pod["nodeSelector"] = dict(options.node_selector)
    return pod


def _container(job: KubernetesJob, claims: dict[str, str]) -> dict[str, Any]:
    options = job.options
    first = f"{job.name}-{_JOB}-0-0.{job.name}"  # JobSet's name for pod 0
    train = ["train", f"{_CONFIG_DIR}/{_CONFIG_FILE}"]
    # Kubernetes itself replaces $(...) by the variable of its environment
    arguments = torchrun_arguments(options.nodes, options.ranks_per_node, "$(JOB_COMPLETION_INDEX)", first, _PORT)
    container: dict[str, Any] = {
        "name": _CONTAINER,
        "image": options.image,
        "command": ["python", "-m", "mtrain.launch.torchrun", *arguments, "-m", "mtrain", *train],
        "resources": _resources(options),
        "volumeMounts": [
            {"name": "config", "mountPath": _CONFIG_DIR, "readOnly": True},
            {"name": "shm", "mountPath": "/dev/shm"},
            *({"name": claims[volume.claim], "mountPath": volume.path} for volume in options.volumes),
        ],
    }
    if options.env_secret is not None:
        container["envFrom"] = [{"secretRef": {"name": options.env_secret}}]
    return container


def _resources(options: KubernetesOptions) -> dict[str, Any]:
    """Returns requests that equal limits: a pod that is throttled or evicted for memory holds up all the others."""
    given = {"cpu": options.cpus, "memory": options.memory, "nvidia.com/gpu": options.gpus_per_node}
    amounts = {name: str(amount) for name, amount in given.items() if amount is not None}
    return {"requests": amounts, "limits": dict(amounts)} if amounts else {}


def _metadata(job: KubernetesJob, name: str) -> dict[str, Any]:
    metadata: dict[str, Any] = {"name": name, "labels": {"app.kubernetes.io/name": "mtrain"}}
    if job.options.namespace is not None:
        metadata["namespace"] = job.options.namespace
    return metadata


def _code(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]
