"""Every known fault is found, and the report names the axis and the quantity that reveal it."""

from typing import Any

import pytest

from mtrain.base.errors import ConfigError
from mtrain.verify.core.ranks import Pool
from mtrain.verify.core.result import Diagnosis
from mtrain.verify.core.weights import EMBEDDING, OUTPUT
from mtrain.verify.planted import faults
from mtrain.verify.planted.inject import BACKEND_FAULTS, FAULTS, PREEMPT_FAULTS, RESUME_FAULTS, TESTS, Fault, chosen
from tests.messages import refuses
from tests.paths import ROOT
from tests.verify.parity import test_adapters, test_images
from tests.verify.parity.checks import check, expert_config, rich_config
from tests.verify.planted import test_shared_faults
from tests.verify.planted.faults import ADAPTER_PLANTS, PLANTS
from tests.verify.planted.image_faults import IMAGE_PLANTS
from tests.verify.planted.shared_faults import SHARED_PLANTS

FINAL_NORM = "decoder.final_layernorm.weight"
ATTENTION = "layer 0 self_attention.core_attention"
QKV = "decoder.layers.0.self_attention.linear_qkv.weight"
BIAS = "mtp.layers.0.transformer_layer.mlp.router.expert_bias"
CP, DP, MICRO, PP, SP, TP = "cp2mbs8", "dp2mbs4", "mbs2", "pp2mbs2", "tp2mbs8,tp2spmbs8", "tp2mbs8"

EXPECTED: dict[str, tuple[str, str, str, str, str | None]] = {
    "microbatch-means": (MICRO, "microbatches", "gradient", FINAL_NORM, None),
    "dp-means": (DP, "dp", "gradient", FINAL_NORM, None),
    "cp-counts-again": (CP, "cp", "denominator", "main", None),
    "tp-counts-again": (TP, "tp", "denominator", "main", None),
    "dp-size-in-denominator": (DP, "dp", "gradient", FINAL_NORM, None),
    "cp-scaled-loss": (CP, "cp", "gradient", FINAL_NORM, None),
    "sp-norms-not-reduced": (SP, "sp", "gradient", FINAL_NORM, None),
    "tied-gradient-missed": (f"{PP},{MICRO}", "pp", "gradient", EMBEDDING, None),
    "dropped-microbatch": (MICRO, "microbatches", "denominator", "main", None),
    "labels-shifted-after-slicing": (CP, "cp", "loss", "main", None),
    "sharded-gradients-averaged": (f"{DP},dp2-weights-mbs4", "shard", "gradient", FINAL_NORM, None),
    "positions-not-zigzag": (CP, "cp", "loss", "main", ATTENTION),
    "keys-in-rank-order": (CP, "cp", "loss", "main", ATTENTION),
    "hops-left-out": (f"{CP},cp2ringmbs8", "ring", "loss", "main", ATTENTION),
    "document-boundary-crossed": (MICRO, "every layout", "loss", "main", ATTENTION),
    "clip-before-normalisation": (MICRO, "every layout", "update", EMBEDDING, None),
    "clamped-denominator": (MICRO, "microbatches", "denominator", "z", None),
    "epsilon-in-denominator": (MICRO, "every layout", "denominator", "main", None),
    "int32-weights": (MICRO, "every layout", "denominator", "main", None),
    "dp-rank-not-reduced": (DP, "dp", "gradient", FINAL_NORM, None),
    "totals-in-half": (DP, "dp", "loss", "main", None),
    "gradients-in-half": (DP, "dp", "gradient", FINAL_NORM, None),
    "dropout-left-on": (MICRO, "every layout", "loss", "main", "embedding"),
    "vocabulary-padding-in-softmax": (MICRO, "every layout", "loss", "main", None),
    "local-side-term-denominators": (DP, "dp", "gradient", FINAL_NORM, None),
    "norms-decayed": (MICRO, "every layout", "update", "decoder.layers.0.input_layernorm.weight", None),
    "norms-counted-per-tp-rank": (TP, "tp", "grad_norm", "grad_norm", None),
    "full-width-norm-by-tp-rank": (TP, "tp", "loss", "main", ATTENTION),
    "state-across-documents": (MICRO, "every layout", "loss", "main", ATTENTION),
    "state-dropped-at-parts": (CP, "cp", "loss", "main", ATTENTION),
    "decay-in-half-precision": (MICRO, "every layout", "loss", "main", ATTENTION),
    "router-losses-shared-out": (CP, "cp", "gradient", "mtp.layers.0.transformer_layer.mlp.router.weight", None),
    "expert-loads-per-rank": ("dp4mbs2", "dp", "update", BIAS, None),
    "experts-left-out-of-norm": (f"{DP},dp2ep2mbs4", "ep", "grad_norm", "grad_norm", None),
    "depths-divided-by-main": (MICRO, "every layout", "gradient", OUTPUT, None),
    "matrices-by-tp-rank": (TP, "tp", "update", QKV, None),
    "matrices-fused": (MICRO, "every layout", "update", QKV, None),
}
"""Fault -> layouts in addition to one process; axis, kind and name of the first deviation, first module."""
FULL_WIDTH = {"model__qk_norm": True, "model__qk_norm_width": "full"}
ONE_DOCUMENT: dict[str, Any] = {"data__isolate_documents": False, "model__sliding_window": None}
DELTA_NET: dict[str, Any] = {
    "model__delta_net": {"num_key_heads": 2, "num_value_heads": 4, "key_head_dim": 8, "value_head_dim": 8},
    "model__sliding_window": None,
}
MAMBA: dict[str, Any] = {
    "model__mamba": {"num_heads": 4, "head_dim": 8, "num_groups": 2, "state_dim": 8},
    "model__layer_pattern": "M-",
    "model__sliding_window": None,
}
BY_NIGHT = (
    "dp-size-in-denominator",
    "dp-rank-not-reduced",
    "local-side-term-denominators",
    "keys-in-rank-order",
    "int32-weights",
    "state-across-documents",
    "state-dropped-at-parts",
    "decay-in-half-precision",
)
"""Faults that the day finds by the same axis, kind, tensor and module under another name; those of states in Mamba."""
OF_DELTA_NETS = ("state-across-documents", "state-dropped-at-parts", "decay-in-half-precision")
OF_MUON = ("matrices-by-tp-rank", "matrices-fused")
OF_EXPERTS = ("router-losses-shared-out", "expert-loads-per-rank", "experts-left-out-of-norm", "depths-divided-by-main")


STEPS = {"clamped-denominator": 3, "int32-weights": 2, "expert-loads-per-rank": 2}
"""First step on random batches that reveals a fault, where it is a later one: the second has fractional weights, the
third few loss tokens."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.nightly] if name in BY_NIGHT else []) for name in EXPECTED]
)
def test_every_fault_is_found_and_named(pool: Pool, name: str) -> None:
    layouts, axis, kind, quantity, module = EXPECTED[name]
    alone: dict[str, dict[str, Any]] = {"full-width-norm-by-tp-rank": FULL_WIDTH, "hops-left-out": ONE_DOCUMENT}
    alone |= dict.fromkeys(OF_DELTA_NETS, DELTA_NET)
    changes: dict[str, Any] = {"optimizer__kind": "muon"} if name in OF_MUON else alone.get(name, {})
    user = expert_config(model__num_layers=2) if name in OF_EXPERTS else rich_config(**changes)
    report = check(pool, user, layouts, name, num_steps=STEPS.get(name, 1))
    assert not report.passed
    assert all(layout.error is None for layout in report.layouts)
    assert report.layouts[0].passed == (axis != "every layout"), "one process with one microbatch is innocent"
    found = report.diagnosis
    assert isinstance(found, Diagnosis)
    assert (found.axis, found.kind, found.name, found.module) == (axis, kind, quantity, module)
    assert found.value is not None
    assert found.tolerance is not None
    assert found.value > 5 * found.tolerance
    assert axis in found.lines[0]
    assert quantity in found.lines[1] or kind == "grad_norm"


@pytest.mark.parametrize("name", OF_DELTA_NETS)
def test_the_faults_of_states_are_found_in_mamba(pool: Pool, name: str) -> None:
    layouts, axis, *_ = EXPECTED[name]
    report = check(pool, rich_config(**MAMBA), layouts, name, num_steps=1)
    assert not report.passed
    assert all(layout.error is None for layout in report.layouts)
    assert report.layouts[0].passed == (axis != "every layout"), "one process with one microbatch is innocent"
    assert report.diagnosis is not None
    assert report.diagnosis.axis == axis


def test_clipping_takes_part_whatever_norm_the_small_model_has(pool: Pool) -> None:
    """No gradient of the small model comes near the user's own bound."""
    user = rich_config(optimizer__clip_grad=1e6)
    report = check(pool, user, MICRO, "clip-before-normalisation", num_steps=2)
    assert not report.passed
    first = report.layouts[1].first_failure()
    assert first is not None
    assert first.kind == "update"
    clip_grad = report.reference.steps[0].grad_norm / 2
    assert report.config["optimizer"]["clip_grad"] == clip_grad
    assert f"optimizer.clip_grad: 1000000.0 -> {clip_grad} (half of the first gradient's norm)" in report.changes


def test_every_fault_has_a_plant_and_a_test() -> None:
    """What `--inject` says of a fault that is a test is true."""
    shipped = {fault.name for fault in FAULTS}
    assert shipped == faults.PLANTS.keys()
    of_layouts = PLANTS.keys() - ADAPTER_PLANTS.keys() - IMAGE_PLANTS.keys() - SHARED_PLANTS.keys()
    assert of_layouts | (shipped - test_images.EXPECTED.keys()) == EXPECTED.keys()
    assert not of_layouts & shipped
    axes = {name: axis for name, (_, axis, *_) in EXPECTED.items()}
    axes |= {name: axis for name, (_, _, axis, _) in test_images.EXPECTED.items()}
    by_day = {EXPECTED[name][1:] for name in EXPECTED if name not in BY_NIGHT}
    assert {EXPECTED[name][1:] for name in BY_NIGHT} <= by_day
    for fault in FAULTS:
        assert axes[fault.name] == (fault.axis or "every layout")
    named = {test: set(names.split()) for test, names in TESTS.items()}
    assert named["planted/test_inject.py::test_every_fault_is_found_and_named"] == of_layouts
    assert named["planted/test_shared_faults.py::test_what_every_layout_shares_is_found"] == {*test_shared_faults.CASES}
    assert named["parity/test_adapters.py::test_every_fault_of_adapters_is_found"] == {*test_adapters.EXPECTED}
    assert named["parity/test_images.py::test_every_fault_of_images_is_found"] == {*IMAGE_PLANTS}
    assert IMAGE_PLANTS.keys() <= test_images.EXPECTED.keys()


@pytest.mark.parametrize("test", TESTS)
def test_the_named_tests_plant_their_faults(test: str) -> None:
    file, name = test.split("::")
    text = (ROOT / "tests" / "verify" / file).read_text()
    assert f"def {name}(" in text
    assert all(f'"{fault}"' in text for fault in TESTS[test].split())


VERBS = {"parity": FAULTS, "resume": RESUME_FAULTS, "preempt": PREEMPT_FAULTS, "backend": BACKEND_FAULTS}


@pytest.mark.parametrize("faults", VERBS.values(), ids=VERBS)
def test_a_fault_that_is_a_test_is_named_in_one_sentence(faults: tuple[Fault, ...]) -> None:
    for test, names in TESTS.items():
        for name in names.split():
            with pytest.raises(
                ConfigError, match=f"^--inject {name}: this fault is now planted only by a test, tests/verify/{test};"
            ):
                chosen(name, rich_config(), [], faults)
    with refuses(ConfigError, "dp-means", "tests/verify/planted/test_inject.py", faults[0].name):
        chosen("dp-means", rich_config(), [], faults)


@pytest.mark.parametrize(
    ("name", "changes", "axes", "fact"),
    [
        ("microbatch-mean", {}, ["dp"], "microbatch-means"),
        ("positions-not-zigzag", {}, ["tp", "microbatches"], "cp"),
        ("tied-gradient-missed", {"model__tied_embeddings": False}, ["pp"], "model.tied_embeddings=true"),
        ("document-boundary-crossed", {"data__isolate_documents": False}, [], "data.isolate_documents=true"),
        ("images-misplaced", {}, [], "model.vision"),
    ],
)
def test_a_fault_that_cannot_show_is_refused(name: str, changes: dict[str, object], axes: list[str], fact: str) -> None:
    with refuses(ConfigError, fact) as caught:
        chosen(name, rich_config(**changes), axes)
    assert f"--inject {name}" in str(caught.value)
