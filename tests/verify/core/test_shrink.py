"""The small configuration keeps the structure of the user's."""

import re
from pathlib import Path

import pytest

from mtrain.arch.layout import broken_rules
from mtrain.base.errors import ConfigError
from mtrain.hf.configuration import load_config
from mtrain.verify.core.layouts import DerivedTrials, Trial, prepared
from mtrain.verify.core.shrink import shrink
from tests.config.samples import config
from tests.messages import refuses
from tests.paths import ROOT
from tests.verify.parity.checks import expert_config

ONE = [Trial()]


def test_structure_is_kept_and_sizes_are_not() -> None:
    user = config(
        model__hidden_size=4096,
        model__num_attention_heads=32,
        model__num_query_groups=8,
        model__ffn_hidden_size=14336,
        model__norm="layernorm",
        model__qkv_bias=True,
        model__qk_norm=True,
        model__tied_embeddings=True,
        model__rope={"base": 5e5, "scaling": "llama3", "factor": 8.0},
        loss__aggregation="seq-mean-token-mean",
        loss__side_terms={"z": {"function": "z_loss", "coefficient": 1e-4}},
        data__isolate_documents=True,
        train__recompute="full",
        train__precision="bf16",
        optimizer__epsilon=1e-8,
    )
    small = shrink(user, ONE).config
    assert small.model.hidden_size <= 128
    assert small.model.num_attention_heads // small.model.query_groups == 4
    assert small.model.query_groups > 1
    for key in ("norm", "qkv_bias", "qk_norm", "tied_embeddings", "activation", "linear_bias"):
        assert getattr(small.model, key) == getattr(user.model, key)
    assert (small.model.rope.scaling, small.model.rope.factor) == ("llama3", 8.0)
    assert small.loss.aggregation == user.loss.aggregation
    assert small.loss.side_terms.keys() == user.loss.side_terms.keys()
    assert small.data.isolate_documents
    assert (small.train.recompute, small.train.precision) == ("full", "fp32")
    assert small.optimizer.epsilon == user.optimizer.epsilon
    assert small.model.vocab_size % small.model.vocab_multiple, "the vocabulary is padded"


@pytest.mark.parametrize(
    ("heads", "groups", "ratio"), [(32, 8, 4), (32, None, 1), (8, 8, 1), (8, 1, 8), (64, 1, 8), (48, 4, 6)]
)
def test_query_heads_for_each_key_head(heads: int, groups: int | None, ratio: int) -> None:
    user = config(model__hidden_size=heads * 64, model__num_attention_heads=heads, model__num_query_groups=groups)
    model = shrink(user, ONE).config.model
    assert model.num_attention_heads // model.query_groups == ratio
    assert (model.query_groups == 1) == (groups == 1)


def test_a_head_dimension_of_its_own_stays_one() -> None:
    user = config(model__hidden_size=256, model__head_dim=64)
    model = shrink(user, ONE).config.model
    assert model.head_size * model.num_attention_heads != model.hidden_size


@pytest.mark.parametrize("q_lora_rank", [None, 1536])
def test_latents_stay_and_become_small(q_lora_rank: int | None) -> None:
    latents = {
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "norm_epsilon": 1e-6,
    }
    user = config(
        model__num_query_groups=None, model__hidden_size=7168, model__mla=latents | {"q_lora_rank": q_lora_rank}
    )
    small = shrink(user, ONE).config.model.mla
    assert small is not None
    assert (small.q_lora_rank is None) == (q_lora_rank is None)
    model = shrink(user, ONE).config.model
    assert small.norm_epsilon == pytest.approx(0.1 * model.norm_epsilon), "the user's are 1e-6 and 1e-5"
    sizes = [small.kv_lora_rank, small.qk_nope_head_dim, small.qk_rope_head_dim, small.v_head_dim]
    assert max(sizes) <= 16
    assert len(set(sizes)) == len(sizes), "no two can be taken for each other"


@pytest.mark.parametrize(
    ("window", "length", "expected"),
    [(None, 4096, None), (1024, 4096, 8), (4096, 4096, 32), (9000, 4096, 32), (1, 4096, 2)],
)
def test_the_window_covers_the_same_share_of_a_row(window: int | None, length: int, expected: int | None) -> None:
    user = config(model__sliding_window=window, data__seq_length=length)
    assert shrink(user, ONE).config.model.sliding_window == expected


def test_global_layers_are_among_the_few_layers() -> None:
    user = config(model__num_layers=24, model__sliding_window=8, model__global_attention_every=6)
    assert shrink(user, [Trial(pp=4)]).config.model.num_layers == 8


@pytest.mark.parametrize(
    ("pattern", "kept"),
    [
        (2, [0, 1, 0, 1]),
        (12, [0, 0, 0, 1]),
        ([0, 1] + [0] * 22, [0, 1, 0, 0]),
        ([0] * 23 + [1], [0, 0, 0, 1]),
        ([1] * 24, [1] * 4),
        ([0] * 24, [0] * 4),
    ],
)
def test_layers_without_rope_are_among_the_few_layers(pattern: int | list[int], kept: list[int]) -> None:
    user = config(model__num_layers=24, model__megatron={"no_rope_freq": pattern, "deterministic_mode": True})
    assert shrink(user, [Trial(pp=4)]).config.model.megatron == {"no_rope_freq": kept, "deterministic_mode": True}


@pytest.mark.parametrize("path", sorted((ROOT / "configs" / "model").glob("*.yaml")), ids=lambda path: path.stem)
@pytest.mark.parametrize("layout", ["tp8pp4", "tp4cp2"])
def test_derived_layouts_are_legal_on_every_shipped_model(path: Path, layout: str) -> None:
    files = [path, ROOT / "configs" / "layout" / f"{layout}.yaml", ROOT / "configs" / "run" / "pretrain.yaml"]
    sizes = [
        "model.num_attention_heads=32",
        "model.hidden_size=4096",
        "model.num_layers=16",
        "model.ffn_hidden_size=8192",
    ]
    if "num_query_groups" in path.read_text():
        sizes.append("model.num_query_groups=8")
    if "global_attention:" in path.read_text():
        sizes.append("model.global_attention.num_query_groups=8")
    if (pattern := re.search("layer_pattern: (.*)", path.read_text())) is not None:
        sizes.append(f"model.layer_pattern={pattern[1][:16]}")
    user = load_config(files, sizes)
    trials = DerivedTrials(user, 8).derived()
    small = shrink(user, trials).config
    assert len({prepared(trial, small).name for trial in trials}) == len(trials) >= 8


def test_what_was_changed_is_said() -> None:
    changes = shrink(config(model__hidden_size=512), ONE).changes
    assert "model.hidden_size: 512 -> 32" in changes
    assert all(" -> " in line for line in changes)


def test_layers_that_know_no_float32_give_way() -> None:
    found = shrink(config(train__precision="bf16", model__backend="te"), ONE)
    assert {"train.precision: bf16 -> fp32", "model.backend: te -> auto"} <= set(found.changes)
    in_8_bits = shrink(config(train__precision="bf16", train__fp8="hybrid", train__fp8_recipe="tensorwise"), ONE)
    assert "train.fp8: hybrid -> None" in in_8_bits.changes
    assert shrink(config(train__precision="bf16", model__backend="torch"), ONE).config.model.backend == "torch"


@pytest.mark.parametrize("key", ["attention_dropout", "hidden_dropout"])
def test_dropout_is_refused_with_the_override_that_turns_it_off(key: str) -> None:
    with refuses(ConfigError, f"model.{key}=0"):
        shrink(config(**{f"model__{key}": 0.1}), ONE)


def test_experts_keep_their_choice_and_divide_over_every_layout() -> None:
    trials = [*ONE, Trial(dp=3, ep=3), Trial(tp=2, sp=True, etp=2)]
    model = shrink(expert_config(), trials).config.model
    assert model.experts is not None
    assert (model.experts.num_groups, model.experts.group_top_k, model.experts.top_k) == (4, 2, 4)
    assert model.experts.num_experts % 12 == 0
    assert model.experts.ffn_hidden_size < 64
    assert model.experts.shared_ffn_hidden_size % 2 == 0
    assert (model.experts.score, model.experts.bias_update_rate) == ("sigmoid", 0.01)
    assert [model.has_experts(layer) for layer in range(2)] == [False, True]
    assert model.mtp_depths == 1


@pytest.mark.parametrize(("top_k", "kept"), [(2, 2), (3, 1), (2, 1), (8, 1), (8, 4), (3, 2)])
def test_groups_of_a_score_of_their_own_keep_another_one_than_the_default(top_k: int, kept: int) -> None:
    experts = {"num_experts": 64, "top_k": top_k, "num_groups": 8, "group_top_k": kept, "group_score_top_k": 2}
    model = shrink(config(model__experts=experts | {"ffn_hidden_size": 32, "score": "sigmoid"}), ONE).config.model
    assert model.experts is not None
    small = model.experts
    assert small.num_scored == 2
    assert small.num_groups is not None
    assert small.group_top_k is not None
    assert (small.top_k == 2 * small.group_top_k) == (top_k == 2 * kept or (top_k == 2 and kept == 1))


def test_what_no_two_layouts_share_is_refused() -> None:
    experts = {"num_experts": 4, "top_k": 2, "ffn_hidden_size": 32}
    loss = {"router": {"global_balance_coefficient": 0.1}, "allow_layout_dependent": True}
    with refuses(ConfigError, "loss.router.global_balance_coefficient"):
        shrink(config(model__experts=experts, loss=loss), ONE)


def test_files_that_are_there_are_read_with_their_vocabulary(tmp_path: Path) -> None:
    sections = {"data__kind": "indexed", "data__train": [{"path": str(tmp_path / "corpus")}], "model__vocab_size": 5000}
    missing = shrink(config(**sections), ONE)
    assert (missing.reads_files, missing.config.data.kind) == (False, "mock")
    assert missing.config.model.vocab_size < 100
    (tmp_path / "corpus.idx").touch()
    there = shrink(config(**sections), ONE)
    assert (there.reads_files, there.config.data.kind, there.config.model.vocab_size) == (True, "indexed", 5000)
    large = shrink(config(**(sections | {"model__vocab_size": 128256})), ONE)
    assert large.config.model.vocab_size < 1000
    assert "model.vocab_size: 128256 -> 997 (token ids modulo 997)" in large.changes


@pytest.mark.parametrize(
    "trial", [Trial(tp=8, sp=True, cp=2), Trial(pp=4, vpp=2, dp=3), Trial(cp=8, dp=5, micro_batch_size=3)]
)
def test_sizes_divide_over_every_layout(trial: Trial) -> None:
    found = prepared(trial, shrink(config(), [Trial(micro_batch_size=None), trial]).config)
    assert found.layout.world_size == trial.world_size
    assert broken_rules(found.config, trial.world_size) == []


def test_logits_are_cut_in_the_small_run_where_the_users_are() -> None:
    cut = shrink(config(model__vocab_size=32_000, data__seq_length=8192), ONE)
    assert cut.config.loss.chunk_tokens == 20
    assert "loss.chunk_tokens: auto -> 20" in cut.changes
    for user in (config(), config(model__vocab_size=32_000, data__seq_length=8192, loss__chunk_tokens="whole")):
        assert shrink(user, ONE).config.loss.chunk_tokens == user.loss.chunk_tokens
