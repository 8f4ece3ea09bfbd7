"""Whole tensors: drawn by name, assembled from shards, ordered like the forward pass."""

from typing import Any

import numpy as np
import pytest

from mtrain.arch.layout import Layout
from mtrain.base.tensor_slice import TensorSlice
from mtrain.core.state.shard import Shard
from mtrain.verify.core.weights import EMBEDDING, OUTPUT, assembled, drawn
from mtrain.verify.reference.model.adapters import all_shapes
from tests.config.samples import config
from tests.config.test_vision import GEMMA3, LATENT
from tests.parity.families import GEMMA, HYBRID, MAMBA
from tests.pool import Pool
from tests.verify.core import rank_functions


def shard(name: str, offset: int, values: list[float]) -> Shard:
    return Shard(name, (4,), TensorSlice((offset,), (len(values),)), np.array(values, np.float64))  # type: ignore[arg-type]


def test_shards_are_put_together_and_the_spread_of_replicas_is_reported() -> None:
    whole = assembled([shard("a", 0, [1, 2]), shard("a", 2, [3, 4]), shard("a", 1, [2, 3.5]), shard("b", 0, [1] * 4)])
    assert whole.tensors["a"].tolist() == [1, 2, 3, 4]
    assert whole.spread == {"a": 0.5, "b": 0.0}


def test_what_no_rank_holds_is_not_a_number() -> None:
    assert np.isnan(assembled([shard("a", 0, [1, 2])]).tensors["a"]).tolist() == [False, False, True, True]


def test_weights_depend_on_their_name_and_the_vocabulary_is_padded_with_zeros() -> None:
    tied, untied = config(model__tied_embeddings=True), config()
    table = drawn(EMBEDDING, (1024, 8), tied)
    assert table[:1000].abs().min() > 0
    assert not table[1000:].any()
    assert drawn(EMBEDDING, (1100, 8), tied)[:1000].equal(table[:1000])
    assert drawn(OUTPUT, (1024, 8), tied).equal(table)
    assert not drawn(OUTPUT, (1024, 8), untied).equal(table)
    assert not drawn(EMBEDDING, (1024, 8), tied, "teacher").equal(table)
    norm = drawn("decoder.layers.0.input_layernorm.weight", (64,), tied)
    assert 0.9 < float(norm.mean()) < 1.1
    assert float(norm.std()) > 0.05


NORMS: dict[str, dict[str, Any]] = {
    "plain": {"model__qk_norm": True},
    "zero-centred, sandwiched, with images": GEMMA | {"model__vision": GEMMA3, "model__num_layers": 3},
    "zero-centred, delta nets": HYBRID | {"model__num_layers": 2},
    "zero-centred, latents, tokens ahead": {
        "model__zero_centered_norm": True,
        "model__mla": LATENT,
        "model__num_query_groups": None,
        "model__mtp_depths": 1,
    },
    "plain, with images": {"model__vision": GEMMA3},
    "mamba": MAMBA | {"model__num_layers": 4},
}


@pytest.mark.parametrize("kind", NORMS)
def test_norms_are_drawn_around_a_gain_of_one(pool: Pool, kind: str) -> None:
    """A gain of 2 of queries and keys makes attention four times as sharp, which amplifies rounding."""
    user = config(**NORMS[kind])
    (found,) = pool.run(rank_functions.gains_off_one, Layout(), user)
    assert found
    assert {name: off for name, off in found.items() if abs(off) > 0.3} == {}


def test_tensors_are_ordered_as_they_are_used() -> None:
    user = config(model__num_layers=11, model__mtp_depths=1, adapter={"rank": 4, "targets": ["qkv"]})
    names = list(all_shapes(user))
    parts = [name.split(".")[:3] for name in names]
    order = [each for number, each in enumerate(parts) if number == 0 or parts[number - 1] != each]
    layers = [["decoder", "layers", str(layer)] for layer in range(11)]
    final, ahead = ["decoder", "final_layernorm", "weight"], ["mtp", "layers", "0"]
    assert [each for each in order if each[0] != "embedding"] == [*layers, final, ahead, OUTPUT.split(".")]
    assert names[0] == EMBEDDING
    qkv = "decoder.layers.3.self_attention.linear_qkv"
    assert names.index(f"{qkv}_adapter.q_proj_lora_a") > names.index(f"{qkv}.weight")
