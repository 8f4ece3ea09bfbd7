"""Whole steps as on GPUs: no CPU tensor in a collective, and the host reads from the device once per step.

The trainer runs on a simulated device (tensors.py), on one rank and on two. Every value that the host fetches and every
copy is counted with its line of code; each case states what a step may have of them.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from mtrain import arch
from mtrain.config import Config
from tests.config.samples import content
from tests.data.conftest import word_tokenizer
from tests.parity.expert_models import MIXTRAL
from tests.parity.families import GEMMA
from tests.paths import ROOT
from tests.simulated_gpu import cuda
from tests.training.test_changed import write_corpus
from tests.training.test_trainer import records
from tests.warm import completed, program_environment

__all__ = ["word_tokenizer"]

pytestmark = pytest.mark.nightly

BASE: dict[str, Any] = {
    "model__num_layers": 2,
    "model__hidden_size": 32,
    "model__ffn_hidden_size": 48,
    "model__num_attention_heads": 4,
    "model__num_query_groups": 2,
    "model__vocab_size": 64,
    "train__global_batch_size": 4,
    "train__num_steps": 3,
    "data__seq_length": 16,
    "metrics__tensorboard": False,
    "checkpoint__at_end": False,
}
DOCUMENTS: dict[str, Any] = {"data__kind": "indexed", "data__train": [{"path": "CORPUS"}]}
# Rows of several answers each, whose prompts have no loss.
PACKED: dict[str, Any] = {
    "data__kind": "sft",
    "data__train": [{"path": "ANSWERS"}],
    "data__tokenizer": "WORDS",
    "data__cache_dir": "CACHE",
    "data__packing": {},
    "train__tokens_per_micro_batch": 32,
    "train__global_batch_size": 16,
}
# Two answers each; the host compares their scores between the two passes.
PAIRS: dict[str, Any] = PACKED | {
    "data__train": [{"path": "PAIRS"}],
    "loss__function": "simpo",
}


@dataclass(frozen=True)
class Case:
    """Run of one case."""

    changes: dict[str, Any] = field(default_factory=dict)
    ranks: int = 1
    reads: int = 1
    """Number of values that the host may fetch in a step, on the rank that fetches most: the totals of the step."""
    waits: int = 0
    """Number of waits for events, including events that have long happened."""
    step: int = 3
    """Number of the step that is examined, the last one: one-time allocations are done by then."""


LAYERS = {"model__num_layers": 4, "data__seq_length": 64}
APART = {"model__megatron": {"gradient_accumulation_fusion": False}}
TP2, PP2 = {"tp": 2, "sp": True}, {"pp": 2, "vpp": 2}
CASES = {
    "dense": Case(),
    "recomputed": Case({"train__recompute": "full"}),
    "documents": Case(DOCUMENTS),
    "experts": Case(MIXTRAL),
    # The sizes of each exchange: two layers and two microbatches.
    "expert-parallel": Case(MIXTRAL | {"layout": {"ep": 2}}, ranks=2, waits=4),
    "experts of float32": Case(MIXTRAL | {"train__precision": "fp32"}),
    "gemma": Case(GEMMA),
    "data-parallel": Case({"train__overlap_grad_reduce": True, "train__overlap_param_gather": True}, ranks=2),
    "tensor-parallel": Case({"layout": TP2}, ranks=2),
    "tensor-parallel, documents": Case(DOCUMENTS | {"layout": TP2}, ranks=2),
    "tensor-parallel, packed": Case(PACKED | {"layout": TP2 | {"cp": 2}}, ranks=4),
    "context-parallel, documents": Case(DOCUMENTS | {"layout": {"cp": 2}}, ranks=2),
    "ulysses": Case({"layout": {"cp": 2, "cp_comm": "ulysses"}}, ranks=2),
    "pipeline": Case({"model__num_layers": 4, "layout": PP2}, ranks=2),
    # In flight since step 3; whether ranks were ready in step 4 is read in step 5.
    "a save in flight": Case({"train__num_steps": 5, "checkpoint__interval_steps": 3}, ranks=2, waits=1, step=5),
    "four layers": Case(LAYERS),
    "moved activations": Case(LAYERS | {"train__offload_layers": 3}),
    "moved activations of stages": Case(LAYERS | {"train__offload_layers": 4, "layout": PP2}, ranks=2),
    "weight gradients added apart": Case(LAYERS | APART),
    "tensor-parallel, four layers": Case(LAYERS | {"layout": TP2}, ranks=2),
    "on the host": Case(LAYERS | {"train__offload_optimizer": True}),
    "on the host, data-parallel": Case(
        {"train__offload_optimizer": True, "train__overlap_grad_reduce": True, "train__overlap_param_gather": True},
        ranks=2,
    ),
    "on the host, a save in flight": Case(
        {"train__offload_optimizer": True, "train__num_steps": 5, "checkpoint__interval_steps": 3},
        ranks=2,
        waits=1,
        step=5,
    ),
    "on the host, fp16, experts": Case(MIXTRAL | {"train__precision": "fp16", "train__offload_optimizer": True}),
    # Between its two passes: how many sequences there are, and their scores.
    "pairs": Case(PAIRS, reads=3),
    "tensor-parallel, pairs": Case(PAIRS | {"layout": TP2}, ranks=2, reads=3),
    # Whether a gradient overflowed comes with the totals; the plan stays on the device.
    "fp16": Case({"train__precision": "fp16"}),
    "fp16, experts": Case(MIXTRAL | {"train__precision": "fp16"}),
}


@pytest.fixture(scope="module")
def simulated_gpu(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the library of the device."""
    return cuda.compiled(tmp_path_factory.mktemp("simulated_gpu"))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the folder of the runs."""
    return tmp_path_factory.mktemp("runs")


def sections(changes: dict[str, Any], runs: Path) -> dict[str, Any]:
    """Makes a configuration."""
    text = json.dumps(content(**BASE | changes))
    for name, place in {
        "CORPUS": "corpus",
        "WORDS": "words",
        "CACHE": "cache",
        "ANSWERS": "answers.jsonl",
        "PAIRS": "pairs.jsonl",
    }.items():
        text = text.replace(f'"{name}"', json.dumps(str(runs / place)))
    made: dict[str, Any] = json.loads(text)
    return made


@pytest.fixture(scope="module")
def results(simulated_gpu: Path, runs: Path, word_tokenizer: Path) -> dict[str, Any]:
    """Returns what each rank reports for each case."""
    write_corpus(runs / "corpus", 0)
    (runs / "words").symlink_to(word_tokenizer)
    lines = [{"prompt": "a b", "response": " ".join("abcdefghij"[: 1 + number % 10])} for number in range(40)]
    (runs / "answers.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    pairs = [{"prompt": "a b", "chosen": f"c {line['response']}", "rejected": line["response"]} for line in lines]
    (runs / "pairs.jsonl").write_text("".join(json.dumps(line) + "\n" for line in pairs))
    cases = {name: {"sections": sections(case.changes, runs), "ranks": case.ranks} for name, case in CASES.items()}
    command = [sys.executable, "-m", "tests.simulated_gpu.program", str(simulated_gpu), str(runs)]
    given, environment = json.dumps(cases), program_environment()
    done = subprocess.run(command, cwd=ROOT, env=environment, input=given, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_the_device_notices_what_a_gpu_would(results: dict[str, Any]) -> None:
    found = results["probe"]
    assert found["refused"] == [
        "a tensor of the CPU in a collective",
        "a strided tensor in a collective",
        "tensors of two devices in one operation",
        "a tensor of the GPU in a collective of hosts",
    ]
    assert dict(found["noted"]) == {"read": 9, "waiting copy": 4, "copy": 3, "wait": 2}


@pytest.mark.parametrize("name", CASES)
def test_the_host_runs_ahead_of_the_device(results: dict[str, Any], name: str) -> None:
    ranks, case = results[name], CASES[name]
    assert [rank["error"] for rank in ranks] == [None] * case.ranks
    for rank in ranks:
        noted = rank["steps"][str(case.step)]
        of_kind = {
            kind: [f"{count} x {where}" for each, where, count in noted if each == kind]
            for kind in ("read", "waiting copy", "wait")
        }
        counts = Counter({kind: sum(count for each, _, count in noted if each == kind) for kind in of_kind})
        assert counts["read"] >= 1, "nobody has seen the loss"
        assert counts["read"] <= case.reads, of_kind["read"]
        assert counts["waiting copy"] == 0, of_kind["waiting copy"]
        assert counts["wait"] <= case.waits, of_kind["wait"]


@pytest.mark.parametrize("name", ["experts of float32"])
def test_it_gives_the_numbers_of_a_cpu(results: dict[str, Any], runs: Path, tmp_path: Path, name: str) -> None:
    assert results[name][0]["error"] is None
    (tmp_path / "run.json").write_text(json.dumps(sections(CASES[name].changes, runs)))
    arguments = [sys.executable, "-m", "mtrain", "train", tmp_path / "run.json", f"run.dir={tmp_path / 'run'}"]
    done = completed(arguments)
    assert done.returncode == 0, done.stderr
    found, expected = (
        [value for record in records(run) for value in (record["loss"], record["grad_norm"])]
        for run in (runs / name, tmp_path / "run")
    )
    assert len(expected) == 6
    assert found == pytest.approx(expected, rel=1e-5)


def test_moved_activations_are_not_on_the_device_between_their_passes(results: dict[str, Any], runs: Path) -> None:
    """Moves the first three of four layers; one at a time comes back and one leaves."""
    plain = "weight gradients added apart"  # as with moved activations
    kept, moved = (results[name][0] for name in (plain, "moved activations"))
    # two layers instead of four, and what both hold besides
    assert moved["peaks"]["3"] < 0.6 * kept["peaks"]["3"]
    copies = [
        count for kind, where, count in moved["steps"]["3"] if kind == "copy" and "core/state/host_memory.py" in where
    ]
    assert len(copies) == 2  # the lines of both ways
    assert copies[0] == copies[1] >= 4 * 3 * 10  # microbatches, layers, tensors that a layer keeps at least
    expected, *others = (
        [record["loss"] for record in records(runs / name)]
        for name in (plain, "moved activations", "moved activations of stages")
    )
    assert others == [expected, expected]


def test_moments_on_the_host_are_not_on_the_device_between_updates(results: dict[str, Any], runs: Path) -> None:
    kept, moved = (results[name][0] for name in ("four layers", "on the host"))
    model = Config.model_validate(sections(CASES["on the host"].changes, runs)).model
    moments_bytes = 2 * 4 * arch.num_padded_parameters(model, tp=1)
    assert kept["held"]["3"] - moved["held"]["3"] == pytest.approx(moments_bytes, rel=0.001)
    copies = [where for kind, where, _ in moved["steps"]["3"] if kind == "copy" and "host_moments.py" in where]
    assert len(copies) == 2  # the lines of both ways
    plain, other = ([record["loss"] for record in records(runs / name)] for name in ("four layers", "on the host"))
    assert plain == other


def test_a_save_waits_for_moments_on_their_way_to_the_host(results: dict[str, Any]) -> None:
    for rank in results["on the host, a save in flight"]:
        waits = [where for kind, where, _ in rank["steps"]["3"] if kind == "wait"]
        assert any("optimizer_state.py" in where for where in waits), waits


def test_fused_weight_gradients_are_those_that_are_added(results: dict[str, Any], runs: Path) -> None:
    apart, *others = (
        [record["grad_norm"] for record in records(runs / name)]
        for name in ("weight gradients added apart", "four layers", "tensor-parallel, four layers")
    )
    for fused in others:
        assert fused != apart  # no microbatch's gradient is rounded to bf16
        assert fused == pytest.approx(apart, rel=0.01)
