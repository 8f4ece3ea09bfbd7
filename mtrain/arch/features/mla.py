"""Multi-head latent attention."""

from collections.abc import Iterator
from typing import Any, final

from mtrain.arch.features.feature import (
    SMALL_HEAD_DIM,
    AdaptedMatrix,
    LayerPart,
    Parameters,
    SmallRun,
    norm_elements,
    required,
)
from mtrain.arch.layout import Layout
from mtrain.config.schema.model import ModelSection


@final
class MultiHeadLatentAttention(LayerPart):
    """Down-projections to the latents of queries and of keys and values, their norms, and the up-projections."""

    def is_in(self, model: ModelSection, layer: int) -> bool:
        return model.attention(layer) == "latent"

    def needs_certificate(self, model: ModelSection) -> str | None:
        return None if model.mla is None else "model.mla"

    def norms(self, model: ModelSection) -> Parameters:
        mla = required(model.mla)
        of_queries = 0 if mla.q_lora_rank is None else norm_elements(model, mla.q_lora_rank)
        return Parameters(replicated=norm_elements(model, mla.kv_lora_rank) + of_queries)

    def matrices(self, model: ModelSection) -> Parameters:
        down = _down(model)
        return Parameters(divided=self.matrix_elements(model) - down, replicated=down)

    def matrix_elements(self, model: ModelSection) -> int:
        mla, heads = required(model.mla), model.num_attention_heads
        up = heads * mla.query_head_dim * (model.hidden_size if mla.q_lora_rank is None else mla.q_lora_rank)
        up += mla.kv_lora_rank * heads * (mla.qk_nope_head_dim + mla.v_head_dim)
        return _down(model) + up + heads * mla.v_head_dim * model.hidden_size

    def axes(self, model: ModelSection) -> dict[str, int]:
        """Letters: q rank of queries, k rank of keys and values, m that rank with the rotary key, x dimensions of a
        query head, y of a key head without position and its value head, v of a value head."""
        mla = required(model.mla)
        return {
            "q": mla.q_lora_rank or 0,
            "k": mla.kv_lora_rank,
            "m": mla.kv_lora_rank + mla.qk_rope_head_dim,
            "x": mla.qk_nope_head_dim + mla.qk_rope_head_dim,
            "y": mla.qk_nope_head_dim + mla.v_head_dim,
            "v": mla.v_head_dim,
        }

    def adapted(self, model: ModelSection) -> Iterator[AdaptedMatrix]:
        """Yields down-projections, which every TP rank holds whole, and up-projections, which TP divides by heads."""
        mla, hidden, heads = required(model.mla), model.hidden_size, model.num_attention_heads
        queries, values = heads * mla.query_head_dim, heads * (mla.qk_nope_head_dim + mla.v_head_dim)
        if mla.q_lora_rank is None:
            yield AdaptedMatrix("self_attention.linear_q_proj", "q_proj", queries, hidden)
        else:
            down = mla.q_lora_rank, hidden
            yield AdaptedMatrix("self_attention.linear_q_down_proj", "q_a_proj", *down, is_replicated=True)
            yield AdaptedMatrix("self_attention.linear_q_up_proj", "q_b_proj", queries, mla.q_lora_rank)
        down = mla.kv_lora_rank + mla.qk_rope_head_dim, hidden
        yield AdaptedMatrix("self_attention.linear_kv_down_proj", "kv_a_proj", *down, is_replicated=True)
        yield AdaptedMatrix("self_attention.linear_kv_up_proj", "kv_b_proj", values, mla.kv_lora_rank)
        output = hidden, heads * mla.v_head_dim
        yield AdaptedMatrix("self_attention.linear_proj", "proj", *output, is_row_parallel=True)

    def segments(self, model: ModelSection, linear: str, num_rows: int) -> tuple[int, ...]:
        """Returns the rows of a head without and with position, the latent and the rotary key, or keys and values."""
        mla = required(model.mla)
        match linear:
            case "linear_q_proj" | "linear_q_up_proj":
                return mla.qk_nope_head_dim, mla.qk_rope_head_dim
            case "linear_kv_down_proj":
                return mla.kv_lora_rank, mla.qk_rope_head_dim
            case "linear_kv_up_proj":
                return mla.qk_nope_head_dim, mla.v_head_dim
        return ()

    def pair_products(self, model: ModelSection) -> int:
        return model.num_attention_heads * (required(model.mla).query_head_dim + required(model.mla).v_head_dim)

    def remembered(self, model: ModelSection, layout: Layout, length: int) -> tuple[int, int]:
        mla = required(model.mla)
        return length * (mla.kv_lora_rank + mla.qk_rope_head_dim), 0  # every rank caches whole latents

    def kept_elements(self, model: ModelSection, layout: Layout) -> int:
        """Counts the latents, whole on every TP rank, and queries, keys, values and output as for grouped-query
        attention."""
        mla = required(model.mla)
        latents = (mla.q_lora_rank or 0) + mla.kv_lora_rank + mla.qk_rope_head_dim
        return 2 * latents + 2 * model.num_attention_heads * (mla.query_head_dim + mla.v_head_dim) // layout.tp

    def shrunk(self, model: ModelSection, small: SmallRun) -> dict[str, Any]:
        """Makes ranks and heads small, all of different sizes."""
        if model.mla is None:
            return {}
        ranks = {
            "q_lora_rank": None if model.mla.q_lora_rank is None else 3 * SMALL_HEAD_DIM,
            "kv_lora_rank": 2 * SMALL_HEAD_DIM,
        }
        heads = {
            "qk_nope_head_dim": SMALL_HEAD_DIM,
            "qk_rope_head_dim": SMALL_HEAD_DIM // 2,
            "v_head_dim": SMALL_HEAD_DIM + 2,
        }
        epsilon = model.mla.norm_epsilon
        return {"mla": ranks | heads | {"norm_epsilon": None if epsilon is None else epsilon * small.epsilon_factor}}


def _down(model: ModelSection) -> int:
    """Counts the elements of the down-projections, which every TP rank holds whole."""
    mla = required(model.mla)
    return model.hidden_size * ((mla.q_lora_rank or 0) + mla.kv_lora_rank + mla.qk_rope_head_dim)
