"""The layers that a run gets, as if there were a GPU and TransformerEngine."""

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mtrain.arch.features import FEATURES
from mtrain.base.certificate import Certificate, Comparison
from mtrain.base.errors import ConfigError
from mtrain.config.known_issues import beyond_transformer_engine
from mtrain.core.layers import build, certified, layer_spec
from mtrain.core.layers.certified import layers_of
from mtrain.core.layers.layer_spec import choose, chosen_backend
from mtrain.training import trainer
from tests.config.samples import config
from tests.messages import refuses
from tests.paths import ROOT

CUDA = torch.device("cuda")
IN_8_BITS: dict[str, Any] = {"train__fp8": "hybrid"}


MACHINE = {"gpu": "NVIDIA H100", "driver": "570.1", "torch": "2.13.0"}


@pytest.fixture
def _with_transformer_engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(layer_spec, "has_transformer_engine", lambda: True)
    monkeypatch.setattr(certified, "machine_of", lambda device: MACHINE)
    monkeypatch.setenv("MTRAIN_CERTIFICATES", str(tmp_path))


@pytest.mark.usefixtures("_with_transformer_engine")
@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "te"),
        ({"model__backend": "torch"}, "torch"),
        ({"train__precision": "fp16"}, "te"),
        (IN_8_BITS, "te"),
        ({"train__precision": "fp32"}, "torch"),
        ({"layout": {"tp": 2, "cp": 2, "cp_comm": "ulysses"}}, "te"),
        ({"layout": {"tp": 2, "cp": 4, "cp_comm": "ulysses"}}, "torch"),  # two key/value heads on a rank
        ({"layout": {"tp": 2, "cp": 4}}, "te"),
        ({"model__experts": {"num_experts": 4, "top_k": 2, "ffn_hidden_size": 32}}, "torch"),
    ],
    ids=str,
)
def test_auto_takes_what_can_do_the_work(changes: dict[str, Any], expected: str) -> None:
    assert chosen_backend(config(**changes), CUDA) == expected


def test_fp8_is_refused_where_its_layers_cannot_be_used() -> None:
    with refuses(ConfigError, "train.fp8=hybrid", "transformer_engine"):
        chosen_backend(config(**IN_8_BITS), torch.device("cpu"))


def test_without_transformer_engine_auto_takes_torch_and_te_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not layer_spec.has_transformer_engine()
    assert chosen_backend(config(), CUDA) == "torch"
    with refuses(ConfigError, "transformer_engine"):
        chosen_backend(config(model__backend="te"), CUDA)
    monkeypatch.setattr(layer_spec, "faulty_gpu_packages", lambda: {"transformer_engine": "OSError: no libcudart"})
    with refuses(ConfigError, "transformer_engine"):
        chosen_backend(config(model__backend="te"), CUDA)


EXPERTS: dict[str, Any] = {"model__experts": {"num_experts": 4, "top_k": 2, "ffn_hidden_size": 32}}
DOCUMENTS: dict[str, Any] = {"data__isolate_documents": True}
LATENT: dict[str, Any] = {
    "model__mla": {"kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8},
    "model__num_query_groups": None,
}
ITS_EXPERTS: dict[str, Any] = {"model__experts": {**EXPERTS["model__experts"], "implementation": "te"}}


def certify(
    folder: Path, changes: dict[str, Any], machine: dict[str, str] = MACHINE, candidate: str = "te", **found: Any
) -> str:
    """Writes a certificate of TransformerEngine's layers, which are right and twice as fast unless `found` differs."""
    comparison = Comparison(**{"passed": True, "ms": 1.0, "own_ms": 2.0, **found})
    layers = layers_of(config(**changes))
    return Certificate("now", machine, layers, {candidate: comparison}).save(folder).name


@pytest.mark.usefixtures("_with_transformer_engine")
@pytest.mark.parametrize(
    "changes", [{}, DOCUMENTS, EXPERTS, LATENT], ids=["plain", "documents", "experts", "latent attention"]
)
@pytest.mark.parametrize(
    ("found", "expected"), [({}, "te"), ({"own_ms": 0.5}, "torch"), ({"passed": False}, "torch")], ids=str
)
def test_auto_takes_what_is_certified_and_faster(
    tmp_path: Path, changes: dict[str, Any], found: dict[str, Any], expected: str
) -> None:
    without = choose(config(**changes), CUDA)
    assert (without.backend, without.certificate) == ("torch" if changes else "te", "")
    assert ("`mtrain verify backend`" in without.note) == bool(changes), "one line where it could open something"
    name = certify(tmp_path, changes, **found)
    chosen = choose(config(**changes), CUDA)
    assert (chosen.backend, chosen.certificate) == (expected, name)
    assert name in chosen.note
    assert "\n" not in chosen.note
    assert choose(config(**changes, train__precision="fp16"), CUDA).certificate == "", "other layers"
    assert choose(config(**changes), torch.device("cpu")) == ("torch", "", "")
    assert choose(config(**changes, model__backend="torch"), CUDA) == ("torch", "", "")


@pytest.mark.usefixtures("_with_transformer_engine")
@pytest.mark.parametrize(("changes", "without"), [({}, "te"), (DOCUMENTS, "torch")], ids=["plain", "documents"])
def test_a_certificate_of_another_machine_is_named_and_not_used(
    tmp_path: Path, changes: dict[str, Any], without: str
) -> None:
    name = certify(tmp_path, changes, {**MACHINE, "driver": "550.0"})
    certify(tmp_path, changes, {"gpu": "NVIDIA A100"})
    chosen = choose(config(**changes), CUDA)
    assert (chosen.backend, chosen.certificate) == (without, "")
    for fact in (name, "driver 550.0 and not 570.1", "mtrain verify backend"):
        assert fact in chosen.note
    assert "A100" not in chosen.note, "one line, of the nearest"


@pytest.mark.usefixtures("_with_transformer_engine")
def test_what_certificates_cannot_open_stays_with_torch(tmp_path: Path) -> None:
    for changes in (
        {"adapter": {"kind": "lora", "rank": 2, "targets": ["qkv"]}},
        {**DOCUMENTS, "layout": {"cp": 2}},
        {"model__attention_sinks": True},
        {"eval__prompts": ["a"], "eval__interval_steps": 1, "data__tokenizer": "x"},
    ):
        certify(tmp_path, changes)
        chosen = choose(config(**changes), CUDA)
        assert (chosen.backend, chosen.certificate) == ("torch", "")
        assert chosen.note.startswith("model.backend=auto takes torch layers: ")
        assert "verify backend" not in chosen.note


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_machine_that_has_no_such_layers_is_told_nothing_of_them(device: str) -> None:
    for changes in ({}, DOCUMENTS, EXPERTS, {"adapter": {"kind": "lora", "rank": 2, "targets": ["qkv"]}}):
        assert choose(config(**changes), torch.device(device)) == ("torch", "", "")


@pytest.mark.usefixtures("_with_transformer_engine")
def test_documents_are_taken_by_name_with_a_certificate_alone(tmp_path: Path) -> None:
    by_name = {**DOCUMENTS, "model__backend": "te"}
    with refuses(ConfigError, "model.backend=te", "data.isolate_documents", "certificate"):
        choose(config(**by_name), CUDA)
    name = certify(tmp_path, DOCUMENTS)
    assert choose(config(**by_name), CUDA) == ("te", name, "")


@pytest.mark.usefixtures("_with_transformer_engine")
def test_layers_that_failed_are_refused_by_name_and_under_fp8(tmp_path: Path) -> None:
    by_name = {"model__backend": "te"}
    certify(tmp_path, by_name, own_ms=0.5)
    assert chosen_backend(config(**by_name), CUDA) == "te", "slower is not wrong"
    name = certify(tmp_path, by_name, passed=False)
    with refuses(ConfigError, "model.backend=te", name):
        chosen_backend(config(**by_name), CUDA)
    certify(tmp_path, IN_8_BITS, own_ms=0.5)
    assert chosen_backend(config(**IN_8_BITS), CUDA) == "te", "ours have no fp8"
    certify(tmp_path, IN_8_BITS | EXPERTS)
    with refuses(ConfigError, "train.fp8=hybrid", "model.experts.implementation=te"):
        chosen_backend(config(**IN_8_BITS, **EXPERTS), CUDA)
    name = certify(tmp_path, IN_8_BITS, passed=False)
    with refuses(ConfigError, "train.fp8=hybrid", name):
        chosen_backend(config(**IN_8_BITS), CUDA)


@pytest.mark.usefixtures("_with_transformer_engine")
def test_own_fp8_is_refused_where_a_certificate_says_that_it_is_wrong(tmp_path: Path) -> None:
    own = IN_8_BITS | {"model__backend": "torch"}
    certify(tmp_path, IN_8_BITS, passed=False)
    assert "without a certificate" in choose(config(**own), CUDA).note, "TransformerEngine's is of other layers"
    name = certify(tmp_path, own, candidate="fp8", own_ms=0.5)
    found = choose(config(**own), CUDA)
    assert (found.backend, found.certificate) == ("torch", name), "slower is not wrong"
    name = certify(tmp_path, own, candidate="fp8", passed=False)
    with refuses(ConfigError, "train.fp8=hybrid", name):
        choose(config(**own), CUDA)


@pytest.mark.usefixtures("_with_transformer_engine")
def test_its_experts_are_taken_by_name_with_a_certificate_of_their_own(tmp_path: Path) -> None:
    assert layers_of(config(**ITS_EXPERTS)) == layers_of(config(**EXPERTS))
    certify(tmp_path, EXPERTS)
    with refuses(ConfigError, "model.experts.implementation=te", "certificate"):
        choose(config(**ITS_EXPERTS), CUDA)
    name = certify(tmp_path, EXPERTS, candidate="te-experts", own_ms=0.5)
    chosen = choose(config(**ITS_EXPERTS), CUDA)
    assert (chosen.backend, chosen.certificate) == ("te", name), "slower is not wrong, and they were asked for"
    certify(tmp_path, EXPERTS | IN_8_BITS, candidate="te-experts")
    assert chosen_backend(config(**ITS_EXPERTS, **IN_8_BITS), CUDA) == "te"
    certify(tmp_path, EXPERTS, candidate="te-experts", passed=False)
    with refuses(ConfigError, "model.experts.implementation=te", name):
        choose(config(**ITS_EXPERTS), CUDA)
    with refuses(ConfigError, "model.experts.implementation=te", "there is no GPU"):
        choose(config(**ITS_EXPERTS), torch.device("cpu"))


@pytest.mark.usefixtures("_with_transformer_engine")
def test_a_release_beyond_the_bounds_needs_a_certificate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_spec, "release_beyond_bounds", lambda: "version 2.30 is not taken without a certificate")
    by_name = {"model__backend": "te"}
    assert chosen_backend(config(), CUDA) == "torch"
    with refuses(ConfigError, "model.backend=te", "version 2.30", "certificate"):
        chosen_backend(config(**by_name), CUDA)
    certify(tmp_path, {})
    assert chosen_backend(config(), CUDA) == chosen_backend(config(**by_name), CUDA) == "te"


def test_ranks_take_the_same_layers_although_one_has_no_certificate(monkeypatch: pytest.MonkeyPatch) -> None:
    on_gpus: Any = SimpleNamespace(device=CUDA)
    monkeypatch.setattr(build, "any_rank", lambda flag, device: True)
    assert build._agreed("te", config(), on_gpus) == "torch"
    assert build._agreed("te", config(model__backend="te"), on_gpus) == "te", "nothing is chosen"
    with refuses(ConfigError, "train.fp8=hybrid", "MTRAIN_CERTIFICATES"):
        build._agreed("te", config(**IN_8_BITS), on_gpus)
    monkeypatch.setattr(build, "any_rank", lambda flag, device: flag)
    assert [build._agreed(each, config(), on_gpus) for each in ("te", "torch")] == ["te", "torch"]


def test_a_run_folder_names_the_certificate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MTRAIN_CERTIFICATES", str(tmp_path))
    cpu = torch.device("cpu")
    assert trainer._certificate(config(), cpu) == {}
    name = certify(tmp_path, {}, certified.machine_of(cpu))
    assert trainer._certificate(config(), cpu) == {"certificate": name}
    assert trainer._certificate(config(model__backend="torch"), cpu) == {}


def named_keys(function: Any) -> Iterator[str]:
    """Yields the keys of a configuration in the texts of a function."""
    for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(function)))):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from re.findall(r"(?:model|train|data|layout|eval)\.[\w.]*\w|^adapter", node.value)


def test_the_page_of_packages_names_every_key_that_stands_in_the_way() -> None:
    text = (
        (ROOT / "docs" / "speed" / "gpu-packages.md").read_text().partition("## What TransformerEngine's layers do")[2]
    )
    rows = [line for line in text.partition("**What is proved.**")[0].splitlines() if line.startswith("| ")]
    asked = [ask for each in FEATURES for ask in (each.needs_torch_layers, each.needs_certificate)]
    functions = (layer_spec.unbuildable, layer_spec.uncertified, beyond_transformer_engine, *asked)
    keys = {key for function in functions for key in named_keys(function)}
    declared = (getattr(each, "torch_only", None) for each in FEATURES)
    keys |= {key.partition("=")[0] for key in declared if key is not None}
    assert {"adapter", "data.packing", "model.attention_sinks", "model.mla", "train.compile"} < keys
    assert {key for key in keys if not any(f"`{key}" in row for row in rows)} == set()
