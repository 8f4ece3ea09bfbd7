"""The check on correct runs: it passes, on the user's data too, and its page and data are written."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mtrain.arch.layout import Layout
from mtrain.base.errors import ConfigError, DataError
from mtrain.config import Config
from mtrain.data.formats.megatron_indexed import writing_corpus
from mtrain.verify.core.activations import assemble_outputs, first_deviating, module_order
from mtrain.verify.core.exact import ExactJob, exact_steps, text_positions
from mtrain.verify.core.layouts import parse_trials, prepared
from mtrain.verify.core.ranks import Pool
from mtrain.verify.core.result import KINDS, ParityReport
from mtrain.verify.core.samples import HardBatch, SamplePlan
from mtrain.verify.core.shrink import BATCH_SIZE, shrink
from mtrain.verify.core.tolerances import tolerances
from mtrain.verify.core.worker import Job, run_layout
from mtrain.verify.parity import refuse_without_reference
from tests.cli.command_line import blocking
from tests.config.samples import config, content
from tests.config.yaml_files import write
from tests.fault_table import Notice
from tests.messages import refuses
from tests.paths import ROOT
from tests.verify.parity.checks import NUM_SAMPLES, check, expert_config, rich_config
from tests.verify.reports import read_back
from tests.warm import completed


@pytest.mark.parametrize(
    ("layouts", "ranks", "num_steps"),
    [
        ("tp2spcp2ulyssesmbs8,pp2vpp2mbs4", [1, 4, 2], 2),
        pytest.param(  # every axis alone, and all together
            "mbs1,dp4mbs1,tp2spmbs2,pp2vpp2mbs1,cp2ulyssesmbs4,tp2sppp2cp2mbs1",
            [1, 1, 4, 2, 2, 2, 8],
            3,
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_sound_layouts_pass_and_everything_is_compared(
    pool: Pool, layouts: str, ranks: list[int], num_steps: int
) -> None:
    report = check(pool, rich_config(train__recompute="full"), layouts, num_steps=num_steps)
    assert report.passed, [(layout.name, layout.first_failure(), layout.error) for layout in report.layouts]
    assert report.diagnosis is None
    assert [layout.num_ranks for layout in report.layouts] == ranks
    for layout in report.layouts:
        for step in range(1, num_steps + 1):
            here = [each for each in layout.deviations if each.step == step]
            assert [each.name for each in here if each.kind == "update"] == list(report.tensors)
            assert [each.name for each in here if each.kind == "gradient"] == list(report.tensors)[::-1]
            assert [each.name for each in here if each.kind == "loss"] == ["main", "z"]
            assert [each.name for each in here if each.kind == "denominator"] == ["main", "z"]
        rounding = [each.value for each in layout.deviations if each.kind == "gradient"]
        assert 0 < max(rounding) < report.tolerance("gradient").value / 3, "the tolerance has room"
    losses = {round(step.objective, 5) for layout in report.layouts for step in layout.steps[:1]}
    assert losses == {round(report.reference.steps[0].objective, 5)}
    assert read_back(ParityReport, report.to_json()) == report
    assert [each.kind for each in report.tolerances] == [kind for kind in KINDS if kind != "rounding"]
    assert report.precision == "float32"


@pytest.mark.parametrize(
    "layouts",
    ["tp2spdp2ep2etp2mbs4", pytest.param("dp4ep4mbs1,pp2cp2dp2ep4", marks=pytest.mark.nightly)],  # without etp
)
def test_layouts_of_experts_pass_with_their_routers_and_biases(pool: Pool, layouts: str) -> None:
    user = expert_config()
    report = check(pool, user, layouts, num_steps=2)
    assert report.passed, [(layout.name, layout.first_failure(), layout.error) for layout in report.layouts]
    terms = ["main", "z", "mtp_1", "router_z", "router_sequence_balance"]
    for layout in report.layouts:
        first = [each for each in layout.deviations if each.step == 1]
        assert [each.name for each in first if each.kind == "loss"] == terms
        biases = [each for each in first if each.name.endswith("expert_bias")]
        assert {each.kind for each in biases} == {"update"}, "no parameter"
        assert len(biases) == report.config["model"]["num_layers"] - 1 + user.model.mtp_depths


@pytest.mark.nightly  # tests/parity/models/test_groups_against_transformers.py
def test_groups_ranked_by_a_number_of_their_own_pass(pool: Pool) -> None:
    user = expert_config()
    assert user.model.experts is not None
    experts = user.model.experts.model_dump() | {"top_k": 2, "group_top_k": 2, "group_score_top_k": 2}
    report = check(pool, expert_config(model__experts=experts), "dp2ep2mbs4", num_steps=1)
    assert report.passed, [(layout.name, layout.first_failure(), layout.error) for layout in report.layouts]


STRUCTURES: dict[str, dict[str, Any]] = {
    "layernorm, biases, gelu": {
        "model__norm": "layernorm",
        "model__linear_bias": True,
        "model__activation": "gelu",
        "model__tied_embeddings": False,
        "loss__aggregation": "seq-mean-token-mean",
        "loss__empty_sequences": "include",
        "train__distributed_optimizer": False,
    },
    "window, yarn, overlaps": {
        "model__qk_norm": True,
        "model__qkv_bias": True,
        "model__sliding_window": 16,
        "model__global_attention_every": 2,
        "model__rope": {"scaling": "yarn", "factor": 4.0, "original_max_positions": 16},
        "data__isolate_documents": False,
        "loss__aggregation": "seq-mean-token-sqrt",
        "train__overlap_grad_reduce": True,
        "train__overlap_param_gather": True,
        "optimizer__clip_grad": 0.0,
    },
    "teacher, smoothing, entropy": {
        "loss__options": {"label_smoothing": 0.1},
        "loss__teacher": {"checkpoint": "runs/teacher"},
        "loss__side_terms": {
            "teacher": {"function": "distillation", "aggregation": "sum"},
            "entropy": {"function": "entropy", "coefficient": -0.01},
        },
    },
    "measured denominator": {
        "loss__function": "tests.parity.losses:hard_tokens",
        "loss__options": {"above": 4.6},
        "loss__denominator": "measured",
        "loss__side_terms": {},
    },
    "two tokens ahead": {"model__mtp_depths": 2},
    "packed": {"data__packing": {}, "loss__aggregation": "seq-mean-token-mean", "model__mtp_depths": 1},
    "packed into wide rows": {"data__packing": {}, "train__tokens_per_micro_batch": 256},
    "latent attention": {
        "model__num_query_groups": None,
        "model__mla": {
            "q_lora_rank": 384,
            "kv_lora_rank": 128,
            "qk_nope_head_dim": 32,
            "qk_rope_head_dim": 16,
            "v_head_dim": 32,
        },
    },
}
TOGETHER = [
    ("layernorm, biases, gelu", "packed"),
    ("window, yarn, overlaps", "teacher, smoothing, entropy"),
    ("latent attention", "packed into wide rows", "measured denominator"),
]
"""Structures that the day checks in one run; the night checks each alone, on more layouts and over two steps."""


@pytest.mark.parametrize(
    ("names", "layouts", "num_steps"),
    [
        # other tests cover pp, dp and what a step leaves to the next one
        *((names, "tp2spcp2mbs4", 1) for names in TOGETHER),
        *(
            pytest.param((name,), "tp2spcp2mbs4,tp2sppp2dp2mbs2,cp2dp2mbs2", 2, marks=pytest.mark.nightly)
            for name in STRUCTURES
        ),
    ],
    ids=lambda value: ", ".join(value) if isinstance(value, tuple) else str(value),
)
def test_other_structures_pass(pool: Pool, names: tuple[str, ...], layouts: str, num_steps: int) -> None:
    changes: dict[str, Any] = {}
    for key, value in (each for name in names for each in STRUCTURES[name].items()):
        assert changes.setdefault(key, value) == value, "a run can only have one of them"
    report = check(pool, rich_config(**changes), layouts, num_steps=num_steps)
    assert report.passed, [(layout.name, layout.first_failure(), layout.error) for layout in report.layouts]


def replaying_config() -> Config:
    """Builds a run on records that name the experts of their tokens."""
    data = {"kind": "sft", "seq_length": 64, "train": [{"path": "rollouts.jsonl"}], "tokenizer": "tokenizer"}
    extras = {"extras": ["advantages", "old_logprobs", "routed_experts:4x4"]}
    return expert_config(data=data | extras | {"packing": {}}, loss__function="ppo")


@pytest.mark.parametrize(
    "layouts",
    ["dp2ep2mbs2", pytest.param("cp2dp2ep2mbs2,tp2spdp2ep2etp2mbs2,pp2mbs2,cp2ulysses", marks=pytest.mark.nightly)],
)
def test_layouts_replay_the_experts_of_records(pool: Pool, layouts: str) -> None:
    report = check(pool, replaying_config(), layouts, num_steps=2)
    assert report.passed, [(layout.name, layout.first_failure(), layout.error) for layout in report.layouts]
    assert report.data.endswith("with experts that routers replay")


class _WithoutReplay:
    """Pool whose reference, or whose trainer, lets routers choose."""

    def __init__(self, pool: Pool, is_of_reference: bool) -> None:
        self._pool, self._is_of_reference, self.device = pool, is_of_reference, pool.device

    def run(self, function: Any, layout: Layout, job: Any, *others: Any) -> Any:
        if self._is_of_reference and isinstance(job, ExactJob):
            job = replace(job, steps=[[replace(text, routed_experts=None) for text in step] for step in job.steps])
        if not self._is_of_reference and isinstance(job, Job):
            job = replace(job, plan=replace(job.plan, choices=()))
        return self._pool.run(function, layout, job, *others)


@pytest.mark.parametrize(
    "is_of_reference", [True, pytest.param(False, marks=pytest.mark.nightly)], ids=["reference", "trainer"]
)
def test_a_side_that_does_not_replay_is_found(pool: Pool, is_of_reference: bool) -> None:
    faulty: Any = _WithoutReplay(pool, is_of_reference)
    report = check(faulty, replaying_config(), "mbs4", num_steps=1)
    assert not any(layout.passed for layout in report.layouts)
    failed = {each.kind for each in report.layouts[0].deviations if each.value > report.tolerance(each.kind).value}
    assert "gradient" in failed
    assert ("samples" in failed) == (not is_of_reference)


@pytest.mark.parametrize(
    "layout",
    ["tp2sp-cp2-mbs4", "pp2vpp2-mbs2", pytest.param("tp2sp-pp2vpp2-cp2-mbs1", marks=pytest.mark.nightly)],
)
def test_module_outputs_are_put_together_from_all_ranks(pool: Pool, layout: str) -> None:
    user = rich_config()
    (trial,) = parse_trials(layout, user.layout, 8)
    shrunk = shrink(user, [trial], batch_size=NUM_SAMPLES).config
    plan, fitted = SamplePlan(0, 3), prepared(trial, shrunk)
    everyone = pool.run(run_layout, fitted.layout, Job(fitted.config, plan, watched_step=0))
    found = assemble_outputs((piece for each in everyone for piece in each.pieces), shrunk)
    texts = HardBatch(shrunk, 0).texts()
    job = ExactJob(shrunk, [texts], watches=True)
    (outcome,) = pool.run(exact_steps, Layout(), job, [everyone[0].initial.tensors])
    expected = outcome[0].outputs
    is_text = text_positions(texts, shrunk)[..., None]
    found = {name: np.where(is_text, each, 0.0) for name, each in found.items()}
    order = module_order(shrunk.model.num_layers)
    assert list(expected) == order
    assert found.keys() == expected.keys()
    assert all(found[name].shape == expected[name].shape and not np.isnan(found[name]).any() for name in order)
    (tolerance,) = (each.value for each in tolerances(shrunk, 1) if each.kind == "loss")
    assert first_deviating(found, expected, order, tolerance) is None


@pytest.fixture
def corpus(tmp_path: Path) -> str:
    """Writes documents of a few tokens."""
    prefix, rng = str(tmp_path / "corpus"), np.random.default_rng(0)
    with writing_corpus(prefix, vocab_size=64) as writer:
        for length in rng.integers(2, 40, 200):
            writer.add(rng.integers(0, 64, length).astype(np.int64))
    return prefix


def test_the_users_corpus_is_read(pool: Pool, corpus: str) -> None:
    sections = {"data__kind": "indexed", "data__train": [{"path": corpus}], "model__vocab_size": 64}
    report = check(pool, rich_config(**sections), "dp2mbs2", num_steps=2)
    assert report.passed, [(layout.name, layout.first_failure(), layout.error) for layout in report.layouts]
    assert report.num_steps == 5
    assert report.data.startswith("2 steps of the run's own data, then 3 steps of random tokens")
    full = NUM_SAMPLES * 32
    counts = [step.denominators["main"] for step in report.reference.steps]
    assert full * 0.8 < counts[0] < full, "a loss token for nearly every position, but none across an edge"
    assert counts[4] < 16


def test_a_damaged_corpus_is_a_data_error(pool: Pool, corpus: str) -> None:
    Path(f"{corpus}.bin").write_bytes(b"")
    sections = {"data__kind": "indexed", "data__train": [{"path": corpus}], "model__vocab_size": 64}
    with refuses(DataError):
        check(pool, rich_config(**sections), "tp2")


@pytest.mark.parametrize(
    ("packing", "layouts"),
    [
        ({"batch": "rows", "window": 64}, "cp2"),  # the check packs by sequences then
        pytest.param({"batch": "sequences"}, "tp2sp-cp2", marks=pytest.mark.nightly),
        pytest.param({"batch": "rows", "window": 64}, "tp2sp-cp2", marks=pytest.mark.nightly),
    ],
    ids=str,
)
def test_packed_conversations_of_a_file_are_samples_alone(
    pool: Pool, word_tokenizer: Path, tmp_path: Path, packing: dict[str, Any], layouts: str
) -> None:
    """Rows of the trainer's packing are compared with what the reference reads of the file, on each layout."""
    path = tmp_path / "samples.jsonl"
    samples = [{"prompt": "a b", "response": "c d e f " * (number % 7 + 1)} for number in range(40)]
    path.write_text("".join(f"{json.dumps(sample)}\n" for sample in samples))
    sections = {
        "data__kind": "sft",
        "data__train": [{"path": str(path)}],
        "data__tokenizer": str(word_tokenizer),
        "data__packing": packing,
        "loss__aggregation": "seq-mean-token-mean",
    }
    report = check(pool, config(**sections), layouts, num_steps=1)
    assert report.passed, [(layout.name, layout.first_failure(), layout.error) for layout in report.layouts]
    assert report.num_steps == 4


@pytest.mark.nightly  # test_packed_conversations_of_a_file_are_samples_alone reads such a file
def test_rows_grow_until_they_hold_answers(pool: Pool, word_tokenizer: Path, tmp_path: Path) -> None:
    samples = [{"prompt": "a b c d " * 10, "response": "e f g " * (number % 5 + 1)} for number in range(40)]
    path = tmp_path / "samples.jsonl"
    path.write_text("".join(f"{json.dumps(sample)}\n" for sample in samples))
    sections = {
        "data__kind": "sft",
        "data__train": [{"path": str(path)}],
        "data__tokenizer": str(word_tokenizer),
        "data__too_long": "refuse",
        "data__seq_length": 4096,
    }
    report = check(pool, config(**sections), f"mbs{NUM_SAMPLES}", num_steps=1)
    assert report.passed
    assert report.config["data"]["seq_length"] == 64
    assert report.reference.steps[0].denominators["main"] > 16


@pytest.mark.nightly  # sums of weights: tests/parity/objectives/test_denominators.py
def test_fractional_weights_that_add_up_to_a_whole_number_round_like_others(
    pool: Pool, word_tokenizer: Path, tmp_path: Path
) -> None:
    weights = [0.7, 0.7, 0.25, 2.5, 0.1, 0.9, 0.3, 0.55] * 2
    samples = [{"prompt": "a", "response": "b c d", "weight": weight} for weight in weights]
    path = tmp_path / "samples.jsonl"
    path.write_text("".join(f"{json.dumps(sample)}\n" for sample in samples))
    sections = {"data__kind": "sft", "data__train": [{"path": str(path)}], "data__tokenizer": str(word_tokenizer)}
    report = check(pool, config(**sections), "mbs1", num_steps=1, batch_size=BATCH_SIZE)
    found = [step.denominators["main"] for layout in report.layouts for step in layout.steps[:1]]
    assert {step.denominators["main"] for step in report.layouts[0].expected[:1]} == {48.0}, "a whole number"
    assert any(value != 48.0 for value in found), "no sum was rounded"
    assert report.passed, [(layout.name, layout.first_failure(), layout.error) for layout in report.layouts]


def test_a_loss_function_that_is_not_there_is_a_config_error(pool: Pool) -> None:
    with refuses(ConfigError, "'next_tokens'"):
        check(pool, config(loss__function="tests.core.loss.bad_losses:next_tokens"), "mbs2")


def mtrain(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Runs the program without torch, which must not be needed."""
    code = blocking(("torch",)) + "import runpy; runpy.run_module('mtrain', run_name='__main__')"
    command = [sys.executable, "-c", code, "verify", "parity", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=dict(os.environ), check=False)


def test_the_names_of_the_faults_are_listed_one_a_line() -> None:
    done = mtrain("--list-injections")
    assert (done.returncode, done.stderr) == (0, "")
    assert len(done.stdout.splitlines()) == 9
    assert "microbatch-means" in done.stdout.splitlines()


def test_a_wrong_configuration_ends_with_2(tmp_path: Path) -> None:
    path = write(tmp_path / "config.yaml", content())
    done = mtrain(path, "layout.tpp=2")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: layout.tpp: there is no such key")


def test_a_fault_ends_with_1_two_lines_and_two_files(tmp_path: Path) -> None:
    path = write(tmp_path / "config.yaml", content(run__dir=str(tmp_path / "run")))
    command = [sys.executable, "-m", "mtrain", "verify", "parity", path]
    done = completed([*command, "--layouts", "mbs4", "--steps", 2, "--inject", "microbatch-means"])
    assert (done.returncode, done.stderr) == (1, "")
    lines = done.stdout.splitlines()
    assert "tp1-pp1-cp1-dp1-mbs16: pass" in done.stdout
    row = next(line for line in lines if line.startswith("tp1-pp1-cp1-dp1-mbs4 "))
    assert row.split()[-1] == "FAIL"
    where = next(number for number, line in enumerate(lines) if line.startswith("mtrain verify parity: microbatches"))
    assert lines[where + 1].startswith("first deviation: gradient of output_layer.weight")
    assert lines[-1].startswith("FAIL: 1 of 2 layouts is not the run of one process with the planted fault")
    report = read_back(ParityReport, (tmp_path / "run" / "parity" / "parity.json").read_text())
    assert not report.passed
    assert (tmp_path / "run" / "parity" / "parity.html").stat().st_size > 10_000


JUDGED: dict[str, Any] = {"loss__options": {"slope": 0.03}, "loss__aggregation": "seq-mean-token-sum"}


@pytest.mark.parametrize("layouts", ["cp2mbs2", pytest.param("tp2sppp2cp2mbs1", marks=pytest.mark.nightly)])
def test_a_loss_of_whole_sequences_passes(pool: Pool, layouts: str) -> None:
    user = rich_config(loss__function="tests.parity.losses:preference", **JUDGED)
    report = check(pool, user, layouts, num_steps=2)
    assert report.passed, [(layout.name, layout.first_failure(), layout.error) for layout in report.layouts]


@pytest.mark.fault(
    "numbers",
    "a loss function of the user's own that judges each context-parallel rank's part of a sequence",
    happens="`mtrain verify parity` names cp, the function, and what makes it exact",
    exit_code=1,
)
def test_a_loss_that_is_not_linear_in_tokens_is_named_with_what_makes_it_exact(pool: Pool, notice: Notice) -> None:
    user = rich_config(loss__function="tests.parity.losses:split_preference", **JUDGED)
    with notice:
        report = check(pool, user, "mbs4,cp2mbs4", num_steps=1)
    assert report.diagnosis is not None
    assert report.diagnosis.axis == "cp"
    assert report.diagnosis.kind == "loss"
    advice = report.diagnosis.lines[2]
    assert "tests.parity.losses:split_preference is yours" in advice
    assert "TermInputs.sum_over_sequence" in advice
    assert read_back(ParityReport, report.to_json()) == report


@pytest.mark.parametrize(
    "layouts",
    ["tp2cp2mbs4", pytest.param("dp2mbs2,pp2mbs2,tp2mbs8,cp2mbs8", marks=pytest.mark.nightly)],  # each alone
)
@pytest.mark.nightly  # tests/parity/objectives/test_policy.py has the formulas, the test below a fault of one
def test_losses_of_policies_are_those_of_their_papers(pool: Pool, layouts: str) -> None:
    """All policy losses run at once, on drawn advantages and log-probabilities; layouts may hide no tokens' share."""
    means, sums = {"aggregation": "seq-mean-token-mean"}, {"aggregation": "token-mean"}
    sides = {
        "sequence": {"function": "gspo", "options": {"clip_low": 0.1, "clip_high": 0.2}, **means},
        "constant": {"function": "cispo", "options": {"clip_low": 0.3, "rollout_cap": 1.1}, **sums},
        "first": {"function": "gspo", "options": {"old_logprobs": False}, **sums},
        "near": {"function": "kl", "coefficient": 0.1, **means},
        "squares": {"function": "kl", "options": {"estimator": "k2"}, "coefficient": 0.1, **sums},
    }
    options = {"dual_clip": 1.2, "rollout_cap": 1.2, "clip_high": 0.28}
    user = rich_config(
        loss__function="ppo", loss__options=options, loss__side_terms=sides, data__packing={}, model__vocab_size=64
    )
    report = check(pool, user, layouts, num_steps=3)
    assert report.passed, [(layout.name, layout.first_failure(), layout.error) for layout in report.layouts]
    first = [each for each in report.layouts[1].deviations if each.step == 1]
    assert [each.name for each in first if each.kind == "loss"] == ["main", *sides]
    compared = {each.name for each in first if each.kind == "samples"}
    assert {f"extra {name}" for name in ("advantages", "old_logprobs", "rollout_logprobs", "ref_logprobs")} <= compared
    assert max(each.value for each in first if each.kind == "gradient") > 0, "some ratios are within their bounds"


def test_a_fault_in_a_loss_of_policies_is_found(pool: Pool) -> None:
    user = rich_config(loss__function="ppo", loss__side_terms={}, model__vocab_size=64)
    report = check(pool, user, "mbs4", "microbatch-means", num_steps=2)
    assert report.diagnosis is not None
    assert report.diagnosis.axis == "microbatches"


def test_a_loss_without_a_reference_is_refused() -> None:
    refuse_without_reference(config())
    with refuses(ConfigError, "loss.function=kto"):
        refuse_without_reference(config(loss__function="kto"))
