"""Parameters, arithmetic and memory of a run."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtrain import arch
from mtrain.arch.layout import Layout
from mtrain.config.schema.model import ModelSection
from tests.config.samples import config
from tests.config.test_vision import VISION

MODEL = config().model


@given(st.integers(1, 40), st.none() | st.integers(1, 50))
def test_attended_pairs_are_counted_one_by_one(seq_length: int, window: int | None) -> None:
    pairs = [(q, k) for q in range(seq_length) for k in range(q + 1) if window is None or q - k < window]
    assert arch.num_attended_pairs(seq_length, window) == len(pairs)


def matrices(model: ModelSection) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of every parameter of one layer, written out."""
    hidden, ffn, dim = model.hidden_size, model.ffn_hidden_size, model.head_size
    gates = 2 if model.activation == "swiglu" else 1
    shapes: dict[str, tuple[int, ...]] = {
        "query": (model.num_attention_heads * dim, hidden),
        "key": (model.query_groups * dim, hidden),
        "value": (model.query_groups * dim, hidden),
        "output": (hidden, model.num_attention_heads * dim),
        "fc1": (gates * ffn, hidden),
        "fc2": (hidden, ffn),
        "norm1": (hidden,),
        "norm2": (hidden,),
    }
    biased = ["query", "key", "value"] if model.qkv_bias or model.linear_bias else []
    biased += ["output", "fc1", "fc2"] if model.linear_bias else []
    shapes |= {f"{name}.bias": shapes[name][:1] for name in biased}
    if model.qk_norm:
        shapes |= {"query_norm": (dim,), "key_norm": (dim,)}
    if model.norm == "layernorm":
        shapes |= {f"{name}.bias": shape for name, shape in shapes.items() if "norm" in name}
    return shapes


def size(shape: tuple[int, ...]) -> int:
    return shape[0] * (shape[1] if len(shape) > 1 else 1)


@given(
    st.builds(
        lambda **knobs: MODEL.model_copy(update=knobs),
        head_dim=st.sampled_from([None, 6, 16]),
        num_query_groups=st.sampled_from([None, 2, 4]),
        activation=st.sampled_from(["swiglu", "gelu"]),
        norm=st.sampled_from(["rmsnorm", "layernorm"]),
        qkv_bias=st.booleans(),
        linear_bias=st.booleans(),
        qk_norm=st.booleans(),
        tied_embeddings=st.booleans(),
    )
)
def test_parameters_are_those_of_the_written_out_shapes(model: ModelSection) -> None:
    layer = sum(size(shape) for shape in matrices(model).values())
    norm = model.hidden_size * (2 if model.norm == "layernorm" else 1)
    tables = (1 if model.tied_embeddings else 2) * model.vocab_size * model.hidden_size
    assert arch.layer_parameters(model, 0).total == layer
    assert arch.num_parameters(model) == model.num_layers * layer + norm + tables


def test_padding_of_the_vocabulary_is_counted_apart() -> None:
    assert [arch.padded_vocab_size(MODEL, tp) for tp in (1, 2, 4)] == [1024, 1024, 1024]
    assert arch.padded_vocab_size(MODEL, 16) == 2048
    padding = 2 * 24 * MODEL.hidden_size
    assert arch.num_padded_parameters(MODEL, 2) == arch.num_parameters(MODEL) + padding


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    "layout", [Layout(), Layout(pp=4), Layout(pp=2, vpp=2), Layout(pp=2, stage_layers=(3, 5))], ids=str
)
def test_ranks_without_tp_hold_the_model_once(layout: Layout, tied: bool) -> None:
    model = MODEL.model_copy(update={"tied_embeddings": tied})
    held = sum(arch.parameters_on_rank(model, layout, pp_rank).total for pp_rank in range(layout.pp))
    copied = arch.padded_vocab_size(model, 1) * model.hidden_size if tied and layout.pp > 1 else 0
    assert held == arch.num_padded_parameters(model, 1) + copied


def test_ranks_of_a_tp_group_repeat_norms_and_row_parallel_biases() -> None:
    model = MODEL.model_copy(update={"linear_bias": True, "qk_norm": True})
    held = 2 * arch.parameters_on_rank(model, Layout(tp=2), 0).total
    per_layer = 4 * model.hidden_size + 2 * model.head_size
    assert held == arch.num_padded_parameters(model, 2) + model.num_layers * per_layer + model.hidden_size


def test_flops_are_those_of_every_multiply_add() -> None:
    seq_length = 10
    model = MODEL.model_copy(update={"sliding_window": 4, "global_attention_every": 3})  # layers 3 and 6 of 8 see all
    weights = sum(size(shape) for shape in matrices(model).values() if len(shape) == 2)
    causal, windowed = 55, 34
    pairs = 2 * causal + 6 * windowed
    attention = 2 * 2 * model.num_attention_heads * model.head_size * pairs
    forward = seq_length * (2 * 8 * weights + 2 * model.vocab_size * model.hidden_size) + attention
    assert arch.flops_per_token(model, seq_length) == pytest.approx(3 * forward / seq_length, rel=1e-15)


def test_a_window_over_the_whole_sequence_changes_nothing() -> None:
    windowed = MODEL.model_copy(update={"sliding_window": 64})
    assert arch.flops_per_token(windowed, 64) == arch.flops_per_token(MODEL, 64)


def test_mfu_is_a_share_of_the_peak() -> None:
    assert arch.mfu(flops=5e12, seconds=1.0, peak_flops=1e13) == 0.5


@pytest.mark.parametrize(
    ("precision", "distributed", "weights", "optimizer"),
    [("fp32", False, 4, 8), ("fp32", True, 4, 2), ("bf16", False, 2, 12), ("fp16", True, 2, 3)],
)
def test_memory_follows_precision_and_distribution(
    precision: str, distributed: bool, weights: int, optimizer: int
) -> None:
    given = config(
        train={"global_batch_size": 16, "num_steps": 1, "precision": precision, "distributed_optimizer": distributed},
        layout__cp=2,
    )
    layout = Layout.from_config(given, 4)
    num = arch.parameters_on_rank(given.model, layout, 0).total
    found = arch.memory_per_rank(given, layout, 0)
    assert (found.weights_bytes, found.gradients_bytes, found.optimizer_bytes) == (
        weights * num,
        4 * num,
        optimizer * num,
    )
    largest = max(found.activations_bytes, found.update_bytes)
    assert found.total_bytes == (weights + 4 + optimizer) * num + largest


@pytest.mark.parametrize(("precision", "kept"), [("fp32", 8), ("bf16", 12)])
def test_muon_keeps_one_number_less_for_each_element_of_a_matrix(precision: str, kept: int) -> None:
    train = {"global_batch_size": 16, "num_steps": 1, "precision": precision}
    given = config(train=train, optimizer__kind="muon", layout__cp=2)
    layout, model = Layout.from_config(given, 4), given.model
    matrices = model.num_layers * (3 * model.hidden_size**2 + 3 * model.hidden_size * model.ffn_hidden_size)
    assert arch.matrices_on_rank(model, layout, 0).total == matrices
    num = arch.parameters_on_rank(model, layout, 0).total
    assert arch.memory_per_rank(given, layout, 0).optimizer_bytes == (kept * num - 4 * matrices) // 4


def activations(world_size: int, pp_rank: int = 0, recompute: str = "none", **layout: object) -> int:
    given = config(layout=layout, train={"global_batch_size": 16, "num_steps": 1, "recompute": recompute})
    return arch.memory_per_rank(given, Layout.from_config(given, world_size), pp_rank).activations_bytes


def test_activations_shrink_where_the_work_is_divided() -> None:
    assert activations(2, cp=2) < activations(1)
    assert activations(2, tp=2, sp=True) < activations(2, tp=2) < activations(1)
    assert activations(1, recompute="full") < activations(1)


def test_early_stages_keep_more_microbatches() -> None:
    kept = [activations(4, pp_rank, pp=4) for pp_rank in range(3)]
    assert kept == sorted(kept, reverse=True)
    assert kept[0] - kept[1] == kept[1] - kept[2] > 0, "a microbatch each"


def test_peaks_of_known_gpus_only() -> None:
    assert arch.peak_flops("NVIDIA H200", "bf16") == 989e12
    assert arch.peak_flops("NVIDIA H200", "fp32") is None
    assert arch.peak_flops("Some other card", "bf16") is None


def test_chunks_of_logits_take_the_place_of_whole_ones() -> None:
    """Chunks in fp32 take one number per logit, and the gradient of all tokens' hidden states; without fused weight
    gradients that of the table, too."""

    def of(chunk_tokens: int | str, fuses: bool = True) -> int:
        given = config(
            model__megatron={"gradient_accumulation_fusion": fuses},
            model__vocab_size=50_000,
            model__vocab_multiple=1,
            data__seq_length=1024,
            loss__chunk_tokens=chunk_tokens,
            train={"global_batch_size": 16, "num_steps": 1, "precision": "fp32"},
        )
        return arch.memory_per_rank(given, Layout(), 0).activations_bytes

    hidden = config().model.hidden_size
    whole, cut = 1024 * 50_000 * 8, 64 * 50_000 * 4 + 1024 * hidden * 4
    assert of("whole") - of(64) == whole - cut
    assert of(64, fuses=False) - of(64) == 50_000 * hidden * 4
    assert of("auto") == of("whole"), "1024 tokens are one chunk"


def full_rows(model: ModelSection, seq: int) -> arch.Work:
    """Returns the work of one row of text, every token of which is learned."""
    pairs, window = (arch.num_attended_pairs(seq, each) for each in (None, model.sliding_window))
    return arch.Work(seq, pairs, window, (1 + model.mtp_depths) * seq)


def test_the_work_of_a_full_row_is_that_of_its_tokens() -> None:
    windowed = {"model__sliding_window": 7, "model__global_attention_every": 3}
    for each in (config(), config(**windowed), config(model__mtp_depths=2)):
        wanted = 64 * arch.flops_per_token(each.model, 64)
        assert arch.flops_of_step(each.model, full_rows(each.model, 64)) == pytest.approx(wanted, rel=1e-12)


def test_a_pass_that_scores_is_a_third_of_a_step() -> None:
    """A frozen matrix costs two thirds of a step, so there a pass is half of one."""
    model = config().model
    whole = full_rows(model, 64)
    step = arch.flops_of_step(model, whole)
    assert arch.flops_of_step(model, whole, None, True) == pytest.approx(step * 4 / 3, rel=1e-12)
    adapted = config(adapter={"kind": "lora", "rank": 4, "targets": ["proj"]}).adapter
    attention = whole.pairs * 2 * model.hidden_size * model.num_layers * 6
    pair = 64 * model.num_layers * 6 * 4 * (64 + 64)
    more = arch.flops_of_step(model, whole, adapted, True) - arch.flops_of_step(model, whole, adapted)
    assert more == pytest.approx((step - attention) / 3 + attention / 3 + pair / 3, rel=1e-12)


def test_documents_masks_and_frozen_matrices_cost_less() -> None:
    model = config().model
    whole = full_rows(model, 64)
    two = dataclasses.replace(whole, pairs=2 * arch.num_attended_pairs(32, None))
    lost = (whole.pairs - two.pairs) * 2 * model.hidden_size * model.num_layers * 6
    assert arch.flops_of_step(model, whole) - arch.flops_of_step(model, two) == lost
    masked = dataclasses.replace(whole, outputs=14)
    assert arch.flops_of_step(model, whole) - arch.flops_of_step(model, masked) == 50 * 6 * 64 * 1000
    adapted = config(adapter={"kind": "lora", "rank": 4, "targets": ["proj"]})
    assert adapted.adapter is not None
    attention = whole.pairs * 2 * model.hidden_size * model.num_layers * 6
    base, pair = arch.flops_of_step(model, whole) - attention, 64 * model.num_layers * 6 * 4 * (64 + 64)
    assert arch.flops_of_step(model, whole, adapted.adapter) == pytest.approx(
        base * 2 / 3 + attention + pair, rel=1e-12
    )
    alone = config(model__vision=VISION | {"freeze_projector": False, "freeze_language_model": True}).model
    assert arch.flops_of_step(alone, whole) == pytest.approx(base * 2 / 3 + attention, rel=1e-12)
