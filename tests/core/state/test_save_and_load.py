"""Saving and resuming: bit for bit on the same layout, the same bits on another one, all or nothing on a fault."""

import os
import pickle
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mtrain.arch.layout import Layout
from mtrain.base.errors import DataError
from mtrain.checkpoint.store.directory import load_entry, publish
from mtrain.checkpoint.store.manifest import CheckpointInfo
from mtrain.checkpoint.store.steps import published_steps, step_name
from mtrain.config import Config
from tests.checkpoint.checkpoints import begin_staging
from tests.core.state import checkpoint_ranks as ranks
from tests.core.state.checkpoint_ranks import Arrays, Outcome, Standing, Whole, newest_step
from tests.fault_table import Notice
from tests.pool import Pool, RankFailed

OVERLAP = {"train.overlap_grad_reduce": True, "train.overlap_param_gather": True}
TIED = {"model.tied_embeddings": True}
DROPOUT = {"model.hidden_dropout": 0.1, "model.attention_dropout": 0.1}
NOT_DISTRIBUTED = {"train.distributed_optimizer": False}
BF16 = {"train.precision": "bf16"}
FEW_LAYERS = {"model.num_layers": 2}
FP16 = {"train.precision": "fp16", "train.initial_loss_scale": 2.0**21}  # overflows in two of the first three steps

STEADY = {"optimizer.epsilon": 1e-3}
"""Epsilon with which Adam makes no step of the rounding of a gradient near zero (see tests/parity/cases.py)."""

SAVED, SAVED_TIED = Layout(tp=2, dp=2), Layout(pp=2, dp=2)
"""Layouts that save; a pipeline puts the tied tables on different ranks."""
FACTS = set(CheckpointInfo.model_fields)


def configured(**changes: Any) -> Config:
    """Configures a small model whose sizes are not multiples of any buffer padding; keys are `section.key`."""
    sections: dict[str, dict[str, Any]] = {
        "run": {"dir": "unused"},
        "model": {
            "num_layers": 4,
            "hidden_size": 32,
            "ffn_hidden_size": 48,
            "num_attention_heads": 4,
            "num_query_groups": 4,
            "vocab_size": 57,
            "vocab_multiple": 2,  # padded to 58 for tp = 1, 60 for tp = 2 and 64 for tp = 4
            "qk_norm": True,
            "qkv_bias": True,
        },
        "train": {"global_batch_size": 4, "num_steps": 9, "precision": "fp32"},
        "optimizer": {"lr": 1e-2, "schedule": "constant"},
        "data": {"kind": "mock", "seq_length": 8},
        "layout": {},
        "checkpoint": {},
    }
    for key, value in changes.items():
        section, name = key.split(".")
        sections.setdefault(section, {})[name] = value
    return Config.model_validate(sections)


def assert_same_bits(one: Arrays, other: Arrays) -> None:
    assert one.keys() == other.keys()
    for name in one:
        np.testing.assert_array_equal(_tokens(one[name]), _tokens(other[name]), err_msg=name)


def assert_same_standing(one: Standing, other: Standing) -> None:
    """Compares the states of one rank under one layout."""
    assert (one.adam_step, one.loss_scaler) == (other.adam_step, other.loss_scaler)
    assert one.random_bytes == other.random_bytes
    assert len(one.held) == len(other.held) > 0
    for mine, theirs in zip(one.held, other.held):
        assert_same_bits(mine, theirs)
    for mine, theirs in zip(one.parameters, other.parameters, strict=True):
        np.testing.assert_array_equal(mine, theirs)


def assert_same_model(one: Whole, other: Whole) -> None:
    """Compares the models of any two layouts."""
    for mine, theirs in zip(one, other):
        assert_same_bits(mine, theirs)


def _tokens(values: Any) -> Any:
    """Removes the rows of the padded vocabulary, whose number follows tp; they must be zero."""
    if values.shape[:1] not in [(58,), (60,), (64,)]:
        return values
    assert not values[57:].any()
    return values[:57]


@pytest.mark.parametrize(
    ("layout", "changes"),
    [
        (Layout(tp=2, sp=True), DROPOUT),
        pytest.param(Layout(tp=2, sp=True), FP16, marks=pytest.mark.nightly),  # the scale: tests/verify/resume
        (Layout(pp=2), BF16 | TIED),
        (Layout(pp=2, vpp=2), OVERLAP),
        pytest.param(Layout(cp=2), BF16 | DROPOUT, marks=pytest.mark.nightly),  # dropout: above; its state: as of dp
        (Layout(dp=2), OVERLAP | TIED),
        (Layout(pp=2, dp=2), BF16 | TIED | OVERLAP),
        (Layout(dp=2), BF16 | NOT_DISTRIBUTED),
        (Layout(dp=2, shard="weights"), BF16 | TIED),
        pytest.param(Layout(dp=2, shard="weights"), FP16, marks=pytest.mark.nightly),  # as sharded by the optimizer
    ],
    ids=str,
)
def test_resuming_on_the_same_layout_is_exact(
    pool: Pool, tmp_path: Path, layout: Layout, changes: dict[str, Any]
) -> None:
    config = configured(**({} if layout.pp > 1 else FEW_LAYERS), **changes)
    saved, end = (3, 5) if config.train.precision == "fp16" else (1, 3)
    both: list[tuple[Outcome, Outcome]] = pool.run(ranks.train_and_resume, layout, config, tmp_path, end, saved)
    for one, other in both:
        assert other.loaded is not None
        assert other.loaded.step == saved
        assert one.saved is not None
        assert_same_standing(one.saved, other.begin)
        assert repr(one.steps[saved:]) == repr(other.steps)  # NaN, where fp16 overflows, is not equal to itself
        assert_same_standing(one.end, other.end)
    straight = both[0][0]
    applied = sum(np.isfinite(step.grad_norm) for step in straight.steps)
    assert straight.end.adam_step == applied
    assert (applied < end) == (config.train.precision == "fp16")


def test_saving_leaves_the_run_as_it_was(pool: Pool, tmp_path: Path) -> None:
    layout, config = Layout(dp=2), configured(**BF16, **TIED, **OVERLAP, **DROPOUT, **FEW_LAYERS)
    without: list[Outcome] = pool.run(ranks.train, layout, config, tmp_path, None, 2)
    with_save: list[Outcome] = pool.run(ranks.train, layout, config, tmp_path, None, 2, 1)
    for one, other in zip(without, with_save):
        assert one.steps == other.steps
        assert_same_standing(one.end, other.end)


def test_a_run_that_has_not_stepped_is_saved_and_resumed(pool: Pool, tmp_path: Path) -> None:
    config = configured(**BF16, **FEW_LAYERS)
    straight, resumed = pool.run(ranks.train_and_resume, Layout(dp=2), config, tmp_path, 2, 0)[0]
    assert straight.steps == resumed.steps
    assert_same_standing(straight.end, resumed.end)


@pytest.fixture(scope="module")
def resharding(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Callable[[bool], Any]:
    """A float32 run, tied or not, that saved after a step and made another: (its folder, rank 0)."""

    def run(is_tied: bool) -> tuple[Path, Outcome]:
        config, folder = configured(**STEADY, **(TIED if is_tied else {})), tmp_path_factory.mktemp("saved")
        layout = SAVED_TIED if is_tied else SAVED
        return folder, pool.run(ranks.train, layout, config, folder, None, 2, 1, ["save", "end"])[0]

    return cache(run)


ELSEWHERE: list[tuple[bool, Layout, dict[str, Any]]] = [
    (False, Layout(), {}),
    (False, Layout(tp=4, sp=True), {}),
    (False, Layout(pp=2, vpp=2), OVERLAP),
    (False, Layout(dp=4), {}),
    (False, Layout(tp=2, sp=True, cp=2), OVERLAP),
    (False, Layout(pp=2, stage_layers=(1, 3)), {"layout.pp": 2, "layout.stage_layers": (1, 3)}),
    (False, Layout(dp=2), NOT_DISTRIBUTED),
    (False, Layout(dp=4, shard="weights"), {}),
    (False, Layout(cp=2, dp=2), OVERLAP),
    # tables are one where a rank has both ends of the model, and two where a pipeline or tensor ranks part them
    (True, Layout(), {}),
    (True, Layout(dp=2), NOT_DISTRIBUTED),
    (True, Layout(pp=2, vpp=2), OVERLAP),
    (True, Layout(pp=4), {}),
    (True, Layout(tp=2, sp=True, pp=2, cp=2), {}),
]


@pytest.mark.fault(
    "checkpoints",
    "resuming on another number of ranks, under another layout",
    happens="the same bits of weights and moments, and losses equal to rounding",
    exit_code=None,
)
@pytest.mark.parametrize(
    ("is_tied", "layout", "changes"),
    # weights are divided by tp where they are saved, and ranks of cp hold what those of dp hold
    [pytest.param(*each, marks=[pytest.mark.nightly] if each[1].tp * each[1].cp > 1 else []) for each in ELSEWHERE],
    ids=[f"{'tied' if is_tied else 'untied'}-{layout}" for is_tied, layout, _ in ELSEWHERE],
)
def test_another_layout_gets_the_same_bits_and_trains_alike(
    pool: Pool, resharding: Any, is_tied: bool, layout: Layout, changes: dict[str, Any], notice: Notice
) -> None:
    folder, straight = resharding(is_tied)
    config = configured(**{**STEADY, **(TIED if is_tied else {}), **changes})
    with notice:
        resumed: Outcome = pool.run(ranks.train, layout, config, folder, 1, 2, None, ["begin", "end"])[0]
    assert resumed.loaded is not None
    assert not resumed.loaded.random_states_continue
    assert resumed.begin.adam_step == 1
    assert_same_bits(straight.whole["save"].main, straight.whole["save"].parameters)
    assert_same_model(straight.whole["save"], resumed.whole["begin"])
    for one, other in zip(straight.steps[1:], resumed.steps, strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-5)
    for name, values in straight.whole["end"].parameters.items():
        others, bound = resumed.whole["end"].parameters[name], 1e-5 * np.abs(values).max()
        np.testing.assert_allclose(_tokens(others), _tokens(values), rtol=1e-5, atol=bound, err_msg=name)


@pytest.mark.nightly  # tied tables on two stages: above; steps of depths: tests/parity/models/test_multi_token.py
@pytest.mark.parametrize("tied", [TIED, {}], ids=["tied", "untied"])
def test_depths_of_multi_token_prediction_travel_between_layouts(
    pool: Pool, tmp_path: Path, tied: dict[str, Any]
) -> None:
    """The last stage of a pipeline holds a copy of the embeddings for the depths."""
    config = configured(**tied, **FEW_LAYERS, **{"model.mtp_depths": 2})
    straight: Outcome = pool.run(ranks.train, Layout(pp=2), config, tmp_path, None, 3, 1, ["save"])[0]
    assert "mtp.layers.1.eh_proj.weight" in straight.whole["save"].parameters
    assert "mtp.layers.0.transformer_layer.self_attention.linear_qkv.weight" in straight.whole["save"].moments
    resumed: Outcome = pool.run(ranks.train, Layout(tp=2, sp=True), config, tmp_path, 1, 3, None, ["begin"])[0]
    assert_same_model(straight.whole["save"], resumed.whole["begin"])
    for one, other in zip(straight.steps[1:], resumed.steps, strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-5)


@pytest.fixture(scope="module")
def half(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A bf16 run on pp2dp2 whose shared embeddings have a gradient bucket of their own: (folder, rank 0)."""
    folder, config = tmp_path_factory.mktemp("half"), configured(**BF16, **TIED)
    return folder, pool.run(ranks.train, SAVED_TIED, config, folder, None, 2, 2, ["save"])[0]


@pytest.mark.parametrize(
    "layout", [Layout(), Layout(tp=4), Layout(tp=2, dp=2), Layout(dp=4), Layout(dp=2, shard="weights")], ids=str
)
def test_float32_main_weights_of_bf16_travel_between_layouts(pool: Pool, half: Any, layout: Layout) -> None:
    folder, straight = half
    saved = straight.whole["save"]
    assert any((main != saved.parameters[name]).any() for name, main in saved.main.items()), "all are bf16 numbers"
    resumed: Outcome = pool.run(ranks.train, layout, configured(**BF16, **TIED), folder, 2, 2, None, ["begin"])[0]
    assert_same_model(saved, resumed.whole["begin"])


@pytest.mark.parametrize("changes", [BF16 | TIED, STEADY], ids=["bf16", "fp32"])
def test_weights_may_be_divided_at_one_start_and_whole_at_the_next(
    pool: Pool, tmp_path: Path, changes: dict[str, Any]
) -> None:
    config = configured(**changes, **FEW_LAYERS)
    divided, whole = Layout(tp=2, dp=2, shard="weights"), Layout(tp=2, dp=2)
    straight: Outcome = pool.run(ranks.train, divided, config, tmp_path, None, 2, 1, ["save", "end"])[0]
    resumed: Outcome = pool.run(ranks.train, whole, config, tmp_path, 1, 2, None, ["begin", "end"])[0]
    assert_same_model(straight.whole["save"], resumed.whole["begin"])
    assert resumed.loaded is not None
    assert resumed.loaded.random_states_continue
    if config.train.precision == "fp32":
        np.testing.assert_allclose(resumed.steps, straight.steps[1:], rtol=1e-5)


@pytest.mark.parametrize("layout", [Layout(tp=2), Layout(dp=3, shard="weights")], ids=str)
def test_a_new_run_starts_from_the_main_weights(pool: Pool, half: Any, layout: Layout) -> None:
    """The main weights are the start in every precision; ranks that divide them read their rows."""
    folder, straight = half
    dtypes = {"fp32": np.float32, "bf16": None, "fp16": np.float16}
    given = {**TIED, "layout.shard": layout.shard, "train.global_batch_size": 6}
    configs = [configured(**given, **{"train.precision": precision}) for precision in dtypes]
    everyone = pool.run(ranks.start_from, layout, configs, folder, 2)
    num_elements = sum(values.size for values in straight.whole["save"].main.values())
    for started in zip(*everyone, strict=True):
        assert sum(each.num_read for each in started) <= 1.1 * num_elements
    for (adam_step, begun, _), (precision, dtype) in zip(everyone[0], dtypes.items(), strict=True):
        assert adam_step == 0, precision
        assert_same_bits(straight.whole["save"].main, begun.main)
        assert not any(values.any() for values in begun.moments.values()), precision
        if dtype is None:
            assert_same_bits(straight.whole["save"].parameters, begun.parameters)
        else:
            assert_same_bits({name: main.astype(dtype) for name, main in begun.main.items()}, begun.parameters)


def test_random_states_on_another_layout_follow_from_seed_and_step(pool: Pool, tmp_path: Path) -> None:
    config = configured(**DROPOUT, **FEW_LAYERS)
    pool.run(ranks.save, Layout(tp=2), config, tmp_path, [1, 2])
    first, again, later = pool.run(ranks.resumed_at, Layout(), config, tmp_path, (1, 1, 2))[0]
    assert first.begin.random_bytes == again.begin.random_bytes
    assert first.begin.random_bytes != later.begin.random_bytes


REFUSED_RUNS: list[tuple[dict[str, Any], list[str]]] = [
    ({"model.num_layers": 2}, ["decoder.layers.mlp.linear_fc1.weight has shape [4, 96, 32]", "[2, 96, 32]"]),
    ({"model.qk_norm": False}, ["does not have", "decoder.layers.self_attention.q_layernorm.weight"]),
    ({"model.linear_bias": True}, ["lacks", "decoder.layers.mlp.linear_fc1.bias"]),
    ({"model.tied_embeddings": False}, ["lacks", "output_layer.weight"]),
    ({"model.vocab_size": 58}, ["vocabulary of 57", "model.vocab_size is 58"]),
    ({"train.precision": "fp32"}, ["is torch.bfloat16, but the run needs torch.float32"]),
    ({"train.precision": "fp16"}, ["train.precision is fp16"]),
    ({"train.global_batch_size": 2}, ["8 samples in 2 steps", "train.global_batch_size=2"]),
]


def test_a_checkpoint_of_another_run_is_refused_by_all_ranks(pool: Pool, half: Any) -> None:
    cases = [(configured(**{**BF16, **TIED, **changes}), half[0]) for changes, _ in REFUSED_RUNS]
    first, *others = pool.run(ranks.load_errors, Layout(pp=2), cases)
    assert others == [first]
    for (kind, text), (changes, words) in zip(first, REFUSED_RUNS, strict=True):
        assert kind == "DataError", changes
        assert [word for word in words if word not in text] == [], (changes, text)


def republished(folder: Path, change: Callable[[Path], Any], root: Path) -> Path:
    """Publishes the same checkpoint in another folder, changed before publication, so that the manifest agrees."""
    staging = begin_staging(root, 2)
    shutil.copytree(folder / step_name(2), staging.path, dirs_exist_ok=True)
    (staging.path / "mtrain.json").unlink()
    change(staging.path)
    publish(
        staging, CheckpointInfo.model_validate(load_entry(folder / step_name(2)).manifest.model_dump(include=FACTS))
    )
    return root


def _shard(folder: Path) -> Path:
    return max(folder.glob("*.distcp"), key=lambda path: path.stat().st_size)


DAMAGES: list[tuple[Callable[[Path], Any], str]] = [
    (lambda folder: _shard(folder).write_bytes(_shard(folder).read_bytes()[:1000]), "the file ends after 1000 bytes"),
    (lambda folder: _shard(folder).write_bytes(bytes(_shard(folder).stat().st_size)), "is damaged"),
    (lambda folder: _shard(folder).unlink(), ".distcp cannot be read"),
    (lambda folder: (folder / ".metadata").unlink(), ".metadata cannot be read"),
    (lambda folder: (folder / ".metadata").write_bytes(b"\x80"), "is not a list of tensors"),
    (lambda folder: (folder / "training_state.json").unlink(), "training_state.json cannot be read"),
    (lambda folder: (folder / "training_state.json").write_text("{}"), "cannot be understood"),
]


def test_a_damaged_checkpoint_is_refused_by_all_ranks(pool: Pool, half: Any, tmp_path: Path) -> None:
    folders = [republished(half[0], change, tmp_path / str(number)) for number, (change, _) in enumerate(DAMAGES)]
    config = configured(**BF16, **TIED)
    first, *others = pool.run(ranks.load_errors, Layout(pp=2), [(config, folder) for folder in folders])
    assert others == [first]
    for (kind, text), folder, (_, word) in zip(first, folders, DAMAGES, strict=True):
        assert kind == "DataError", word
        assert word in text
        assert str(folder) in text


def _padded(content: bytes, folder: Path) -> bytes:
    return content.ljust(_shard(folder).stat().st_size, b".")


class RunsCode:
    """Makes a folder when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.marker),)


@pytest.mark.fault(
    "checkpoints",
    "pickle that runs code, in `.metadata`, in a shard or in `common.pt`",
    happens="refused by all ranks, or never read; nothing runs",
    exit_code=3,
)
def test_nothing_of_a_checkpoint_runs_as_code(pool: Pool, half: Any, tmp_path: Path, notice: Notice) -> None:
    evil = pickle.dumps(RunsCode(tmp_path / "ran"))
    listed = republished(half[0], lambda folder: (folder / ".metadata").write_bytes(evil), tmp_path / "listed")
    beside = republished(half[0], lambda folder: (folder / "common.pt").write_bytes(evil), tmp_path / "beside")
    shard = republished(half[0], lambda folder: _shard(folder).write_bytes(_padded(evil, folder)), tmp_path / "shard")
    config = configured(**BF16, **TIED)
    cases = [(config, folder) for folder in (listed, shard, beside)]
    with notice:
        refused, unread, ignored = pool.run(ranks.load_errors, Layout(), cases)[0]
    assert refused[0] == unread[0] == "DataError"
    assert notice.exit_code == DataError.exit_code
    assert "posix.mkdir, which is not allowed" in refused[1]
    assert ignored == ("nothing", "")
    assert not (tmp_path / "ran").exists()


def test_megatron_core_reads_what_was_saved(pool: Pool, half: Any) -> None:
    folder, straight = half
    tensors = pool.run(ranks.read_by_megatron, Layout(), folder, 2)[0]
    embedding, saved = "embedding.word_embeddings.weight", straight.whole["save"]
    np.testing.assert_array_equal(tensors[embedding], saved.parameters[embedding])
    np.testing.assert_array_equal(tensors[f"optimizer.state.param.{embedding}"], saved.main[embedding])
    assert tensors["optimizer.state.exp_avg_sq.decoder.layers.mlp.linear_fc1.weight"].shape == (4, 96, 32)


@pytest.mark.nightly  # by day at each phase of a save, in test_save_faults.py
@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_killed_while_saving_leaves_the_checkpoint_before(pool: Pool, tmp_path: Path, victim: int) -> None:
    """The kill comes before the first, ninth, ... (or each) file operation, until the save ends before the kill."""
    config = configured(**BF16)
    pool.run(ranks.save, Layout(dp=2), config, tmp_path, [1])
    outcomes = []
    for number, operation in enumerate(range(0, 1000, 8 if victim == 0 else 1)):
        step = number + 2
        try:
            pool.run(ranks.save_and_die, Layout(dp=2), config, tmp_path, step, victim, operation)
        except RankFailed:
            outcomes.append(newest_step(tmp_path) == step)
            if outcomes[-1]:  # killed after the rename
                shutil.rmtree(tmp_path / step_name(step))
            assert newest_step(tmp_path) == 1
        else:
            break
    assert newest_step(tmp_path) == step
    assert outcomes.count(False) >= 2
    assert outcomes == sorted(outcomes)


def test_only_the_configured_checkpoints_stay(pool: Pool, tmp_path: Path) -> None:
    config = configured(**{"checkpoint.keep_last": 2, "checkpoint.keep_every_steps": 2})
    pool.run(ranks.save, Layout(), config, tmp_path, [1, 2, 3, 4, 5])
    assert published_steps(tmp_path) == [2, 4, 5]
    assert (tmp_path / "latest").read_text() == f"{step_name(5)}\n"


def test_saving_needs_no_helper_process(pool: Pool, tmp_path: Path) -> None:
    assert pool.run(ranks.save_without_psutil, Layout(dp=2), configured(), tmp_path) == [0, 0]
