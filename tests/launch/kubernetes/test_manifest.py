"""`mtrain launch kubernetes`: what it refuses, and a manifest that JobSet's own schema accepts.

jobset_v1alpha2.json.gz is the schema of the JobSet resource (kubernetes-sigs/jobset at 08dfbdfd, Apache-2.0) without
its descriptions, and with every field that it does not name refused, as `kubectl apply --validate=strict` does.
"""

from __future__ import annotations

import gzip
import json
import re
import shlex
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from mtrain.base.errors import ConfigError
from mtrain.hf.configuration import load_config
from mtrain.launch.kubernetes.manifest import KubernetesOptions, Volume, kubernetes_job, render
from tests.cli.command_line import call
from tests.messages import refuses

CONFIG = """
model: {num_layers: 2, hidden_size: 32, ffn_hidden_size: 64, num_attention_heads: 2, vocab_size: 64}
data: {kind: mock, seq_length: 16}
layout: {pp: 2}
train: {global_batch_size: 16, num_steps: 4}
optimizer: {lr: 1.0e-3, schedule: constant}
"""
SCHEMA = json.loads(gzip.decompress(Path(__file__).with_name("jobset_v1alpha2.json.gz").read_bytes()))
VOLUMES = (Volume("runs", "/runs"), Volume("corpora", "/data"))


@pytest.fixture
def config(tmp_path: Path) -> Path:
    (tmp_path / "run.yaml").write_text(CONFIG)
    return tmp_path / "run.yaml"


def documents(config: Path, run_dir: str = "/runs/First_run", **options: Any) -> tuple[Any, Any]:
    """Returns the ConfigMap and the JobSet."""
    given = KubernetesOptions(**{"nodes": 2, "image": "registry/mtrain:1", "volumes": VOLUMES, **options})
    text = render(kubernetes_job([config], [f"run.dir={run_dir}"], given))
    config_map, job_set = yaml.safe_load_all(text)
    return config_map, job_set


def pod(job_set: Any) -> Any:
    return job_set["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]


EVERYTHING: dict[str, Any] = {
    "gpus_per_node": 8,
    "cpus": "64",
    "memory": "800Gi",
    "namespace": "team",
    "queue": "batch",
    "env_secret": "tokens",
    "node_selector": (("cloud/gpu", "h100"),),
}


@pytest.mark.parametrize("options", [{}, EVERYTHING], ids=["least", "everything"])
def test_jobsets_own_schema_takes_it(config: Path, options: dict[str, Any]) -> None:
    assert list(jsonschema.Draft7Validator(SCHEMA).iter_errors(documents(config, **options)[1])) == []


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("spec", "failurePolicy", "maxRestart"), 3),
        (("spec", "failurePolicy", "rules", 0, "action"), "Restart"),
        (("spec", "replicatedJobs", 0, "template", "spec", "completions"), "2"),
    ],
)
def test_the_schema_would_find_a_mistake(config: Path, path: tuple[str | int, ...], value: Any) -> None:
    job_set = documents(config)[1]
    place = job_set
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.Draft7Validator(SCHEMA).validate(job_set)


def test_ranks_read_the_frozen_configuration(config: Path, tmp_path: Path) -> None:
    config_map, job_set = documents(config)
    (tmp_path / "frozen.yaml").write_text(config_map["data"]["config.yaml"])
    assert load_config([tmp_path / "frozen.yaml"], []) == load_config([config], ["run.dir=/runs/First_run"])
    (volume,) = (volume for volume in pod(job_set)["volumes"] if "configMap" in volume)
    assert volume["configMap"]["name"] == config_map["metadata"]["name"]
    (container,) = pod(job_set)["containers"]
    (mount,) = (mount for mount in container["volumeMounts"] if mount["name"] == volume["name"])
    assert container["command"][-1] == f"{mount['mountPath']}/config.yaml"
    assert config_map["immutable"]
    other = documents(config, run_dir="/runs/second")[0]["metadata"]["name"]
    assert other != config_map["metadata"]["name"]


def test_ranks_meet_at_the_first_pod(config: Path) -> None:
    _, job_set = documents(config, gpus_per_node=4)
    name, network = job_set["metadata"]["name"], job_set["spec"]["network"]
    (job,) = job_set["spec"]["replicatedJobs"]
    # JobSet's host names: <jobset>-<replicated job>-<job>-<pod>.<subdomain>
    first = f"{name}-{job['name']}-0-0.{network['subdomain']}"
    (container,) = pod(job_set)["containers"]
    assert f"--master-addr={first}" in container["command"]
    assert {"--nnodes=2", "--nproc-per-node=4", "--node-rank=$(JOB_COMPLETION_INDEX)"} <= set(container["command"])
    assert len(first.split(".")[0]) <= 63
    assert container["resources"]["limits"] == container["resources"]["requests"] == {"nvidia.com/gpu": "4"}


HOSTILE = ("a: b", "yes", "1e3", "- x #", "'\"\\\\{}[]&*!|>%@`", "{{ job }}", "ä😀")


@pytest.mark.parametrize("text", HOSTILE)
def test_no_value_becomes_syntax_of_yaml(config: Path, text: str) -> None:
    volumes = (*VOLUMES, Volume("more", f"/{text}"))
    _, job_set = documents(config, image=text.replace(" ", ""), volumes=volumes, node_selector=((text, text),))
    (container,) = pod(job_set)["containers"]
    assert container["image"] == text.replace(" ", "")
    assert container["volumeMounts"][-1]["mountPath"] == f"/{text}"
    assert pod(job_set)["nodeSelector"] == {text: text}


def action(job_set: Any, exit_code: int | None) -> str:
    """Returns what JobSet would do after a pod that left with this code, or with None, whose node was taken away.
    Written from the documented rules of Jobs and JobSets; the words are those of the Job controller."""
    (job,) = (each["template"]["spec"] for each in job_set["spec"]["replicatedJobs"])
    reason, message = "BackoffLimitExceeded", "Job has reached the specified backoff limit"
    for number, rule in enumerate(job["podFailurePolicy"]["rules"]):
        codes = rule.get("onExitCodes", {"values": []})["values"]
        if exit_code in codes or (exit_code is None and "onPodConditions" in rule):
            what = f"Container ranks for pod ns/a-0-x failed with exit code {exit_code}"
            what = "Pod ns/a-0-x has condition DisruptionTarget" if exit_code is None else what
            reason, message = "PodFailurePolicy", f"{what} matching FailJob rule at index {number}"
            break
    for rule in job_set["spec"]["failurePolicy"]["rules"]:
        if reason in rule["onJobFailureReasons"] and any(
            re.search(pattern, message) for pattern in rule["onJobFailureMessagePatterns"]
        ):
            return str(rule["action"])
    return "RestartJobSet"


@pytest.mark.parametrize(
    ("exit_code", "then"),
    [
        (1, "RestartJobSet"),
        (2, "FailJobSet"),
        (3, "FailJobSet"),
        (4, "FailJobSet"),
        (5, "RestartJobSet"),
        (6, "FailJobSet"),
        (7, "RestartJobSet"),
        (75, "RestartJobSetAndIgnoreMaxRestarts"),
        (137, "RestartJobSet"),
        (None, "RestartJobSetAndIgnoreMaxRestarts"),
    ],
)
def test_exit_codes_decide_what_is_tried_again(config: Path, exit_code: int | None, then: str) -> None:
    assert action(documents(config)[1], exit_code) == then


@pytest.mark.parametrize(
    ("options", "fact"),
    [
        ({"nodes": 0}, "--nodes"),
        ({"gpus_per_node": 0}, "--gpus-per-node"),
        ({"max_retries": -1}, "--max-retries"),
        ({"namespace": "A b"}, "'A b'"),
        ({"name": "7b"}, "'7b'"),
        ({"name": "x" * 41}, "--name"),
        ({"memory": "lots"}, "--memory"),
        ({"image": "a b"}, "--image"),
        ({"node_selector": (("", "x"),)}, "--node-selector"),
        ({"gpus_per_node": 3}, "6"),
        ({"volumes": (VOLUMES[1],)}, "run.dir='/runs/First_run'"),
    ],
)
def test_what_cannot_run_is_refused(config: Path, options: dict[str, Any], fact: str) -> None:
    with refuses(ConfigError, fact):
        documents(config, **options)


@pytest.mark.parametrize("text", ["runs", "runs:data", "Runs:/data", ":/data", "runs:/", "runs:/a:/b"])
def test_a_volume_has_one_form(text: str) -> None:
    with refuses(ConfigError):
        Volume.parsed(text)


@pytest.mark.parametrize("name", ["First_run", "ÄÖÜ", "x" * 80, "-", "a.b.c", "7b"])
def test_any_run_folder_gives_a_name(config: Path, name: str) -> None:
    jsonschema.Draft7Validator(SCHEMA).validate(job_set := documents(config, run_dir=f"/runs/{name}")[1])
    assert re.fullmatch(r"[a-z]([a-z0-9-]*[a-z0-9])?", job_set["metadata"]["name"])


def test_the_command_writes_a_file(config: Path, tmp_path: Path) -> None:
    options = ["--nodes", "2", "--image", "mtrain:1", "--volume", "runs:/runs", "--output", tmp_path / "job.yaml"]
    code, text = call("launch", "kubernetes", config, "run.dir=/runs/a", *options)
    assert (code, "kubectl apply -f" in text) == (0, True)
    assert [each["kind"] for each in yaml.safe_load_all((tmp_path / "job.yaml").read_text())] == ["ConfigMap", "JobSet"]


def test_torchrun_gets_a_command_for_each_node(config: Path) -> None:
    code, text = call(
        "launch", "torchrun", config, "run.dir=a b", "--nodes", "2", "--gpus-per-node", "4", "--first-node", "gpu-1"
    )
    assert code == 0
    first, second = text.splitlines()
    assert first.replace("--node-rank=0", "--node-rank=1") == second
    assert shlex.split(first)[-1] == "run.dir=a b"
    assert "--nproc-per-node=4 --node-rank=0 --master-addr=gpu-1" in first
    code, text = call("launch", "torchrun", config, "run.dir=a b", "--nodes", "2")
    assert (code, "name node 0" in text) == (2, True)
