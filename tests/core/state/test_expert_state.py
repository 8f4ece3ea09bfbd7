"""The state of experts: initial weights, checkpoints, moments and buffers, the same on every layout."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mtrain.arch.layout import Layout
from mtrain.config import Config
from tests.core.state import checkpoint_ranks, expert_ranks
from tests.core.state.checkpoint_ranks import Arrays, Outcome
from tests.core.state.test_save_and_load import (
    BF16,
    FEW_LAYERS,
    FP16,
    NOT_DISTRIBUTED,
    OVERLAP,
    TIED,
    assert_same_bits,
    assert_same_model,
    assert_same_standing,
    configured,
)
from tests.pool import Pool

DENSE_FIRST = {
    "num_experts": 8,
    "top_k": 2,
    "ffn_hidden_size": 24,
    "shared_ffn_hidden_size": 16,
    "first_dense_layers": 1,
    "score": "sigmoid",
    "expert_bias": True,
    "bias_update_rate": 0.1,
}
"""Layers differ, so the keys of the checkpoint have their numbers. The biases of the choice move: where they were not
resumed, tokens would go elsewhere."""
EVERYWHERE = {"num_experts": 4, "top_k": 2, "ffn_hidden_size": 40}
"""All layers are alike, and stacked in the checkpoint."""
LATE: dict[str, Any] = {"model.experts": DENSE_FIRST | {"first_dense_layers": 2}}
ALL_AXES = Layout(tp=2, sp=True, pp=2, dp=2, ep=2, etp=2)
SAVED = Layout(tp=2, sp=True, dp=2, ep=2, etp=2)


def with_experts(experts: dict[str, Any], **changes: Any) -> Config:
    """Returns the small model of the checkpoint tests, with experts."""
    return configured(**{"model.experts": experts} | changes)


@pytest.fixture(scope="module", params=[DENSE_FIRST, EVERYWHERE], ids=["dense first", "everywhere"])
def single(request: pytest.FixtureRequest, pool: Pool) -> tuple[Config, Arrays]:
    config = with_experts(request.param)
    return config, pool.run(expert_ranks.initial_weights, Layout(), config)[0]


@pytest.mark.parametrize("layout", [Layout(dp=4, ep=4), Layout(pp=2, vpp=2, dp=2, ep=2), ALL_AXES], ids=str)
def test_initial_weights_are_the_same_bits(pool: Pool, single: tuple[Config, Arrays], layout: Layout) -> None:
    config, weights = single
    found = pool.run(expert_ranks.initial_weights, layout, config)[0]
    found = {name: values[: len(weights[name])] for name, values in found.items()}  # padding of the vocabulary
    whole = {name: values[: len(found[name])] for name, values in weights.items()}
    assert_same_bits(whole, found)
    drawn = [name for name, values in weights.items() if values.ndim > 1]
    assert len({weights[name].tobytes() for name in drawn}) == len(drawn)  # no two tensors are alike


@pytest.mark.parametrize(
    ("layout", "changes"),
    [
        # fp16 without experts: test_save_and_load.py; scales of several optimizers: tests/known_issues/test_experts.py
        pytest.param(Layout(tp=2, sp=True, dp=2, ep=2), FP16, marks=pytest.mark.nightly),
        pytest.param(Layout(pp=2, dp=2, ep=2), FP16 | NOT_DISTRIBUTED | LATE, marks=pytest.mark.nightly),
        (Layout(pp=2), NOT_DISTRIBUTED | FEW_LAYERS),  # the first stage has no experts
        (Layout(dp=4, ep=2), BF16 | TIED | OVERLAP | FEW_LAYERS),
    ],
    ids=str,
)
def test_resuming_on_the_same_layout_is_exact(
    pool: Pool, tmp_path: Path, layout: Layout, changes: dict[str, Any]
) -> None:
    config = with_experts(DENSE_FIRST, **changes)
    saved, end = (3, 5) if config.train.precision == "fp16" else (1, 3)
    both: list[tuple[Outcome, Outcome]] = pool.run(
        checkpoint_ranks.train_and_resume, layout, config, tmp_path, end, saved
    )
    for one, other in both:
        assert one.saved is not None
        assert_same_standing(one.saved, other.begin)
        assert repr(one.steps[saved:]) == repr(other.steps)
        assert_same_standing(one.end, other.end)


@pytest.fixture(scope="module")
def saved_runs() -> dict[int, Any]:
    """Runs by the identity of their experts; pytest would repeat them where tests alternate between parameters."""
    return {}


@pytest.fixture
def saved(
    request: pytest.FixtureRequest, pool: Pool, tmp_path_factory: pytest.TempPathFactory, saved_runs: dict[int, Any]
) -> Any:
    """A float32 run that saved after a step and made two more: (its experts, its folder, rank 0)."""
    if id(request.param) not in saved_runs:
        folder, config = tmp_path_factory.mktemp("saved"), with_experts(request.param)
        outcome = pool.run(checkpoint_ranks.train, SAVED, config, folder, None, 3, 1, ["save"])[0]
        saved_runs[id(request.param)] = request.param, folder, outcome
    return saved_runs[id(request.param)]


def _named(value: Any) -> str:
    if isinstance(value, Layout):
        return str(value)
    names = [name for name, experts in (("dense first", DENSE_FIRST), ("everywhere", EVERYWHERE)) if experts is value]
    return "".join(names or value.values())


SEQUENTIAL, GROUPED = {"implementation": "sequential"}, {"implementation": "grouped"}


@pytest.mark.parametrize(
    ("saved", "layout", "experts"),
    [
        (EVERYWHERE, Layout(dp=2, ep=2), {}),
        # each axis without experts: test_save_and_load.py; experts in the keys and stacked, loaded by ranks that hold
        # some of them: the row above
        *(
            pytest.param(*row, marks=pytest.mark.nightly)
            for row in [
                (EVERYWHERE, Layout(pp=2, vpp=2, dp=2, ep=2), {}),
                (DENSE_FIRST, Layout(), SEQUENTIAL),
                (DENSE_FIRST, Layout(dp=4, ep=4), GROUPED),
                (DENSE_FIRST, Layout(tp=2, sp=True, pp=2), {}),
                (DENSE_FIRST, Layout(tp=4, sp=True, ep=2, etp=2), {}),
                (DENSE_FIRST, Layout(pp=4), {}),  # the first stage has no experts
                (EVERYWHERE, Layout(), SEQUENTIAL),
                (EVERYWHERE, Layout(dp=2), GROUPED),
                (EVERYWHERE, Layout(tp=2, sp=True, ep=2), {"dispatcher": "allgather"}),
                (EVERYWHERE, Layout(cp=2, dp=2, ep=4), {}),
            ]
        ),
    ],
    indirect=["saved"],
    ids=_named,
)
def test_experts_get_the_same_bits_on_another_layout_and_train_alike(
    pool: Pool, saved: Any, layout: Layout, experts: dict[str, Any]
) -> None:
    base, folder, straight = saved
    config = with_experts(base | experts)
    resumed: Outcome = pool.run(checkpoint_ranks.train, layout, config, folder, 1, 3, None, ["begin"])[0]
    assert_same_model(straight.whole["save"], resumed.whole["begin"])
    for one, other in zip(straight.steps[1:], resumed.steps, strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-5)


@pytest.mark.nightly  # by day they are saved and resumed with the experts, above
def test_biases_of_the_choice_travel_between_layouts(pool: Pool, tmp_path: Path) -> None:
    """The biases are float32 in bf16 as well: no bfloat16 holds these values."""
    config = with_experts(DENSE_FIRST, **BF16, **{"model.num_layers": 3})
    pool.run(expert_ranks.save_with_biases, Layout(tp=2, sp=True, ep=2), config, tmp_path)
    expected = {
        f"decoder.layers.{layer}.mlp.router.expert_bias": (layer + 1 + np.arange(8) / 1024).astype(np.float32)
        for layer in (1, 2)
    }
    uneven = with_experts(DENSE_FIRST, **BF16, **{"model.num_layers": 3, "layout.pp": 2, "layout.stage_layers": (2, 1)})
    layout = Layout.from_config(uneven, 2)
    for found in pool.run(expert_ranks.loaded_biases, layout, uneven, tmp_path)[0]:
        assert_same_bits(expected, found)


@pytest.mark.parametrize(
    "saved",
    # keys with the numbers of layers, by day: test_family_state.py
    [pytest.param(DENSE_FIRST, marks=pytest.mark.nightly), EVERYWHERE],
    indirect=True,
    ids=_named,
)
def test_checkpoint_keys_are_megatrons(pool: Pool, saved: Any) -> None:
    base, folder, straight = saved
    stored = pool.run(checkpoint_ranks.read_by_megatron, Layout(), folder, 1)[0]
    fc1 = "mlp.experts.experts.linear_fc1.weight"
    if base is DENSE_FIRST:
        found = stored[f"decoder.layers.2.{fc1}"]
        assert "decoder.layers.2.pre_mlp_layernorm.weight" in stored
        assert "decoder.layers.0.mlp.linear_fc1.layer_norm_weight" in stored
    else:
        found = stored[f"decoder.layers.{fc1}"][2]
        assert "decoder.layers.pre_mlp_layernorm.weight" in stored
    whole = straight.whole["save"].parameters
    for expert, values in enumerate(found):
        np.testing.assert_array_equal(values, whole[f"decoder.layers.2.mlp.experts.{expert}.linear_fc1.weight"])
