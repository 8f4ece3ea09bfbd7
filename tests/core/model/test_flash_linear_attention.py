"""The delta rule that a run gets, as if there were a GPU and flash-linear-attention."""

from __future__ import annotations

import ast
import inspect
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mtrain.base.certificate import Certificate, Comparison
from mtrain.core.layers import build, certified
from mtrain.core.layers.attention import flash_linear_attention
from mtrain.core.layers.certified import layers_of
from mtrain.core.layers.layer_spec import choose
from mtrain.training import trainer
from tests.config.samples import config
from tests.verify.backend import delta_rule_semantics

CUDA, CPU = torch.device("cuda"), torch.device("cpu")
MACHINE = {"gpu": "NVIDIA H100", "driver": "570.1", "torch": "2.13.0", "fla-core": "0.6.0"}
NET: dict[str, Any] = {"num_key_heads": 4, "num_value_heads": 8, "key_head_dim": 8, "value_head_dim": 16}
HYBRID: dict[str, Any] = {"model__delta_net": NET, "train__precision": "bf16"}
KERNEL_FILE = "fla/ops/gated_delta_rule/chunk.py"


@pytest.fixture
def _with_its_kernels(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(flash_linear_attention, "lacking", lambda device: [] if device == CUDA else ["there is no GPU"])
    monkeypatch.setattr(certified, "machine_of", lambda device: MACHINE)
    monkeypatch.setenv("MTRAIN_CERTIFICATES", str(tmp_path))


def certify(folder: Path, changes: dict[str, Any], machine: dict[str, str] = MACHINE, **found: Any) -> str:
    """Writes a certificate of its delta rule, which is right and twice as fast unless `found` differs."""
    comparison = Comparison(**{"passed": True, "ms": 1.0, "own_ms": 2.0, **found})
    return Certificate("now", machine, layers_of(config(**changes)), {"fla": comparison}).save(folder).name


@pytest.mark.usefixtures("_with_its_kernels")
@pytest.mark.parametrize(
    ("found", "expected"), [({}, "fla"), ({"own_ms": 0.5}, "torch"), ({"passed": False}, "torch")], ids=str
)
def test_auto_takes_a_delta_rule_that_is_certified_and_faster(
    tmp_path: Path, found: dict[str, Any], expected: str
) -> None:
    without = choose(config(**HYBRID), CUDA)
    assert (without.backend, without.certificate) == ("torch", "")
    assert "`mtrain verify backend`" in without.note
    name = certify(tmp_path, HYBRID, **found)
    chosen = choose(config(**HYBRID), CUDA)
    assert (chosen.backend, chosen.certificate) == (expected, name)
    assert name in chosen.note
    assert "flash-linear-attention" in chosen.note
    assert "\n" not in chosen.note
    assert choose(config(**HYBRID, model__backend="torch"), CUDA) == ("torch", "", "")
    assert choose(config(**HYBRID), CPU) == ("torch", "", "")
    assert choose(config(train__precision="bf16"), CUDA) == ("torch", "", ""), "a model without delta nets"
    environment = trainer._certificate(config(**HYBRID), CUDA)
    assert environment["certificate"] == name
    assert environment.get("delta_rule") == ("flash-linear-attention" if expected == "fla" else None)
    assert trainer._certificate(config(**HYBRID, model__backend="torch"), CUDA) == {}


@pytest.mark.usefixtures("_with_its_kernels")
def test_a_certificate_of_another_machine_is_named_and_not_used(tmp_path: Path) -> None:
    name = certify(tmp_path, HYBRID, {**MACHINE, "fla-core": "0.5.0"})
    chosen = choose(config(**HYBRID), CUDA)
    assert (chosen.backend, chosen.certificate) == ("torch", "")
    for fact in (name, "fla-core 0.5.0 and not 0.6.0", "mtrain verify backend"):
        assert fact in chosen.note


@pytest.mark.usefixtures("_with_its_kernels")
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"train__precision": "fp32"}, "train.precision=fp32"),
        ({"train__deterministic": True}, "train.deterministic=true"),
        ({"train__compile": "layers"}, "train.compile=layers"),
        ({"train__offload_layers": 1}, "train.offload_layers=1"),
        ({"layout": {"cp": 2}}, "layout.cp=2"),
        ({"layout": {"cp": 2, "tp": 4, "cp_comm": "ulysses"}}, "layout.cp=2"),  # one key head on a rank
        ({"model__delta_net": {**NET, "key_head_dim": 512}}, "key_head_dim=512"),
    ],
    ids=str,
)
def test_what_it_cannot_do_stays_with_ours(tmp_path: Path, changes: dict[str, Any], reason: str) -> None:
    certify(tmp_path, HYBRID | changes)
    chosen = choose(config(**HYBRID | changes), CUDA)
    assert (chosen.backend, chosen.certificate) == ("torch", "")
    assert reason in chosen.note
    assert "verify backend" not in chosen.note


@pytest.mark.usefixtures("_with_its_kernels")
def test_whole_heads_of_context_parallelism_are_taken(tmp_path: Path) -> None:
    changes = HYBRID | {"layout": {"cp": 2, "tp": 2, "cp_comm": "ulysses"}}
    certify(tmp_path, changes)
    assert choose(config(**changes), CUDA).backend == "fla"


def test_ranks_take_the_same_delta_rule_although_one_has_no_certificate(monkeypatch: pytest.MonkeyPatch) -> None:
    on_gpus: Any = SimpleNamespace(device=CUDA)
    monkeypatch.setattr(build, "any_rank", lambda flag, device: True)
    assert build._agreed("fla", config(**HYBRID), on_gpus) == "torch"
    monkeypatch.setattr(build, "any_rank", lambda flag, device: flag)
    assert build._agreed("fla", config(**HYBRID), on_gpus) == "fla"


def test_what_a_machine_lacks_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert flash_linear_attention.lacking(CPU) == ["there is no GPU"]
    assert flash_linear_attention.lacking(CUDA) == ["flash-linear-attention is not installed"]
    monkeypatch.setattr(flash_linear_attention, "find_spec", lambda name: object())
    (reason,) = flash_linear_attention.lacking(CUDA)
    assert "ModuleNotFoundError" in reason
    flash_linear_attention._fault.cache_clear()


@pytest.mark.parametrize(
    ("triton", "major", "tilelang", "is_usable"),
    [
        ("3.3.1", 9, False, True),
        ("3.6.0", 9, False, False),
        ("3.6.0", 9, True, True),
        ("3.6.0", 10, False, True),
        ("3.7.0", 9, False, False),
        ("3.7.1+git1", 9, False, True),
    ],
)
def test_a_triton_that_compiles_wrong_gradients_is_named(
    monkeypatch: pytest.MonkeyPatch, triton: str, major: int, tilelang: bool, is_usable: bool
) -> None:
    monkeypatch.setattr(flash_linear_attention, "fault_of", lambda modules: None)
    monkeypatch.setattr(flash_linear_attention, "find_spec", lambda name: object() if tilelang else None)
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(__version__=triton))
    flash_linear_attention._fault.cache_clear()
    fault = flash_linear_attention._fault(major)
    flash_linear_attention._fault.cache_clear()
    assert (fault is None) == is_usable
    assert fault is None or (triton in fault and "3.7.1" in fault)


def test_the_stand_in_has_the_arguments_of_the_published_function(flash_linear_attention_wheel: Path) -> None:
    """What the layers call by name is there, with the meaning of its default that the stand-in has."""
    tree = ast.parse((flash_linear_attention_wheel / KERNEL_FILE).read_text())
    (function,) = (
        node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "chunk_gated_delta_rule"
    )
    names = [each.arg for each in function.args.args]
    defaults = dict(zip(reversed(names), (ast.literal_eval(each) for each in reversed(function.args.defaults))))
    for name, ours in inspect.signature(delta_rule_semantics.chunk_gated_delta_rule).parameters.items():
        assert name in names
        assert (name in defaults, defaults.get(name)) == (
            ours.default is not inspect.Parameter.empty,
            None if ours.default is inspect.Parameter.empty else ours.default,
        )
