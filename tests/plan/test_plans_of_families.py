"""Models with experts, latent attention, further norms and depths cost what the reference's list of parameters says."""

import math
from typing import Any

import pytest

from mtrain import arch
from mtrain.arch.layout import Layout
from mtrain.config.schema.model import ModelSection
from mtrain.verify.reference.model.shapes import EXPERT_BIAS, shapes_of
from tests.config.samples import config
from tests.parity.cases import case
from tests.parity.expert_models import BIASED, DEEPSEEK, MIXTRAL, QWEN
from tests.parity.families import (
    DEEPSEEK_ATTENTION,
    GATED,
    GEMMA,
    GPT_OSS,
    HYBRID,
    MAMBA,
    MINIMAX,
    NEMOTRON,
    OLMO2,
    OLMO3,
)

FAMILIES: dict[str, dict[str, Any]] = {
    "gemma": GEMMA,
    "olmo2": OLMO2,
    "olmo3_ahead": OLMO3 | {"model__mtp_depths": 1},
    "gated": GATED,
    "gpt_oss": GPT_OSS,
    "hybrid": HYBRID,
    "mamba": MAMBA | {"model__layer_pattern": "M*-MM"},
    "nemotron": NEMOTRON | {"model__layer_pattern": "ME*EM"},
    "minimax": MINIMAX,
    "mixtral": MIXTRAL,
    "qwen": QWEN,
    "biased": BIASED,
    "gemma_ahead": GEMMA | {"model__mtp_depths": 2},
    "deepseek": DEEPSEEK | DEEPSEEK_ATTENTION | {"model__mtp_depths": 2},
}
SEQ = 32


@pytest.fixture(params=FAMILIES)
def model(request: pytest.FixtureRequest) -> ModelSection:
    return case(num_layers=5).config(**FAMILIES[request.param]).model


def sizes(model: ModelSection) -> dict[str, tuple[int, ...]]:
    return {name: shape for name, shape in shapes_of(model).items() if not name.endswith(EXPERT_BIAS)}


def share_that_is_met(name: str, model: ModelSection) -> float:
    """Returns the share of the experts that a token is sent to; 1 for other parameters."""
    if model.experts is None or ".mlp.experts." not in name:
        return 1.0
    return model.experts.top_k / model.experts.num_experts


def test_all_parameters_are_counted(model: ModelSection) -> None:
    assert arch.num_parameters(model) == sum(map(math.prod, sizes(model).values()))


def test_active_parameters_leave_other_experts_and_depths_out(model: ModelSection) -> None:
    met = {name: shape for name, shape in sizes(model).items() if not name.startswith("mtp.")}
    expected = sum(math.prod(shape) * share_that_is_met(name, model) for name, shape in met.items())
    assert arch.num_active_parameters(model) == pytest.approx(expected, rel=1e-12)


def test_flops_are_those_of_the_matrices_that_a_token_meets(model: ModelSection) -> None:
    tables = ("embedding.word_embeddings.weight", "output_layer.weight")
    weights = sum(
        math.prod(shape) * share_that_is_met(name, model)
        for name, shape in sizes(model).items()
        if len(shape) == 2 and name not in tables
    )
    weights += (1 + model.mtp_depths) * model.vocab_size * model.hidden_size
    keys, values = model.head_size, model.head_size
    if model.mla is not None:
        keys, values = model.mla.qk_nope_head_dim + model.mla.qk_rope_head_dim, model.mla.v_head_dim
    forward = 2 * weights + 2 * model.num_attention_heads * (keys + values) * num_pairs(model) / SEQ
    forward += 2 * num_delta_nets(model) * products_with_states(model)
    assert arch.flops_per_token(model, SEQ) == pytest.approx(3 * forward, rel=1e-12)


def num_delta_nets(model: ModelSection) -> int:
    """Counts the layers that have a delta net or Mamba-2."""
    return sum(name.endswith(".A_log") for name in sizes(model))


def products_with_states(model: ModelSection) -> int:
    """Counts the multiply-adds of a token: its kernels, and its state read at the key, corrected, read at the query."""
    net, mamba = model.delta_net, model.mamba
    if mamba is not None:
        # the state is decayed, written to and read
        inputs = mamba.num_heads * mamba.head_dim
        channels = inputs + 2 * mamba.num_groups * mamba.state_dim
        return channels * mamba.conv_kernel + 3 * inputs * mamba.state_dim
    if net is None:
        return 0
    channels = 2 * net.num_key_heads * net.key_head_dim + net.num_value_heads * net.value_head_dim
    return channels * net.conv_kernel + 3 * net.num_value_heads * net.key_head_dim * net.value_head_dim


def num_pairs(model: ModelSection) -> int:
    """Counts pairs of tokens that see each other in a row, over all layers, depths among them."""
    count = 0
    layers = [*range(1, model.num_layers + 1), *[model.num_layers] * model.mtp_depths]  # depths are like the last layer
    for layer in layers:
        if model.delta_net is not None and layer % model.delta_net.full_attention_every:
            continue
        if model.layer_pattern is not None and model.layer_pattern[layer - 1] != "*":
            continue
        every = model.global_attention_every
        is_global = model.sliding_window is None or (every is not None and layer % every == 0)
        width = SEQ if is_global or model.sliding_window is None else model.sliding_window
        count += sum(min(position + 1, width) for position in range(SEQ))
    return count


def test_moments_of_experts_are_divided_over_their_replicas() -> None:
    experts = {"num_experts": 8, "top_k": 2, "ffn_hidden_size": 48}
    given = config(model__experts=experts, layout={"tp": 2, "sp": True, "ep": 4}, train__precision="bf16")
    layout = Layout.from_config(given, 16)
    held = arch.parameters_on_rank(given.model, layout, 0)
    dense = arch.parameters_on_rank(given.model.model_copy(update={"experts": None}), Layout(tp=2), 0)
    of_experts = 8 * 3 * 64 * 48 * 8
    assert held.experts == of_experts // 4
    assert held.dense == dense.total - 8 * 3 * 64 * 128 // 2 + 8 * 8 * 64
    memory = arch.memory_per_rank(given, layout, 0)
    assert memory.optimizer_bytes == 12 * held.dense // 8 + 12 * held.experts // 4
    assert memory.weights_bytes == 2 * held.total


def activations(**model: Any) -> int:
    given = config(**{f"model__{name}": value for name, value in model.items()})
    return arch.memory_per_rank(given, Layout.from_config(given, 1), 0).activations_bytes


def test_activations_grow_with_what_backward_keeps() -> None:
    experts = {"num_experts": 8, "top_k": 2, "ffn_hidden_size": 128}
    plain = activations()
    assert plain < activations(attention_sinks=True)
    assert plain == activations(post_norm=True) < activations(sandwich_norm=True)
    assert plain < activations(qk_norm=True, qk_norm_width="full")
    assert plain < activations(experts=experts) < activations(experts=experts | {"top_k": 4})
    assert plain < activations(mtp_depths=1) < activations(mtp_depths=2)
