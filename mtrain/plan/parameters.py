"""How many parameters a model has, a token meets, and a rank holds.

Those that are replicated over ranks for one reason or another count once in a model, and once on each rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from mtrain.config.schema.experts import ExpertsSection
from mtrain.config.schema.mla import LatentAttentionSection
from mtrain.config.schema.model import ModelSection
from mtrain.plan.layout import Layout


@dataclass(frozen=True)
class Parameters:
    """Numbers of parameters, by how ranks hold them."""

    divided: int = 0
    """Over the ranks of a TP group."""
    replicated: int = 0
    """Whole on every rank."""
    experts: int = 0
    """Over EP, and each expert over ETP."""
    whole_experts: int = 0
    """Over EP, but whole on every rank of ETP."""

    def __add__(self, other: Parameters) -> Parameters:
        return Parameters(
            self.divided + other.divided,
            self.replicated + other.replicated,
            self.experts + other.experts,
            self.whole_experts + other.whole_experts,
        )

    @property
    def total(self) -> int:
        """All kinds."""
        return self.divided + self.replicated + self.experts + self.whole_experts

    def on_rank(self, layout: Layout) -> RankParameters:
        """What one rank holds of them."""
        experts = self.experts // (layout.ep * layout.etp) + self.whole_experts // layout.ep
        return RankParameters(dense=self.divided // layout.tp + self.replicated, experts=experts)


@dataclass(frozen=True)
class RankParameters:
    """Numbers of parameters on one rank."""

    dense: int
    """Copied over DP x CP."""
    experts: int
    """Copied over the replicas of an expert."""

    @property
    def total(self) -> int:
        """Both kinds."""
        return self.dense + self.experts


def padded_vocab_size(model: ModelSection, tp: int) -> int:
    """Rows of the embedding table: vocab_size rounded up to a multiple of vocab_multiple x tp."""
    multiple = model.vocab_multiple * tp
    return -(-model.vocab_size // multiple) * multiple


def num_parameters(model: ModelSection) -> int:
    """Parameters of the whole model, without padding of the vocabulary; tied embeddings count once."""
    return _with_vocabulary(model, model.vocab_size)


def num_padded_parameters(model: ModelSection, tp: int) -> int:
    """Parameters of the whole model with the vocabulary padded for `tp`; tied embeddings count once."""
    return _with_vocabulary(model, padded_vocab_size(model, tp))


def num_active_parameters(model: ModelSection) -> int:
    """Parameters that one token meets on its way to the main logits: without padding, other experts and MTP.

    Both tables count whole. Some model cards leave the embedding table out.
    """
    if model.experts is None:
        return num_parameters(model.model_copy(update={"mtp_depths": 0}))
    met = model.experts.model_copy(update={"num_experts": model.experts.top_k})
    unmet_rows = _router(model, model.experts).total - _router(model, met).total  # every token asks every row
    num_routers = sum(model.has_experts(layer) for layer in range(model.num_layers))
    return num_parameters(model.model_copy(update={"experts": met, "mtp_depths": 0})) + num_routers * unmet_rows


def layer_parameters(model: ModelSection, layer: int) -> Parameters:
    """Parameters of layer `layer`, counted from 0: attention, feed-forward part, and the norms of both."""
    num_norms = 4 if model.sandwich_norm else 2
    attention = grouped_query_attention(model) if model.mla is None else latent_attention(model, model.mla)
    experts = model.experts if model.has_experts(layer) else None
    feed_forward = _dense(model, model.ffn_hidden_size) if experts is None else _mixture(model, experts)
    return attention + feed_forward + Parameters(replicated=num_norms * _norm(model, model.hidden_size))


def grouped_query_attention(model: ModelSection) -> Parameters:
    """Projections, their biases, the norms of query and key heads, and sinks."""
    query, key_value = model.num_attention_heads * model.head_size, model.query_groups * model.head_size
    qkv = query + 2 * key_value
    divided, replicated = model.hidden_size * (qkv + query), 0
    if model.qkv_bias or model.linear_bias:
        divided += qkv
    if model.linear_bias:
        replicated += model.hidden_size  # a row-parallel output adds its bias after the sum over TP
    if model.qk_norm:
        replicated += 2 * _norm(model, model.head_size)
    if model.attention_sinks:
        divided += model.num_attention_heads
    return Parameters(divided, replicated)


def latent_attention(model: ModelSection, mla: LatentAttentionSection) -> Parameters:
    """Projections down to the ranks of queries and of keys and values, their norms, and the projections up."""
    query = model.num_attention_heads * (mla.qk_nope_head_dim + mla.qk_rope_head_dim)
    key_value = model.num_attention_heads * (mla.qk_nope_head_dim + mla.v_head_dim)
    divided = mla.kv_lora_rank * key_value + model.num_attention_heads * mla.v_head_dim * model.hidden_size
    down, norms = mla.kv_lora_rank + mla.qk_rope_head_dim, _norm(model, mla.kv_lora_rank)
    if mla.q_lora_rank is None:
        divided += model.hidden_size * query
    else:
        divided += mla.q_lora_rank * query
        down += mla.q_lora_rank
        norms += _norm(model, mla.q_lora_rank)
    return Parameters(divided, replicated=model.hidden_size * down + norms)


def multi_token_layer(model: ModelSection) -> Parameters:
    """One depth: norms of both inputs and of the output, the inputs' projection, and a layer like the last one."""
    projection = Parameters(divided=2 * model.hidden_size**2, replicated=3 * _norm(model, model.hidden_size))
    return projection + layer_parameters(model, model.num_layers - 1)


def layer_matrices(model: ModelSection, layer: int) -> Parameters:
    """Of `layer_parameters`, the matrices of the projections: without biases, norms, sinks and the router."""
    plain = {"linear_bias": False, "qkv_bias": False, "qk_norm": False, "attention_sinks": False}
    model = model.model_copy(update=plain)
    rest = (4 if model.sandwich_norm else 2) * _norm(model, model.hidden_size)
    if model.mla is not None:
        rest += _norm(model, model.mla.kv_lora_rank)
        rest += 0 if model.mla.q_lora_rank is None else _norm(model, model.mla.q_lora_rank)
    if model.experts is not None and model.has_experts(layer):
        rest += _router(model, model.experts).total
    return layer_parameters(model, layer) + Parameters(replicated=-rest)


def _dense(model: ModelSection, ffn: int) -> Parameters:
    fc1 = ffn * (2 if model.is_gated else 1)
    biases = Parameters(divided=fc1, replicated=model.hidden_size) if model.linear_bias else Parameters()
    return Parameters(divided=model.hidden_size * (fc1 + ffn)) + biases


def _mixture(model: ModelSection, experts: ExpertsSection) -> Parameters:
    """Router, experts and shared experts."""
    one = _dense(model, experts.ffn_hidden_size)
    all_experts = Parameters(
        experts=experts.num_experts * one.divided, whole_experts=experts.num_experts * one.replicated
    )
    shared = _dense(model, experts.shared_ffn_hidden_size) if experts.shared_ffn_hidden_size else Parameters()
    return _router(model, experts) + all_experts + shared


def _router(model: ModelSection, experts: ExpertsSection) -> Parameters:
    return Parameters(replicated=experts.num_experts * (model.hidden_size + experts.router_bias))


def _norm(model: ModelSection, size: int) -> int:
    return size if model.norm == "rmsnorm" else 2 * size


def _with_vocabulary(model: ModelSection, vocab_size: int) -> int:
    tables = 1 if model.tied_embeddings else 2
    layers = sum(layer_parameters(model, layer).total for layer in range(model.num_layers))
    ahead = model.mtp_depths * multi_token_layer(model).total if model.mtp_depths else 0
    return tables * vocab_size * model.hidden_size + layers + ahead + _norm(model, model.hidden_size)


def parameters_on_rank(model: ModelSection, layout: Layout, pp_rank: int) -> RankParameters:
    """What a rank of pipeline rank `pp_rank` holds, vocabulary padded.

    With a pipeline the first and the last stage hold a copy each of a table that both use: of a tied one, and of the
    embeddings where tokens are predicted ahead.
    """
    held = sum((layer_parameters(model, layer) for layer in _own_layers(model, layout, pp_rank)), start=Parameters())
    tables = {"embedding"} if pp_rank == 0 else set()
    if pp_rank == layout.pp - 1:
        held += Parameters(replicated=_norm(model, model.hidden_size))
        held = sum([multi_token_layer(model)] * model.mtp_depths, start=held)
        tables |= {"embedding"} if model.mtp_depths else set()
        tables |= {"embedding" if model.tied_embeddings else "output"}
    rows = padded_vocab_size(model, layout.tp)
    return (held + Parameters(divided=len(tables) * rows * model.hidden_size)).on_rank(layout)


def matrices_on_rank(model: ModelSection, layout: Layout, pp_rank: int) -> RankParameters:
    """Of `parameters_on_rank`, the matrices of the layers: without tables, routers, norms, biases and sinks."""
    held = sum((layer_matrices(model, layer) for layer in _own_layers(model, layout, pp_rank)), start=Parameters())
    if pp_rank == layout.pp - 1:
        projection = Parameters(divided=2 * model.hidden_size**2)
        held = sum([projection + layer_matrices(model, model.num_layers - 1)] * model.mtp_depths, start=held)
    return held.on_rank(layout)


def _own_layers(model: ModelSection, layout: Layout, pp_rank: int) -> Iterator[int]:
    return (layer for chunk in range(layout.vpp) for layer in layout.layers(model.num_layers, pp_rank, chunk))
