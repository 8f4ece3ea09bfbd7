"""The run starts from the same weights whatever the layout."""

import hashlib
from typing import Any

import numpy as np
import pytest
import torch

from mtrain.arch.layout import Layout
from mtrain.checkpoint.state.gather import parameter_shards
from mtrain.config import Config
from mtrain.core.engine.rank_model import build_model
from mtrain.core.layers.build import build_chunks, unwrap
from mtrain.core.layers.init_weights import draw, sharded_tensors
from mtrain.core.ranks.groups import Groups
from tests.core.state.gathering import gather_whole
from tests.parity.batches import VOCAB
from tests.parity.cases import Case, case
from tests.parity.compare import without_padding
from tests.parity.expert_models import BIASED, MIXTRAL
from tests.parity.families import HYBRID, MAMBA
from tests.parity.ranks import Arrays, arrays
from tests.pool import Pool

LARGE = {"model__hidden_size": 64, "model__ffn_hidden_size": 704, "model__vocab_size": 997}
"""Sizes at which some tensors have more rows than are drawn at once."""
CASES = [
    case(tp=2, sp=True),
    case(tp=4),
    case(pp=2),
    case(pp=2, vpp=2),
    case(pp=4),
    case(pp=2, first_stage_layers=1),
    case(cp=2, dp=2),
    case(tp=2, sp=True, pp=2, vpp=2, dp=2),
    case(dp=4, shard="weights"),
    case(tp=2, sp=True, pp=2, dp=2, shard="weights"),
]


def initial_weights(groups: Groups, config: Config) -> Arrays | None:
    """Returns the whole tensors on rank 0."""
    return arrays(gather_whole(parameter_shards(build_model(config, groups).chunks, groups)))


def weights_of(pool: Pool, one: Case, **changes: Any) -> Arrays:
    config = one.config(**{**LARGE, **changes})
    whole = pool.run(initial_weights, one.resolved(config), config)[0]
    for name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        assert not whole.get(name, np.zeros(0))[config.model.vocab_size :].any()
    return without_padding(whole, config.model.vocab_size)


def test_decays_of_delta_nets_are_uniform_between_their_bounds(pool: Pool) -> None:
    heads = {"model__delta_net": HYBRID["model__delta_net"] | {"num_key_heads": 100, "num_value_heads": 400}}
    one, other = (weights_of(pool, each, **HYBRID | heads) for each in (case(num_layers=2), case(num_layers=2, tp=2)))
    assert {name: value.tobytes() for name, value in one.items()} == {
        name: value.tobytes() for name, value in other.items()
    }
    inside = "decoder.layers.0.self_attention."
    decays = np.exp(one[f"{inside}A_log"])
    assert 0.01 <= decays.min() < 0.3
    assert 15.7 < decays.max() <= 16
    assert decays.mean() == pytest.approx(8, abs=1)
    assert (one[f"{inside}dt_bias"] == 1).all()
    assert (one[f"{inside}out_norm.weight"] == 1).all()
    assert one[f"{inside}conv1d.weight"].std() == pytest.approx(0.02, rel=0.1)
    assert one[f"{inside}out_proj.weight"].std() == pytest.approx(0.01, rel=0.1)


def test_parameters_of_mamba_are_those_of_transformers(pool: Pool) -> None:
    heads = {"model__mamba": MAMBA["model__mamba"] | {"num_heads": 400, "num_groups": 100}}
    one, other = (weights_of(pool, each, **MAMBA | heads) for each in (case(num_layers=4), case(num_layers=4, tp=2)))
    assert {name: value.tobytes() for name, value in one.items()} == {
        name: value.tobytes() for name, value in other.items()
    }
    inside = "decoder.layers.0.self_attention."
    np.testing.assert_array_equal(one[f"{inside}A_log"], torch.arange(1.0, 401.0).log().numpy())
    steps = np.log(np.log1p(np.exp(one[f"{inside}dt_bias"].astype(np.float64))))
    assert np.log(0.001) <= steps.min() + 1e-4 < np.log(0.0012)
    assert np.log(0.09) < steps.max() <= np.log(0.1) + 1e-4
    assert steps.mean() == pytest.approx(np.log(0.01), abs=0.2)
    assert (one[f"{inside}D"] == 1).all()
    assert (one[f"{inside}out_norm.weight"] == 1).all()
    assert (one[f"{inside}conv1d.bias"] == 0).all()
    assert one[f"{inside}conv1d.weight"].std() == pytest.approx(0.02, rel=0.1)
    # one addition to the residual a layer
    assert one[f"{inside}out_proj.weight"].std() == pytest.approx(0.01, rel=0.1)


@pytest.fixture(scope="module")
def single(pool: Pool) -> Arrays:
    return weights_of(pool, case())


@pytest.mark.parametrize("case", CASES, ids=str)
def test_weights_are_the_same_bits_under_every_layout(pool: Pool, case: Case, single: Arrays) -> None:
    found = weights_of(pool, case)
    assert found.keys() == single.keys()
    for name, value in single.items():
        assert found[name].tobytes() == value.tobytes(), name


@pytest.mark.parametrize("one", [case(tp=2, sp=True, pp=2), case(pp=2, vpp=2)], ids=str)
def test_tied_tables_start_as_one(pool: Pool, one: Case) -> None:
    changes = {"model__tied_embeddings": True, "model__linear_bias": True, "model__norm": "layernorm"}
    alone, found = weights_of(pool, case(), **changes), weights_of(pool, one, **changes)
    assert "output_layer.weight" not in found
    assert {name: value.tobytes() for name, value in found.items()} == {
        name: value.tobytes() for name, value in alone.items()
    }


ADAPTED = {"adapter": {"rank": 2, "targets": ["qkv", "experts"]}}


def matrices_with_memory(groups: Groups, config: Config) -> set[str]:
    """Returns the frozen or whole matrices of a rank that have memory before they are divided."""
    _, chunks = build_chunks(config, groups)
    named = (each for chunk in chunks for each in chunk.named_parameters() if "_adapter" not in each[0])
    return {name for name, each in named if name.endswith("weight") and each.dim() > 1 and not each.is_meta}


@pytest.mark.parametrize(
    ("one", "changes"),
    [
        (case(4, dp=2, ep=2, shard="weights"), BIASED | {"train__precision": "bf16", "model__mtp_depths": 1}),
        (case(2, dp=3, shard="weights"), MIXTRAL | ADAPTED | {"train__global_batch_size": 12}),
    ],
    ids=["experts", "adapters"],
)
def test_stages_that_are_never_whole_start_as_whole_ones(pool: Pool, one: Case, changes: dict[str, Any]) -> None:
    alone, found = weights_of(pool, case(), **changes), weights_of(pool, one, **changes)
    assert {name: value.tobytes() for name, value in found.items()} == {
        name: value.tobytes() for name, value in alone.items()
    }
    config = one.config(**changes)
    for names in pool.run(matrices_with_memory, one.resolved(config), config):
        assert names == {"embedding.word_embeddings.weight", "output_layer.weight"}


def test_deviations_are_as_configured(pool: Pool) -> None:
    weights = weights_of(pool, case(), model__init_std=0.05, model__linear_bias=True)
    for name, value in weights.items():
        if value.ndim == 1:
            assert (value == (1.0 if name.endswith("norm.weight") else 0.0)).all(), name
            continue
        into_residual = name.endswith(("linear_proj.weight", "linear_fc2.weight"))
        deviation = 0.05 / np.sqrt(2 * 4) if into_residual else 0.05
        # standard error of a standard deviation: 1 / sqrt(2 n)
        assert value.std() == pytest.approx(deviation, rel=4 / np.sqrt(2 * value.size)), name
        assert abs(value.mean()) < 4 * deviation / np.sqrt(value.size), name


def test_tensors_and_seeds_differ(pool: Pool, single: Arrays) -> None:
    layers = [f"decoder.layers.{i}.mlp.linear_fc1.weight" for i in range(4)]
    drawn = [single[name].tobytes() for name in [*layers, "embedding.word_embeddings.weight", "output_layer.weight"]]
    assert len(set(drawn)) == len(drawn)
    blocks = single[layers[0]].reshape(-1, 64)
    assert len({row.tobytes() for row in blocks}) == len(blocks)
    other = weights_of(pool, case(), train__seed=7)
    assert all(other[name].tobytes() != single[name].tobytes() for name in layers)


def built_twice(groups: Groups, configs: list[Config]) -> list[list[Arrays]]:
    """Returns for each configuration the drawn weights, and those of a model built to be given its weights later."""
    models = [
        [build_model(config, groups, weights_follow=follow).chunks for follow in (False, True)] for config in configs
    ]
    return [
        [
            {each.key: each.data.detach().float().numpy() for each in sharded_tensors(unwrap(chunk), groups)}
            for (chunk,) in both
        ]
        for both in models
    ]


def test_weights_that_follow_are_no_numbers_until_then_but_for_those_that_files_lack(pool: Pool) -> None:
    one = case(num_layers=1)
    adapters = one.config(train__precision="bf16", adapter={"rank": 2, "targets": ["qkv", "embedding"]})
    head = one.config(model__num_labels=3, loss__function="classification")
    for drawn, built in pool.run(built_twice, Layout(), [adapters, head])[0]:
        beside = {
            name
            for name in built
            if "adapter" in name or built["output_layer.weight"].shape[0] == 3 == len(built[name])
        }
        assert len(beside) >= 1
        for name, value in built.items():
            if name in beside:
                assert value.tobytes() == drawn[name].tobytes(), name
            elif value.ndim > 1:
                real = value[:VOCAB] if value.shape[0] == 65 else value
                assert np.isnan(real).all(), name
                assert not value[len(real) :].any(), "rows that only pad"


WHOLE = (600, 3, 20)


def defined() -> torch.Tensor:
    """Returns the whole tensor: 256 rows from each generator, seeded by the first 63 bits of a SHA-256."""
    blocks = []
    for block in range(3):
        digest = hashlib.sha256(f"7:w:{block}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        blocks.append(torch.empty(256, *WHOLE[1:]).normal_(0.0, 0.5, generator=generator))
    return torch.cat(blocks)[: WHOLE[0]]


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("offset", "shape"), [((0, 0, 0), WHOLE), ((250, 0, 5), (300, 3, 10)), ((512, 1, 0), (88, 2, 20))]
)
def test_a_part_is_that_of_the_whole(
    threads: int, dtype: torch.dtype, offset: tuple[int, ...], shape: tuple[int, ...]
) -> None:
    parameter = torch.nn.Parameter(torch.zeros(shape, dtype=dtype))  # which asks for gradients
    with torch.no_grad():
        draw(parameter, "7:w", WHOLE, offset, 0.5, threads)
    part = defined()[tuple(slice(start, start + size) for start, size in zip(offset, shape))]
    assert torch.equal(parameter.detach(), part.to(dtype))


def test_threads_share_no_generator() -> None:
    """The tensor has many blocks, so that threads sharing a generator would collide."""
    rows = 256 * 200
    one, several = torch.zeros(rows, 8), torch.zeros(rows, 8)
    draw(one, "7:w", (rows, 8), (0, 0), 0.5, 1)
    draw(several, "7:w", (rows, 8), (0, 0), 0.5, 4)
    assert torch.equal(one, several)
