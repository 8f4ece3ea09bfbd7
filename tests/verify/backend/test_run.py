"""`mtrain verify backend`: sound candidates pass and are certified, wrong ones fail, whatever the layers."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from typer.testing import CliRunner

from mtrain.base.certificate import Certificate, Comparison, certificates
from mtrain.base.errors import ConfigError, MachineError
from mtrain.cli.main import app
from mtrain.config import Config
from mtrain.core.layers.certified import layers_of
from mtrain.hf.configuration import load_config
from mtrain.verify.backend import worker
from mtrain.verify.backend.candidates import (
    CANDIDATES,
    MISSING_GRADIENT,
    NO_CANDIDATES,
    Candidate,
    without_apex,
    without_flash_attention,
)
from mtrain.verify.backend.cases import cases_of, few_layers, length_of, rows_like, starts_of
from mtrain.verify.backend.errors import FACTORS, compared, errors_of, floor
from mtrain.verify.backend.run import Certified, verify_backend
from mtrain.verify.core.result import BackendReport
from mtrain.verify.parity import Request
from tests.config.samples import config, content
from tests.messages import refuses
from tests.paths import ROOT
from tests.pool import Pool
from tests.verify.backend.planted import PLANTED
from tests.verify.backend.stand_ins import ABSENT, APEX, CAPTURED, CRASHING, DELTA_RULES, FLASH_ATTENTION, STAND_IN
from tests.verify.reports import read_back

EXPERTS = {"num_experts": 8, "top_k": 2, "ffn_hidden_size": 32, "every": 2, "shared_ffn_hidden_size": 16}
LATENT = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 10}
BF16 = {"train__precision": "bf16"}
BLOCKS = {
    "model__hidden_size": 128,
    "model__num_attention_heads": 2,
    "model__num_query_groups": 1,
    "model__head_dim": 64,
    "model__ffn_hidden_size": 128,
}
DOCUMENTS = {"data__isolate_documents": True}
DELTA_NET = {
    "model__delta_net": {
        "num_key_heads": 2,
        "num_value_heads": 4,
        "key_head_dim": 8,
        "value_head_dim": 16,
        "full_attention_every": 2,
    }
}
WINDOWS = {"model__sliding_window": 9, "model__global_attention_every": 2}


def check(pool: Pool, changes: dict[str, Any], *candidates: Any, fault: str | None = None) -> Certified:
    request = Request(None, 1, 1, fault, "mtrain verify backend")
    return verify_backend(config(**changes), request, lambda line: None, pool, candidates)


@pytest.mark.parametrize(
    ("changes", "cases"),
    [
        (BF16, ["layer 0"]),
        (WINDOWS | DOCUMENTS, ["layer 0, window 9, documents", "layer 1, documents"]),
        (BF16 | {"model__experts": EXPERTS} | DOCUMENTS, ["layer 0, experts, documents", "layer 1, documents"]),
        ({"model__mla": LATENT, "model__num_query_groups": None}, ["layer 0, latent attention"]),
        ({"model__attention_sinks": True, "train__precision": "fp16"}, ["layer 0, sinks"]),
        ({"adapter": {"kind": "dora", "rank": 3, "targets": ["qkv", "fc2"]}}, ["layer 0, adapters (dora)"]),
        (BF16 | {"layout": {"cp": 2}} | DOCUMENTS, ["layer 0, documents, cp2 allgather"]),
        *(  # layers of candidates are called with what each way has exchanged
            pytest.param({"layout": {"cp": 2, "cp_comm": each}}, [f"layer 0, cp2 {each}"], marks=pytest.mark.nightly)
            for each in ("ulysses", "ring")
        ),
        ({"model__megatron": {"no_rope_freq": 4}}, ["layer 0", "layer 3"]),
    ],
    ids=str,
)
def test_layers_of_every_feature_are_those_of_the_reference(
    pool: Pool, changes: dict[str, Any], cases: list[str]
) -> None:
    outcome = check(pool, changes, STAND_IN)
    worst = [(layout.name, layout.first_failure()) for layout in outcome.report.layouts]
    assert outcome.report.passed, worst
    assert [layout.name for layout in outcome.report.layouts] == [f"stand-in: {case}" for case in cases]
    (found,) = outcome.certificate.candidates.values()
    assert found.passed
    assert all(case["ms"] > 0 and case["own_ms"] > 0 for case in found.cases)
    assert sum(case["num_layers"] for case in found.cases) == 8


@pytest.mark.parametrize(
    ("changes", "candidates"),
    [
        (BF16 | WINDOWS | DOCUMENTS, ["flash-attn: layer 0, window 9, documents", "flash-attn: layer 1, documents"]),
        (BF16, ["flash-attn: layer 0", "apex: layer 0"]),
        (BF16 | {"model__norm": "layernorm"}, ["apex: layer 0"]),
    ],
    ids=str,
)
def test_kernels_of_other_libraries_are_compared(pool: Pool, changes: dict[str, Any], candidates: list[str]) -> None:
    wanted = [each for each in (FLASH_ATTENTION, APEX) if any(name.startswith(each.name) for name in candidates)]
    outcome = check(pool, changes, *wanted)
    assert outcome.report.passed, [(each.name, each.first_failure()) for each in outcome.report.layouts]
    assert [layout.name for layout in outcome.report.layouts] == candidates


@pytest.mark.parametrize(
    ("changes", "case"),
    [
        pytest.param({}, "", marks=pytest.mark.nightly),
        pytest.param(DOCUMENTS, ", documents", marks=pytest.mark.nightly),
        # documents over ranks: tests/core/model/attention/test_delta_net_core.py
        pytest.param(
            DOCUMENTS | {"layout": {"cp": 2, "cp_comm": "ulysses"}},
            ", documents, cp2 ulysses",
            marks=pytest.mark.nightly,
        ),
        ({"train__precision": "fp16", "train__micro_batch_size": 2}, ""),
    ],
    ids=str,
)
def test_a_delta_rule_by_its_documentation_is_that_of_the_reference(
    pool: Pool, changes: dict[str, Any], case: str
) -> None:
    outcome = check(pool, BF16 | DELTA_NET | changes, DELTA_RULES[0])
    assert outcome.report.passed, [(each.name, each.first_failure()) for each in outcome.report.layouts]
    names = [f"fla: layer 0, delta net{case}", f"fla: layer 1{case}"]
    assert [layout.name for layout in outcome.report.layouts] == names


@pytest.mark.parametrize(
    "wrong",
    [DELTA_RULES[1], pytest.param(DELTA_RULES[2], marks=pytest.mark.nightly)],
    ids=["documents ignored", "no scale"],
)
def test_a_wrong_delta_rule_fails(pool: Pool, wrong: Candidate) -> None:
    outcome = check(pool, BF16 | DELTA_NET | DOCUMENTS, wrong)
    assert [layout.passed for layout in outcome.report.layouts] == [False, True], "attention is ours"
    assert not outcome.certificate.candidates["fla"].passed


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"train__precision": "fp32"}, "no float32"),
        (BF16 | {"model__attention_sinks": True}, "sinks"),
        (BF16 | {"layout": {"cp": 2}}, "context parallelism"),
        (BF16 | {"model__mla": LATENT, "model__num_query_groups": None}, "no layer has our attention"),
    ],
    ids=str,
)
def test_what_flash_attention_cannot_do_is_said(changes: dict[str, Any], reason: str) -> None:
    found = without_flash_attention(config(**changes), torch.device("cuda"))
    assert found is not None
    assert "flash-attn is not installed" in found
    assert reason in found
    assert without_apex(config(**changes), torch.device("cuda")) == "apex is not installed"


@pytest.mark.parametrize(
    ("fault", "changes", "kind"),
    [
        ("missing-gradient", BF16, "gradient"),
        ("document-boundary", BF16 | DOCUMENTS, "layer_output"),
        ("dropped-window", BF16 | WINDOWS, "layer_output"),
        ("bf16-sums", BF16 | {"data__seq_length": 256}, "gradient"),
    ],
)
def test_wrong_layers_fail(pool: Pool, fault: str, changes: dict[str, Any], kind: str) -> None:
    is_shipped = fault == MISSING_GRADIENT.name
    outcome = check(pool, changes, fault=fault) if is_shipped else check(pool, changes, PLANTED[fault])
    assert not outcome.report.passed
    assert outcome.report.injected == (fault if is_shipped else None)
    failed = {each.kind for layout in outcome.report.layouts for each in layout.deviations if not each.passed}
    assert kind in failed
    assert not outcome.certificate.candidates[fault].passed


@pytest.mark.parametrize(
    "changes",
    [{"train__fp8": "hybrid"}, BLOCKS | {"train__fp8": "e4m3", "train__fp8_recipe": "blockwise"}],
    ids=["rowwise", "blockwise"],
)
def test_own_fp8_is_compared_with_layers_without_it(pool: Pool, changes: dict[str, Any]) -> None:
    asked = BF16 | {"model__backend": "torch"} | changes
    (candidate,) = (each for each in CANDIDATES if each.name == "fp8")
    outcome = check(pool, asked, candidate)
    assert outcome.report.passed, [(each.name, each.first_failure()) for each in outcome.report.layouts]
    (case,) = outcome.certificate.candidates["fp8"].cases
    assert all(2 * error["own"] < error["candidate"] for error in case["errors"] if error["kind"] == "layer_output")
    others = {each.name: each.absent(config(**asked), torch.device("cpu")) or "" for each in CANDIDATES}
    assert {name for name, reason in others.items() if "train.fp8" not in reason} == {"fp8", "te-experts", "fla"}


def test_faults_that_are_unknown_or_a_test_are_refused(pool: Pool) -> None:
    with refuses(ConfigError, "--inject dropped-window", "tests/verify/backend/test_run.py", "missing-gradient"):
        check(pool, {}, fault="dropped-window")
    with refuses(ConfigError, "--inject no-such-fault"):
        check(pool, {}, fault="no-such-fault")


def test_a_certificate_has_both_errors_of_every_tensor(pool: Pool, tmp_path: Path) -> None:
    outcome = check(pool, BF16 | {"train__micro_batch_size": 2}, STAND_IN, CAPTURED, ABSENT)
    path = outcome.certificate.save(tmp_path)
    assert path.name == outcome.certificate.name
    (read,) = certificates(tmp_path)
    assert (read, read.name) == (outcome.certificate, path.name)
    assert read.candidates.keys() == {"stand-in", "captured"}
    assert outcome.report.left_out == {"absent": "made for no cpu", **NO_CANDIDATES}
    (case,) = read.candidates["stand-in"].cases
    assert case["shape"] == [2, 64, 64]
    assert {error["kind"] for error in case["errors"]} == {"layer_output", "input_gradient", "gradient"}
    assert len({error["name"] for error in case["errors"]}) == 8
    assert all(0 < error["own"] < 0.02 and 0 < error["candidate"] < 0.02 for error in case["errors"])
    assert any(error["own"] != error["candidate"] for error in case["errors"])
    assert {"gpu", "torch", "megatron-core", "mtrain"} <= read.machine.keys()
    assert read.layers == layers_of(config(**BF16))
    assert len(outcome.report.times) == 2
    assert read_back(BackendReport, outcome.report.to_json()) == outcome.report


def test_nothing_to_compare_is_no_verdict(pool: Pool) -> None:
    with refuses(MachineError, "absent: made for no cpu"):
        check(pool, {}, ABSENT)


def test_every_candidate_reaches_the_ranks(pool: Pool) -> None:
    with refuses(MachineError, *(f"{candidate.name}: " for candidate in CANDIDATES)):
        check(pool, BF16 | {"train__fp8": "hybrid"}, *CANDIDATES)


def test_a_rule_that_forbids_compiled_layers_is_the_reason() -> None:
    overlapping = config(train__overlap_grad_reduce=True, train__overlap_param_gather=True)
    (candidate,) = (each for each in CANDIDATES if each.name == "compile")
    assert "train.overlap_param_gather" in (candidate.absent(overlapping, torch.device("cpu")) or "")


def test_files_that_are_no_certificates_certify_nothing(tmp_path: Path) -> None:
    sound = Certificate("now", {"gpu": "A"}, {"cp": 1}, {"te": Comparison(True, 1.0, 2.0)})
    path = sound.save(tmp_path)
    for number, text in enumerate(["", "[]", "{}", path.read_text().replace('"format": 1', '"format": 0')]):
        (tmp_path / f"backend-{number}.json").write_text(text)
    (read,) = certificates(tmp_path)
    assert read.candidates["te"].is_faster


def test_a_candidate_that_raises_fails_and_the_next_one_is_compared(pool: Pool) -> None:
    outcome = check(pool, {}, CRASHING, STAND_IN)
    crashed, sound = outcome.report.layouts
    assert "no kernel image is available" in (crashed.error or "")
    assert sound.passed
    found = outcome.certificate.candidates
    assert (found["crashing"].passed, found["stand-in"].passed) == (False, True)


def test_tokens_whose_experts_hang_by_a_rounding_are_not_compared() -> None:
    few = few_layers(config(model__experts=EXPERTS), 64)
    logits = torch.randn(1, 4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    logits[0, 2] = logits[0, 2].sort(descending=True).values
    logits[0, 2, 2] = logits[0, 2, 1] - 1e-9
    assert worker._is_settled(logits, None, few).tolist() == [[True, True, False, True]]


def test_a_tolerance_follows_from_our_own_error_and_the_precision() -> None:
    exact = torch.tensor([3.0, -4.0], dtype=torch.float64)
    assert errors_of(exact + 0.4, exact) == pytest.approx({"root mean square": 0.4 / 12.5**0.5, "largest": 0.1})
    for missing in (None, exact[:1], torch.full_like(exact, math.nan)):
        assert not any(each.passed for each in compared(config().train, "gradient", "w", exact, missing, exact))
    in_bf16, in_8_bits = (config(**BF16, **more).train for more in ({}, {"train__fp8": "hybrid"}))
    rms, largest = compared(in_bf16, "gradient", "w", exact + 0.4, exact, exact)
    assert largest.tolerance == pytest.approx(FACTORS["largest"] * 0.1 + 2 * 2**-8)
    assert rms.tolerance == pytest.approx(FACTORS["root mean square"] * 0.4 / 12.5**0.5 + 2**-8 / 3**0.5)
    products = {"layer_output": 8**0.5 / 16, "input_gradient": 24**0.5 / 8, "gradient": 24**0.5 / 8}
    for kind, size in products.items():
        more = floor(in_8_bits, kind, "root mean square") - floor(in_bf16, kind, "root mean square")
        assert more == pytest.approx(size)


def test_our_own_error_beyond_all_numbers_passes_nothing() -> None:
    exact = torch.ones(2, dtype=torch.float64)
    assert not any(each.passed for each in compared(config().train, "gradient", "w", None, None, exact))


def test_rows_have_documents_of_all_lengths() -> None:
    rows = rows_like(True, 2, 64, torch.device("cpu"))
    starts = starts_of(rows)
    assert starts[0].unique().tolist() == [0, 8, 23, 24, 51]
    assert starts[1].unique().tolist() == [0, 9, 24, 25, 52]
    assert [len(documents.unique()) for documents in rows.documents] == [5, 5]
    assert starts_of(rows_like(False, 2, 64, torch.device("cpu"))).unique().tolist() == [0]


def test_few_layers_show_all_kinds() -> None:
    user: Config = config(model__experts={**EXPERTS, "first_dense_layers": 3}, **WINDOWS)
    few = few_layers(user, 64)
    assert [case.name for case in cases_of(user)] == ["layer 0, window 9", "layer 1", "layer 3, experts"]
    assert few.model.num_layers == max(case.layer for case in cases_of(user)) + 1
    assert [case.name for case in cases_of(few)] == [case.name for case in cases_of(user)]
    assert few_layers(config(model__sliding_window=4096), 96).model.sliding_window == 32


def test_only_layers_with_experts_are_named_so() -> None:
    user = load_config(
        [ROOT / "configs" / "model" / "nemotron3_nano_30b_a3b.yaml", ROOT / "configs" / "run" / "pretrain.yaml"]
    )
    assert user.model.layer_pattern is not None
    named = {user.model.layer_pattern[case.layer]: case.name for case in cases_of(user)}
    assert {kind for kind, name in named.items() if "experts" in name} == {"E"}


@pytest.mark.parametrize("run", ["pretrain", "finetune"])
@pytest.mark.parametrize("model", sorted(path.stem for path in (ROOT / "configs" / "model").glob("*.yaml")))
def test_layers_of_every_shipped_model_can_be_compared(model: str, run: str) -> None:
    user = load_config([ROOT / "configs" / "model" / f"{model}.yaml", ROOT / "configs" / "run" / f"{run}.yaml"])
    few = few_layers(user, length_of(user.layout.cp, user.row_width))
    assert len(cases_of(few)) == len(cases_of(user))
    assert few.model.num_layers <= 6
    assert layers_of(few)["isolate_documents"] == user.data.isolate_documents


def written(folder: Path, **changes: Any) -> str:
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(content(run__dir=str(folder / "run"), **changes)))
    return str(path)


def test_the_verb_writes_report_and_certificate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pool: Pool) -> None:
    monkeypatch.setenv("MTRAIN_CERTIFICATES", str(tmp_path / "certificates"))
    monkeypatch.setattr("mtrain.verify.backend.run.Pool", lambda *given: pool)
    monkeypatch.setattr("mtrain.verify.backend.run.CANDIDATES", (STAND_IN, ABSENT))
    monkeypatch.setattr(verify_backend, "__defaults__", (None, (STAND_IN, ABSENT)))
    path = written(tmp_path)
    done = CliRunner().invoke(app, ["verify", "backend", path, "--device", "cpu"])
    assert done.exit_code == 0, done.output
    assert "stand-in: layer 0: pass" in done.output
    assert "absent: not compared: made for no cpu" in done.output
    assert "PASS: 1 layer of candidates computes what ours do" in done.output
    (certificate,) = (tmp_path / "certificates").iterdir()
    assert json.loads(certificate.read_text())["candidates"]["stand-in"]["passed"]
    assert {each.name for each in (tmp_path / "run" / "backend").iterdir()} == {"backend.json", "backend.html"}
    again = CliRunner().invoke(app, ["verify", "backend", path, "--device", "cpu", "--unless-certified"])
    assert again.exit_code == 0, again.output
    assert again.output == f"certificate: {certificate} covers these layers on this machine\n"
    certificate.unlink()
    done = CliRunner().invoke(app, ["verify", "backend", path, "--inject", "missing-gradient"])
    assert done.exit_code == 1, done.output
    assert "with the planted fault missing-gradient" in done.output
    assert not any((tmp_path / "certificates").iterdir()), "a planted fault certifies nothing"
    listed = CliRunner().invoke(app, ["verify", "backend", "--list-injections"])
    assert listed.output.split() == ["missing-gradient"]
