"""Checkpoints of Megatron-LM and Megatron-Bridge as start weights, on other layouts than saved them."""

from __future__ import annotations

import pickle
import shutil
import tarfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtrain.arch.layout import Layout
from mtrain.base.errors import DataError
from mtrain.checkpoint.state.start_weights import canonical, check_megatron_weights
from mtrain.checkpoint.store.megatron_checkpoint import megatron_folder
from mtrain.config import Config
from tests.config.samples import config
from tests.core.state import megatron_0_19
from tests.core.state.megatron_ranks import foreign_weights, loss_from_foreign_weights, save_like_megatron_lm
from tests.messages import refuses
from tests.parity.expert_models import MIXTRAL, QWEN
from tests.pool import Pool

SMALL: dict[str, Any] = {
    "model__num_layers": 2,
    "model__hidden_size": 32,
    "model__ffn_hidden_size": 48,
    "model__num_attention_heads": 4,
    "model__num_query_groups": 2,
    "model__vocab_size": 117,
    "model__vocab_multiple": 8,
    "train__precision": "fp32",
    "train__global_batch_size": 4,
    "train__micro_batch_size": 2,
    "data__seq_length": 16,
}
LLAMA: dict[str, Any] = {}
TIED_QWEN3: dict[str, Any] = {"model__tied_embeddings": True, "model__qk_norm": True}
QWEN_MOE: dict[str, Any] = QWEN | {"model__tied_embeddings": False, "model__qk_norm": True}


def sample(**changes: Any) -> Config:
    """Configures a small model."""
    return config(**(SMALL | changes))


def looked_at(folder: Path, **changes: Any) -> None:
    """Compares names and shapes as `mtrain check` does."""
    found = megatron_folder(folder)
    assert found is not None
    check_megatron_weights(found, sample(**changes))


def loss(pool: Pool, folder: Path, num_ranks: int, **changes: Any) -> float:
    """Returns the loss of our model on a layout, from these weights."""
    user = sample(checkpoint__initialize_from=str(folder), **changes)
    return float(pool.run(loss_from_foreign_weights, Layout.from_config(user, num_ranks), user, folder)[0])


@pytest.mark.parametrize(
    ("model", "saving", "prefix", "stacked", "loading"),
    [
        (LLAMA, {"layout__tp": 2}, "", True, {"layout__pp": 2}),
        (TIED_QWEN3, {}, "model.", False, {"layout__tp": 2, "layout__sp": True}),
        # experts: the row below, and layers one by one: the row above
        pytest.param(
            MIXTRAL, {"layout__ep": 2}, "", False, {"layout__tp": 2, "layout__sp": True}, marks=pytest.mark.nightly
        ),
        (QWEN_MOE, {}, "model0.module.", True, {"layout__ep": 2}),
    ],
    ids=["llama", "qwen3", "mixtral", "qwen3-moe"],
)
def test_weights_of_megatron_lm_give_the_same_loss_on_another_layout(
    pool: Pool,
    tmp_path: Path,
    model: dict[str, Any],
    saving: dict[str, Any],
    prefix: str,
    stacked: bool,
    loading: dict[str, Any],
) -> None:
    user = sample(**model, **saving)
    num_ranks = 2 if saving else 1
    theirs = pool.run(save_like_megatron_lm, Layout.from_config(user, num_ranks), user, tmp_path, prefix, stacked)
    looked_at(tmp_path, **model)
    assert loss(pool, tmp_path, 2, **model, **loading) == pytest.approx(theirs[0], rel=2e-6)


@pytest.fixture(scope="module")
def llama(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Writes a checkpoint in Megatron-LM's format."""
    folder, user = tmp_path_factory.mktemp("megatron"), sample()
    pool.run(save_like_megatron_lm, Layout.from_config(user, 1), user, folder, "", True)
    return folder


def test_what_does_not_fit_is_refused_by_name(pool: Pool, llama: Path) -> None:
    for changes, words in (
        ({"model__ffn_hidden_size": 40}, ["linear_fc1.weight has shape [2, 96, 32]", "[2, 80, 32]"]),
        ({"model__tied_embeddings": True}, ["has output_layer.weight, which the model does not have"]),
        ({"model__qk_norm": True}, ["lacks", "self_attention.k_layernorm.weight, ", "which the model has"]),
        ({"model__vocab_size": 500}, ["embedding.word_embeddings.weight has shape [128, 32]"]),
    ):
        with pytest.raises(DataError) as caught:
            loss(pool, llama, 1, **changes)
        assert all(word in str(caught.value) for word in words), caught.value
        with pytest.raises(DataError) as without_ranks:
            looked_at(llama, **changes)
        assert str(without_ranks.value) == str(caught.value)


def test_common_files_are_never_read_and_bridges_configuration_is_compared(
    pool: Pool, llama: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "iter_0000100"
    shutil.copytree(llama / "iter_0000100", folder)
    expected = loss(pool, folder, 1)
    (folder / "common.pt").write_bytes(pickle.dumps(Touch(tmp_path / "ran")))
    (folder / "run_config.yaml").write_text("model: {num_layers: 2, rotary_base: 10000, _target_: any.thing}\n")
    assert loss(pool, folder, 1) == expected
    assert not (tmp_path / "ran").exists()
    (folder / "run_config.yaml").write_text("model: {num_layers: 2, rotary_base: 500000}\n")
    with refuses(DataError, "rotary_base=500000", "model.rope.base=10000"):
        loss(pool, folder, 1)
    (folder / "run_config.yaml").write_text("model: !!python/object/apply:os.abort []\n")
    with refuses(DataError):
        loss(pool, folder, 1)


@pytest.mark.parametrize("layout", [Layout(pp=2), Layout(pp=2, dp=2, shard="weights")], ids=str)
def test_what_megatron_0_19_has_written_is_read_to_the_last_bit(pool: Pool, tmp_path: Path, layout: Layout) -> None:
    """Version 0.19 keeps its arguments as an object among the tensors, where 0.16 has a separate file."""
    with tarfile.open(megatron_0_19.ARCHIVE) as archive:
        archive.extractall(tmp_path, filter="data")
    sizes = {f"model__{name}": value for name, value in megatron_0_19.MODEL.items()}
    vocabulary = {"model__vocab_size": 30, "model__tied_embeddings": True}
    spread = {"layout__pp": layout.pp, "layout__shard": layout.shard}
    user = sample(**sizes, **vocabulary, **spread, checkpoint__initialize_from=str(tmp_path))
    whole = pool.run(foreign_weights, layout, user, tmp_path)[0]
    assert whole is not None
    assert len(whole) == 2 + 2 * 6
    for name, found in whole.items():
        expected = megatron_0_19.drawn(name, tuple(found.shape))
        if name == "embedding.word_embeddings.weight":  # Megatron draws its padding rows, ours are zero
            expected[30:] = 0
        assert found.equal(expected), name


BOOKKEEPING = (
    "common_state/shard_0_1",
    "rng_state/shard_0.1_2.4",
    "rerun_state_machine_state/shard_3_8",
    "optimizer.state.exp_avg.decoder.layers.mlp.linear_fc1.weight",
    "optimizer.distributed.dp_group_idx_0.param_state/shard_0_1",
    "chained_1.optimizer.state.fp32_param.output_layer.weight",
    "chained_0.optimizer.distributed.dp_group_idx_1.optimizer/shard_0_1",
    "decoder.layers.mlp.linear_fc2._extra_state/shard_1_2",
)
"""Keys that Megatron-LM's training loop writes with the weights."""


@pytest.mark.parametrize("key", BOOKKEEPING)
def test_what_the_training_loop_of_megatron_keeps_is_no_weight(key: str) -> None:
    assert canonical(key) is None


@given(
    name=st.sampled_from(BOOKKEEPING[:6]),
    change=st.sampled_from(["x{}", "model.{}", "{}.weight", "{}_2", "decoder.{}"]),
)
def test_a_key_that_only_resembles_one_of_these_is_not_dropped(name: str, change: str) -> None:
    key = change.format(name)
    is_of_an_optimizer = name.startswith(("optimizer.", "chained_")) and change.startswith("{}")
    assert (canonical(key) is None) == is_of_an_optimizer, key


class Touch:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)
