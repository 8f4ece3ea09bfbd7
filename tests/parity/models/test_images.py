"""Training with images: every layout gives the loss, the gradients and the weights of transformers' own model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from mtrain.arch.layout import Layout
from mtrain.config import Config
from mtrain.core.layers.vision import built_tower
from mtrain.core.loss.preference.member import GroupMember
from tests.core.compiled import compiled_ranks
from tests.core.engine.token_ranks import counted
from tests.parity.cases import Case, case
from tests.parity.compare import TOLERANCE, Deviation, relative, worst
from tests.parity.image_models import Kind
from tests.parity.image_ranks import frequencies, refused_rate, train_both, train_with
from tests.parity.images import (
    MIXED,
    ONE,
    ONE_SQUARE,
    SQUARES,
    Exact,
    Picture,
    differentiated,
    drawn,
    exact,
    initial,
    knobs,
    score,
)
from tests.parity.ranks import Arrays, Outcome, Run, train
from tests.pool import Pool, RankFailed

TRAINED = {"freeze_tower": False, "freeze_projector": False}
PROJECTOR = {"freeze_projector": False}
PROJECTOR_ALONE = PROJECTOR | {"freeze_language_model": True}
TOWER_ALONE = TRAINED | {"freeze_language_model": True}
LENGTHS = (32, 17, 9, 24, 30)
PACKED: dict[str, Any] = {"data__isolate_documents": True, "data__packing": {}}
RECOMPUTED: dict[str, Any] = {"train__recompute": "full"}


@cache
def steps(kind: Kind = "dense") -> list[Any]:
    """Draws a step of many images, and one with a single image, of whose rows other ranks have none."""
    if kind == "gemma3":
        return [drawn(SQUARES, 1, LENGTHS, kind), drawn(ONE_SQUARE, 2, LENGTHS, kind)]
    # transformers 5.24 fails on a sample of Mistral 3 with a single feature
    mixed = [[Picture(3, 2, 4)] if each == [Picture(3, 2, 2)] and kind == "mistral3" else each for each in MIXED]
    return [drawn(mixed, 1, LENGTHS, kind), drawn(ONE, 2, LENGTHS, kind)]


def config_of(each: Case, kind: Kind, vision: dict[str, bool], **changes: Any) -> Config:
    return each.config(**knobs(kind, **vision) | changes)


@cache
def reference(kind: Kind, vision: tuple[tuple[str, bool], ...]) -> Exact:
    return exact(kind, config_of(case(num_layers=2), kind, dict(vision)), steps(kind))


def measured(outcome: Outcome, oracle: Exact, config: Config) -> Deviation:
    pairs = list(zip(outcome.steps, oracle.losses, oracle.norms, oracle.gradients, strict=True))
    return Deviation(
        loss=max(relative(found.loss, loss) for found, loss, _, _ in pairs),
        grad_norm=max(relative(found.grad_norm, norm) for found, _, norm, _ in pairs),
        gradient=max(gradient_deviation(found.gradients, gradients, config) for found, _, _, gradients in pairs),
        weights=worst(without_key_biases(outcome.parameters), without_key_biases(oracle.parameters), config),
    )


KEY_BIAS = ".self_attn.k_proj.bias"
"""End of the names of biases of keys, which move all scores of a query alike, so that gradients are rounding."""


def without_key_biases(arrays: Arrays | None) -> Arrays:
    assert arrays is not None
    return {name: value for name, value in arrays.items() if not name.endswith(KEY_BIAS)}


def gradient_deviation(found: Arrays | None, exact: Arrays, config: Config) -> float:
    """Returns `worst`, but the rounding of a key's bias relative to the gradient of its weight."""
    assert found is not None
    rounding = [0.0]
    for name in (name for name in exact if name.endswith(KEY_BIAS)):
        scale = np.abs(exact[name.replace("bias", "weight")]).max()
        assert np.abs(exact[name]).max() <= 1e-12 * scale
        rounding.append(float(np.abs(found[name]).max() / scale))
    return max(worst(without_key_biases(found), without_key_biases(exact), config), *rounding)


def agreed(everyone: Sequence[Outcome]) -> Outcome:
    """Returns rank 0's outcome; all ranks must report the same steps."""
    reports = [[step._replace(gradients=None) for step in outcome.steps] for outcome in everyone]
    assert all(report == reports[0] for report in reports)
    return everyone[0]


def assert_exact(
    pool: Pool, each: Case, kind: Kind = "dense", vision: dict[str, bool] = TRAINED, **changes: Any
) -> Outcome:
    """Trains both steps on the case's ranks, and compares with the oracle."""
    outcome, deviation = compared(pool, each, kind, vision, **changes)
    deviation.assert_below()
    return outcome


def compared(
    pool: Pool, each: Case, kind: Kind, vision: dict[str, bool], fault: str | None = None, **changes: Any
) -> tuple[Outcome, Deviation]:
    """Trains both steps on the case's ranks; returns the run, and its deviation from the oracle."""
    config = config_of(each, kind, vision, **changes)
    given = (config, initial(kind), steps(kind))
    layout = each.resolved(config)
    ranks = pool.run(train, layout, *given) if fault is None else pool.run(train_with, layout, fault, *given)
    outcome = agreed(ranks)
    return outcome, measured(outcome, reference(kind, tuple(vision.items())), config)


CASES = [
    case(4, num_layers=2),
    case(4, num_layers=2, tp=2, sp=True),
    case(8, num_layers=2, tp=2),
    case(4, num_layers=2, cp=2),
    case(4, num_layers=2, cp=2, cp_comm="ulysses", dp=2),
    case(4, num_layers=2, pp=2),
    case(4, num_layers=2, tp=2, sp=True, cp=2),
]


@pytest.mark.parametrize("each", CASES, ids=map(str, CASES))
def test_a_run_with_images_is_that_of_transformers(pool: Pool, each: Case) -> None:
    assert_exact(pool, each)


PACKED_CASES = [(case(num_layers=2, cp=2), "optimizer"), (case(num_layers=2, tp=2, sp=True, dp=2), "weights")]


@pytest.mark.parametrize(("each", "shard"), PACKED_CASES, ids=[str(each) for each, _ in PACKED_CASES])
def test_samples_that_share_a_row_keep_their_images(pool: Pool, each: Case, shard: str) -> None:
    assert_exact(pool, each, layout__shard=shard, **PACKED)


EXPERT_CASES = [case(4, num_layers=2), case(4, num_layers=2, dp=2, ep=2), case(4, num_layers=2, tp=2, sp=True, ep=2)]


@pytest.mark.parametrize("each", EXPERT_CASES, ids=["-".join(each.layout) or "one process" for each in EXPERT_CASES])
def test_experts_of_tokens_of_images_are_those_of_transformers(pool: Pool, each: Case) -> None:
    assert_exact(pool, each, kind="experts")


DEEP_CASES: list[tuple[Case, dict[str, Any]]] = [
    (case(4, num_layers=3), {}),
    (case(4, num_layers=3, tp=2, sp=True, cp=2), RECOMPUTED),
    (case(4, num_layers=3, pp=2, first_stage_layers=2, dp=2), {}),
    (case(4, num_layers=3, dp=2), RECOMPUTED | {"layout__shard": "weights"}),
]


DEEP_EXPERT_CASES = [case(4, num_layers=2), case(4, tp=2, sp=True, cp=2, ep=2), case(4, pp=2, dp=2, ep=2)]


@pytest.mark.parametrize("each", DEEP_EXPERT_CASES, ids=["one process", "tp2-sp-cp2-ep2", "pp2-dp2-ep2"])
def test_deeper_features_reach_experts_as_in_transformers(pool: Pool, each: Case) -> None:
    assert_exact(pool, each, kind="deepstack experts")


@pytest.mark.parametrize(("each", "changes"), DEEP_CASES, ids=[str(each) for each, _ in DEEP_CASES])
def test_deeper_features_are_added_as_in_transformers(pool: Pool, each: Case, changes: dict[str, Any]) -> None:
    assert_exact(pool, each, kind="deepstack", **changes)


GEMMA_CASES: list[tuple[Case, Kind, dict[str, Any]]] = [
    (case(4, num_layers=2, tp=2, sp=True, cp=2), "gemma3", {}),
    (case(4, num_layers=2, cp=2, cp_comm="ulysses", pp=2), "gemma3", {}),
    (case(num_layers=2, cp=4), "gemma3", PACKED),
    (case(4, num_layers=4, tp=2, sp=True, cp=2), "gemma4", {}),
    (case(4, num_layers=4, cp=2, cp_comm="ulysses", pp=2), "gemma4", {}),
    (case(num_layers=4, cp=2, dp=2), "gemma4", PACKED),
    (case(4, num_layers=2, tp=2, sp=True, ep=2), "gemma4 experts", {}),
]


@pytest.mark.parametrize(
    ("each", "kind", "changes"), GEMMA_CASES, ids=[f"{kind}-{'-'.join(each.layout)}" for each, kind, _ in GEMMA_CASES]
)
def test_tokens_of_an_image_see_each_other_as_in_gemma(
    pool: Pool, each: Case, kind: Kind, changes: dict[str, Any]
) -> None:
    assert_exact(pool, each, kind, **changes)


@pytest.mark.parametrize(
    ("kind", "fault"),
    [
        ("gemma3", "images-see-only-the-past"),
        ("gemma4", "images-see-only-the-past"),
        ("gemma4", "images-see-ahead-in-wide-layers"),
    ],
)
def test_images_that_see_other_tokens_are_found(pool: Pool, kind: Kind, fault: str) -> None:
    assert max(compared(pool, case(4, num_layers=2, cp=2), kind, TRAINED, fault)[1]) > 100 * TOLERANCE


MISTRAL3_CASES = [case(4, num_layers=2), case(4, num_layers=2, tp=2, sp=True, cp=2), case(4, num_layers=2, pp=2, dp=2)]


@pytest.mark.parametrize("each", MISTRAL3_CASES, ids=map(str, MISTRAL3_CASES))
def test_images_of_rows_that_end_in_tokens_are_those_of_mistral_3(pool: Pool, each: Case) -> None:
    assert_exact(pool, each, kind="mistral3")


AHEAD_CASES: list[tuple[Case, Kind, dict[str, bool], dict[str, Any]]] = [
    (case(4, num_layers=2), "ahead", TRAINED, {}),
    (case(4, num_layers=2, tp=2, sp=True, cp=2), "ahead", TRAINED, {}),
    (case(num_layers=2, cp=2, cp_comm="ulysses", dp=2), "ahead", TRAINED, PACKED),
    (case(4, num_layers=2, pp=2, dp=2), "ahead", PROJECTOR, {}),
    (case(4, num_layers=2, tp=2, sp=True, pp=2), "ahead", TRAINED, RECOMPUTED),
    (case(4, num_layers=2, pp=2), "ahead", PROJECTOR_ALONE, {}),
    (case(4, num_layers=2, tp=2, sp=True, dp=2, ep=2), "ahead experts", TRAINED, {}),
    (case(4, num_layers=2, pp=2, dp=2), "ahead", TRAINED, {"layout__shard": "weights"}),
]


@pytest.mark.parametrize(
    ("each", "kind", "vision", "changes"),
    AHEAD_CASES,
    ids=[f"{kind}-{'-'.join(each.layout) or 'one process'}" for each, kind, _, _ in AHEAD_CASES],
)
def test_features_are_read_ahead_as_in_vllm(
    pool: Pool, each: Case, kind: Kind, vision: dict[str, bool], changes: dict[str, Any]
) -> None:
    assert_exact(pool, each, kind, vision, **changes)


def test_a_rank_without_images_joins_reductions_that_overlap_backward(pool: Pool) -> None:
    """A microbatch of text, and a rank that has no image of a microbatch, give every weight of the tower a zero."""
    each = case(4, num_layers=2, tp=2, sp=True, dp=2)
    assert_exact(pool, each, train__overlap_grad_reduce=True)


@pytest.mark.parametrize("vision", [{}, PROJECTOR], ids=["language model", "and projector"])
def test_frozen_parts_keep_every_bit(pool: Pool, vision: dict[str, bool]) -> None:
    outcome = assert_exact(pool, case(4, num_layers=2, tp=2, sp=True), vision=vision)
    assert unchanged(outcome, "dense") == {
        name for name in initial("dense") if name.startswith("vision.") and not (vision and ".merger." in name)
    }


def unchanged(outcome: Outcome, kind: Kind) -> set[str]:
    """Returns the parameters whose bits are those at the start."""
    assert outcome.parameters is not None
    return {
        name
        for name, value in initial(kind).items()
        if np.array_equal(outcome.parameters[name][: len(value)], value.astype("f4"))  # tables are padded
    }


ALONE_CASES: list[tuple[Case, Kind, dict[str, bool], dict[str, Any]]] = [
    (case(4, num_layers=2), "dense", TOWER_ALONE, {}),
    (case(4, num_layers=2, tp=2, sp=True, cp=2), "dense", PROJECTOR_ALONE, {}),
    (case(8, num_layers=2, tp=2), "dense", TOWER_ALONE, {}),
    # stages and ranks that train nothing
    (case(4, num_layers=2, pp=2), "dense", PROJECTOR_ALONE, RECOMPUTED),
    (case(4, num_layers=2, pp=2, dp=2), "dense", TOWER_ALONE, {"train__overlap_grad_reduce": True}),
    (case(4, num_layers=2, tp=2, sp=True, ep=2), "experts", PROJECTOR_ALONE, {}),
    (case(4, num_layers=3, pp=2, first_stage_layers=2, dp=2), "deepstack", TOWER_ALONE, {"layout__shard": "weights"}),
]


@pytest.mark.parametrize(
    ("each", "kind", "vision", "changes"),
    ALONE_CASES,
    ids=[f"{kind}-{'-'.join(each.layout) or 'one process'}" for each, kind, _, _ in ALONE_CASES],
)
def test_a_frozen_language_model_keeps_every_bit(
    pool: Pool, each: Case, kind: Kind, vision: dict[str, bool], changes: dict[str, Any]
) -> None:
    outcome = assert_exact(pool, each, kind, vision, **changes)
    trains = "vision." if vision == TOWER_ALONE else "vision.merger."
    assert unchanged(outcome, kind) == {name for name in initial(kind) if not name.startswith(trains)}


_NAMES: dict[Kind, str] = {
    "dense": "Qwen3.5",
    "experts": "Qwen3.5 with experts",
    "ahead": "Qwen3.5, a token ahead",
    "ahead experts": "Qwen3.5 with experts, a token ahead",
    "deepstack": "Qwen3-VL",
    "deepstack experts": "Qwen3-VL with experts",
    "gemma3": "Gemma 3",
    "mistral3": "Ministral 3",
    "gemma4": "Gemma 4",
    "gemma4 experts": "Gemma 4 with experts",
}
TABLE: list[tuple[str, Case, Kind, dict[str, bool], dict[str, Any]]] = [
    *((_NAMES["dense"], each, "dense", TRAINED, {}) for each in CASES),
    *(
        (f"{_NAMES['dense']}, packed", each, "dense", TRAINED, PACKED | {"layout__shard": shard})
        for each, shard in PACKED_CASES
    ),
    *((_NAMES["experts"], each, "experts", TRAINED, {}) for each in EXPERT_CASES),
    *((_NAMES[kind], each, kind, vision, changes) for each, kind, vision, changes in AHEAD_CASES),
    *(
        (f"{_NAMES['deepstack']}{', recomputed' if changes else ''}", each, "deepstack", TRAINED, changes)
        for each, changes in DEEP_CASES
    ),
    *((_NAMES["deepstack experts"], each, "deepstack experts", TRAINED, {}) for each in DEEP_EXPERT_CASES),
    *(
        (f"{_NAMES[kind]}{', packed' if changes else ''}", each, kind, TRAINED, changes)
        for each, kind, changes in GEMMA_CASES
    ),
    *((_NAMES["mistral3"], each, "mistral3", TRAINED, {}) for each in MISTRAL3_CASES),
    *(
        (f"{_NAMES[kind]}, {'tower' if vision == TOWER_ALONE else 'projector'} alone", each, kind, vision, changes)
        for each, kind, vision, changes in ALONE_CASES
    ),
]
"""Rows of docs/proof/parity.md: name, case, kind, what is trained, and changes of the configuration."""


def test_adapters_on_a_frozen_tower_learn_from_images(pool: Pool) -> None:
    """B begins at 0, so A has no gradient, and that of B is scale x (the oracle's gradient of W) x A^T."""
    each, name = case(4, num_layers=2, tp=2, sp=True, cp=2), "decoder.layers.1.self_attention.linear_proj"
    adapter = {"kind": "lora", "rank": 3, "alpha": 6.0, "targets": ["proj"]}
    configs = [config_of(each, "dense", {}, adapter=adapter, layout__shard=shard) for shard in ("optimizer", "weights")]
    first = np.random.default_rng(5).normal(size=(3, 128)).astype(np.float32)
    pair = {f"{name}_adapter.proj_lora_a": first, f"{name}_adapter.proj_lora_b": np.zeros((32, 3))}
    everyone = pool.run(train_both, each.resolved(configs[0]), configs, initial("dense") | pair, steps()[:1])
    oracle = reference("dense", ())
    expected = 2.0 * oracle.gradients[0][f"{name}.weight"] @ first.T
    gradients = dict(zip(pair, (np.zeros_like(first), expected), strict=True))
    for outcome, config in zip(map(agreed, zip(*everyone, strict=True)), configs, strict=True):
        assert relative(outcome.steps[0].loss, oracle.losses[0]) <= TOLERANCE
        assert worst(outcome.steps[0].gradients, gradients, config) <= TOLERANCE


RATES: dict[str, Any] = {"optimizer__tower_lr": 4e-3, "optimizer__projector_lr": 1e-4}
RATES_CASES: list[tuple[Case, dict[str, Any]]] = [
    (case(4, num_layers=2), {}),
    (case(4, num_layers=2, dp=2), {"layout__shard": "weights"}),
    (case(4, num_layers=2, pp=2, dp=2), {"train__offload_optimizer": True, "train__overlap_grad_reduce": True}),
]


@pytest.mark.parametrize(("each", "changes"), RATES_CASES, ids=[str(each) for each, _ in RATES_CASES])
def test_each_part_has_its_own_learning_rate(pool: Pool, each: Case, changes: dict[str, Any]) -> None:
    config = config_of(each, "dense", TRAINED, **RATES | changes)
    outcome = agreed(pool.run(train, each.resolved(config), config, initial("dense"), steps()))
    measured(outcome, reference_with_rates(), config).assert_below()


def test_a_given_rate_is_judged_by_what_it_is_for_each_part(pool: Pool) -> None:
    """Weight decay flips signs if the rate is above 10; the rate of the tower is four times the given one."""
    config = config_of(case(num_layers=2), "dense", TRAINED, optimizer__tower_lr=0.04, optimizer__epsilon=1.0)
    assert pool.run(refused_rate, Layout(), config, 2.4) == [""]
    (message,) = pool.run(refused_rate, Layout(), config, 2.6)
    assert "lr=10.4" in message


@cache
def reference_with_rates() -> Exact:
    return exact("dense", config_of(case(num_layers=2), "dense", TRAINED, **RATES), steps())


@pytest.mark.parametrize("kind", ["dense", "deepstack"])
def test_compiled_layers_read_images(pool: Pool, kind: Kind) -> None:
    """Microbatches of text and of images have angles of other shapes, and so graphs of their own."""
    each = case(4, num_layers=2 if kind == "dense" else 3)
    configs = [config_of(each, kind, TRAINED, train__compile=choice) for choice in ("layers", "regions")]
    runs = [Run(config, initial(kind), steps()) for config in configs]
    (found,) = pool.run(compiled_ranks.train_each, each.resolved(configs[0]), runs, "eager")
    for one, config in zip(found, configs, strict=True):
        measured(one.outcome, reference(kind, tuple(TRAINED.items())), config).assert_below()
        assert one.num_graphs > 0
        assert one.printed == ""


def test_a_run_in_bf16_is_near_that_of_transformers(pool: Pool) -> None:
    """Bounds are those of tests/parity/layouts/test_precision.py: a gradient's path is through the three layers of the
    language model and the three of the tower, of 13 roundings each, forward and back."""
    each = case(4, num_layers=3, tp=2, sp=True)
    changes = {"train__precision": "bf16", "train__recompute": "selective"}
    config = config_of(each, "deepstack", TRAINED, **changes)
    (found,) = agreed(pool.run(train, each.resolved(config), config, initial("deepstack"), steps()[:1])).steps
    oracle = reference("deepstack", tuple(TRAINED.items()))
    assert relative(found.loss, oracle.losses[0]) <= 2 * 2.0**-8 * (6 * 13) ** 0.5
    assert found.gradients is not None
    for name, expected in oracle.gradients[0].items():
        distance = np.linalg.norm(found.gradients[name][: len(expected)] - expected)
        assert distance <= 2 * 2.0**-8 * (2 * 6 * 13) ** 0.5 * np.linalg.norm(expected), name


BETA = 0.3


@cache
def pairs() -> list[Any]:
    """Draws chosen and rejected answers, some of which have images, with scores of a reference near their own."""
    rng, found = np.random.default_rng(4), []
    for number, sample in enumerate(drawn(MIXED, 4, LENGTHS)):
        role: Any = "rejected" if number % 2 else "chosen"
        reference = -4.0 * float(sample.mask.sum()) + float(rng.normal())
        found.append(sample.as_member(GroupMember(number // 2, role, reference)))
    return found


@pytest.mark.parametrize("shard", ["optimizer", "weights"])
def test_preferences_of_answers_to_images_are_learned_as_defined(pool: Pool, shard: str) -> None:
    """DPO (Rafailov et al. 2023, equation 7) of the scores of transformers' model."""
    each, batch = case(2, num_layers=2, cp=2, dp=2), pairs()
    changes = {"loss__function": "dpo", "loss__options": {"beta": BETA}, "train__global_batch_size": len(batch) // 2}
    config = config_of(each, "dense", TRAINED, layout__shard=shard, **changes, **PACKED)
    outcome = agreed(pool.run(train, each.resolved(config), config, initial("dense"), [batch]))
    loss, gradients = exact_preferences()
    assert relative(outcome.steps[0].loss, loss) <= TOLERANCE
    assert worst(outcome.steps[0].gradients, gradients, config) <= TOLERANCE


@cache
def exact_preferences() -> tuple[float, Any]:
    def loss(model: Any) -> Any:
        gains = [score(model, sample) - sample.member.reference for sample in pairs()]
        margins = [chosen - rejected for chosen, rejected in zip(gains[::2], gains[1::2], strict=True)]
        return -torch.nn.functional.logsigmoid(BETA * torch.stack(margins)).mean()

    return differentiated("dense", loss)


def test_text_alone_computes_the_same_bits_as_without_a_tower(pool: Pool) -> None:
    text = [[replace(sample, images=None) for sample in drawn([[]] * 16, 3, LENGTHS)]]
    each = case(4, num_layers=2, tp=2, sp=True)
    with_tower = config_of(each, "dense", {})
    without = with_tower.model_copy(update={"model": with_tower.model.model_copy(update={"vision": None})})
    found = pool.run(train_both, each.resolved(without), [with_tower, without], initial("dense"), text)
    one, other = found[0]
    assert one.steps[0]._replace(gradients=None) == other.steps[0]._replace(gradients=None)
    assert other.parameters is not None
    assert one.parameters is not None
    assert all(np.array_equal(one.parameters[name], value) for name, value in other.parameters.items())


def test_every_rank_knows_the_patches_of_the_step(pool: Pool) -> None:
    each = case(4, num_layers=2, tp=2, sp=True, pp=2, dp=2)
    config = config_of(each, "dense", {})
    sizes = [picture.rows * picture.columns for pictures in MIXED for picture in pictures]
    for ((_, counts),) in pool.run(counted, each.resolved(config), [config], steps()[0]):
        assert (counts.patches, counts.patch_pairs) == (sum(sizes), sum(size**2 for size in sizes))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_frequencies_of_the_tower_are_not_rounded(pool: Pool, precision: str) -> None:
    config = config_of(case(num_layers=2), "dense", {}, train__precision=precision)
    assert config.model.vision is not None
    found, dtypes = pool.run(frequencies, Layout(), config)[0]
    assert dtypes == {"torch.float32" if precision == "fp32" else "torch.bfloat16"}
    expected = [buffer.numpy() for buffer in built_tower(config.model.vision, config.model.hidden_size, 1e-5).buffers()]
    assert len(found) == len(expected) > 0
    assert all(
        np.array_equal(one, other) and one.dtype == other.dtype for one, other in zip(found, expected, strict=True)
    )


@pytest.mark.parametrize(
    "fault", ["positions-by-time-alone", "positions-counted-in-slices", "tower-gradient-mean-over-sharing"]
)
def test_a_planted_fault_is_found(pool: Pool, fault: str) -> None:
    """tests/verify/parity/test_images.py plants all of them."""
    each = case(4, num_layers=2, tp=2, sp=True, cp=2)
    assert max(compared(pool, each, "dense", TRAINED, fault)[1]) > 100 * TOLERANCE


def test_a_tower_that_gives_no_zeros_is_found(pool: Pool) -> None:
    each = case(8, num_layers=2, dp=2)
    config = config_of(each, "dense", TRAINED, train__overlap_grad_reduce=True)
    with pytest.raises(RankFailed):
        pool.run(train_with, each.resolved(config), "no-zeros", config, initial("dense"), steps())
