"""Which matrices have adapters, and how large these are."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from mtrain.config import Config
from mtrain.config.schema.adapter import AdapterSection
from mtrain.config.schema.mla import LatentAttentionSection
from mtrain.config.schema.model import ModelSection
from mtrain.plan.counts import Parameters, RankParameters
from mtrain.plan.layout import Layout
from mtrain.plan.parameters import head_elements, padded_vocab_size

LATENT_LINEARS = {
    "linear_q_proj": "q_proj",
    "linear_q_down_proj": "q_a_proj",
    "linear_q_up_proj": "q_b_proj",
    "linear_kv_down_proj": "kv_a_proj",
    "linear_kv_up_proj": "kv_b_proj",
}
"""Module of latent attention -> name of the target."""
EMBEDDING, OUTPUT = "embedding.word_embeddings", "output_layer"
HEAD = f"{OUTPUT}.weight"
"""Of a model that judges sequences."""


@dataclass(frozen=True)
class AdaptedMatrix:
    """A matrix that has a pair of low rank beside it: a projection, or a part of a fused one."""

    linear: str
    """The module that holds it, inside of a layer; tables outside of layers."""
    part: str
    """Name of the target."""
    rows: int
    """Outputs; of the embedding hidden numbers, and of `output` tokens of the vocabulary."""
    columns: int
    """Inputs; of the embedding tokens of the vocabulary."""
    is_row_parallel: bool = False
    """Whether its columns are divided over TP, and not its rows."""
    is_replicated: bool = False
    """Whether every rank of TP holds all of it."""
    num_experts: int = 0
    """So many matrices of this size in one layer; 0: one, which is no expert's."""

    def parameters(self, adapter: AdapterSection) -> Parameters:
        """Of the pair, and of the magnitudes."""
        of_a, of_b = adapter.rank * self.columns, adapter.rank * self.rows
        if self.num_experts:
            return Parameters(experts=self.num_experts * (of_a + of_b))
        magnitudes = self.rows if adapter.has_magnitudes else 0
        if self.is_replicated:
            return Parameters(replicated=of_a + of_b + magnitudes)
        if self.is_row_parallel:
            return Parameters(divided=of_a, replicated=of_b + magnitudes)
        return Parameters(divided=of_b + magnitudes, replicated=of_a)

    def multiplied(self, adapter: AdapterSection, top_k: int) -> int:
        """Elements of the pair that one token is multiplied by; `top_k` experts see it."""
        copies = top_k if self.num_experts else 1
        looked_up = adapter.rank * self.columns if self.linear == EMBEDDING else 0
        return copies * adapter.rank * (self.rows + self.columns) - looked_up


def in_layer(model: ModelSection, adapter: AdapterSection, layer: int) -> list[AdaptedMatrix]:
    """The adapted matrices of layer `layer`, counted from 0, in the order of the forward pass."""
    return [each for each in (*_of_attention(model), *_of_feed_forward(model, layer)) if each.part in adapter.parts]


def tables(model: ModelSection, adapter: AdapterSection) -> list[AdaptedMatrix]:
    """The adapted matrices outside of layers."""
    both = (
        AdaptedMatrix(EMBEDDING, "embedding", model.hidden_size, model.vocab_size, is_row_parallel=True),
        AdaptedMatrix(OUTPUT, "output", model.vocab_size, model.hidden_size),
    )
    return [each for each in both if each.part in adapter.parts]


def all_matrices(model: ModelSection, adapter: AdapterSection) -> list[AdaptedMatrix]:
    """Of the whole model, each as often as it is there."""
    layers = (each for layer in range(model.num_layers) for each in in_layer(model, adapter, layer))
    return [*layers, *tables(model, adapter)]


def learned_whole(model: ModelSection) -> frozenset[str]:
    """Global names of tensors that learn beside adapters as they are: a head, which begins at random."""
    return frozenset() if model.num_labels is None else frozenset((HEAD,))


def num_adapter_parameters(model: ModelSection, adapter: AdapterSection) -> int:
    """That learn in the whole model, without padding of the vocabulary; with a head that learns whole."""
    return sum(each.parameters(adapter).total for each in all_matrices(model, adapter)) + head_elements(model)


def adapter_parameters_on_rank(
    model: ModelSection, adapter: AdapterSection, layout: Layout, pp_rank: int
) -> RankParameters:
    """What a rank of pipeline rank `pp_rank` holds that learns, vocabulary padded; with a head that learns whole."""
    layers = (layer for chunk in range(layout.vpp) for layer in layout.layers(model.num_layers, pp_rank, chunk))
    head = Parameters(replicated=head_elements(model) if pp_rank == layout.pp - 1 else 0)
    held = [each for layer in layers for each in in_layer(model, adapter, layer)]
    ends = {EMBEDDING: 0, OUTPUT: layout.pp - 1}
    padded = model.model_copy(update={"vocab_size": padded_vocab_size(model, layout.tp)})
    held += [each for each in tables(padded, adapter) if ends[each.linear] == pp_rank]
    return sum((each.parameters(adapter) for each in held), start=head).on_rank(layout)


def holds_narrow(config: Config) -> bool:
    """Whether matrices and tables of the frozen model have less precision than the run."""
    return config.adapter is not None and config.adapter.base_dtype is not None and config.train.precision == "fp32"


def is_matrix(name: str, num_axes: int) -> bool:
    """Whether a tensor of the model is the matrix of a projection, or a table.

    Args:
        name: Global name.
        num_axes: Of the tensor, without axes that number layers and experts.
    """
    return num_axes > 1 and ".router." not in name


def fused_parts(model: ModelSection, linear: str) -> tuple[str, ...]:
    """Parts of a linear module of a layer, in the order of its outputs inside of each query group."""
    if linear.endswith("linear_qkv"):
        return ("q_proj", "k_proj", "v_proj")
    name = linear.rpartition(".")[2]
    if name in LATENT_LINEARS:
        return (LATENT_LINEARS[name],)
    if linear.endswith("linear_fc1"):
        return ("gate_proj", "up_proj") if model.is_gated else ("up_proj",)
    return ("proj",) if linear.endswith("linear_proj") else ("fc2",)


def _of_attention(model: ModelSection) -> Iterator[AdaptedMatrix]:
    hidden, heads, size = model.hidden_size, model.num_attention_heads, model.head_size
    if model.mla is None:
        sizes = {"q_proj": heads * size, "k_proj": model.query_groups * size, "v_proj": model.query_groups * size}
        for part, rows in sizes.items():
            yield AdaptedMatrix("self_attention.linear_qkv", part, rows, hidden)
    else:
        yield from _of_latents(model, model.mla)
    values = size if model.mla is None else model.mla.v_head_dim
    yield AdaptedMatrix("self_attention.linear_proj", "proj", hidden, heads * values, is_row_parallel=True)


def _of_latents(model: ModelSection, mla: LatentAttentionSection) -> Iterator[AdaptedMatrix]:
    """Down to latents, whole on every rank of TP, and up from them by heads."""
    hidden, heads = model.hidden_size, model.num_attention_heads
    queries, values = heads * mla.query_head_dim, heads * (mla.qk_nope_head_dim + mla.v_head_dim)
    sizes = {
        "linear_kv_down_proj": (mla.kv_lora_rank + mla.qk_rope_head_dim, hidden),
        "linear_kv_up_proj": (values, mla.kv_lora_rank),
    }
    if mla.q_lora_rank is None:
        sizes = {"linear_q_proj": (queries, hidden), **sizes}
    else:
        low = {"linear_q_down_proj": (mla.q_lora_rank, hidden), "linear_q_up_proj": (queries, mla.q_lora_rank)}
        sizes = {**low, **sizes}
    for name, (rows, columns) in sizes.items():
        part, is_down = LATENT_LINEARS[name], "_down_" in name
        yield AdaptedMatrix(f"self_attention.{name}", part, rows, columns, is_replicated=is_down)


def _of_feed_forward(model: ModelSection, layer: int) -> Iterator[AdaptedMatrix]:
    if not model.has_experts(layer):
        yield from _network(model, "mlp", model.ffn_hidden_size)
        return
    experts = model.experts
    assert experts is not None
    inner, count = experts.ffn_hidden_size, experts.num_experts
    outer = 2 * inner if model.is_gated else inner  # gate and up share their A, as PEFT's form for experts has it
    yield AdaptedMatrix("mlp.experts.linear_fc1", "experts", outer, model.hidden_size, num_experts=count)
    yield AdaptedMatrix("mlp.experts.linear_fc2", "experts", model.hidden_size, inner, num_experts=count)
    if experts.shared_ffn_hidden_size:
        yield from _network(model, "mlp.shared_experts", experts.shared_ffn_hidden_size)


def _network(model: ModelSection, module: str, width: int) -> Iterator[AdaptedMatrix]:
    for part in fused_parts(model, f"{module}.linear_fc1"):
        yield AdaptedMatrix(f"{module}.linear_fc1", part, width, model.hidden_size)
    yield AdaptedMatrix(f"{module}.linear_fc2", "fc2", model.hidden_size, width, is_row_parallel=True)
