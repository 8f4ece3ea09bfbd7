"""`model.*`: the architecture. Every knob here is read by our own code; any other field of Megatron-Core's
TransformerConfig passes through `model.megatron`."""

from typing import Any, Literal

from pydantic import Field

from mtrain.config.section import Section


class RopeSection(Section):
    """Rotary position embedding; scaling as Hugging Face transformers defines it."""

    base: float = Field(10000.0, gt=0)
    scaling: Literal["none", "linear", "llama3", "yarn"] = "none"
    factor: float = Field(1.0, ge=1)
    low_freq_factor: float = Field(1.0, gt=0)
    """llama3 only."""
    high_freq_factor: float = Field(4.0, gt=0)
    """llama3 only."""
    original_max_positions: int = Field(8192, gt=0)
    """llama3 and yarn: the context length of the unscaled model, in tokens."""
    beta_fast: float = Field(32.0, gt=0)
    """yarn only."""
    beta_slow: float = Field(1.0, gt=0)
    """yarn only."""
    attention_factor: float | None = Field(None, gt=0)
    """yarn only: multiplies cos and sin; by default 0.1 ln(factor) + 1."""
    truncate: bool = True
    """yarn only: round the correction range to whole dimensions."""


class ModelSection(Section):
    """A dense decoder-only transformer."""

    num_layers: int = Field(gt=0)
    hidden_size: int = Field(gt=0)
    ffn_hidden_size: int = Field(gt=0)
    num_attention_heads: int = Field(gt=0)
    num_query_groups: int | None = Field(None, gt=0)
    """Key/value heads; by default as many as query heads."""
    head_dim: int | None = Field(None, gt=0)
    """By default hidden_size / num_attention_heads."""
    vocab_size: int = Field(gt=0)
    """Real tokens; the table is padded to a multiple of `vocab_multiple` x tp, and padding never enters the softmax."""
    vocab_multiple: int = Field(128, gt=0)
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    norm_epsilon: float = Field(1e-5, gt=0)
    activation: Literal["swiglu", "gelu", "gelu_tanh"] = "swiglu"
    qkv_bias: bool = False
    linear_bias: bool = False
    """Bias of the output projection and of both MLP projections (and of qkv)."""
    qk_norm: bool = False
    tied_embeddings: bool = False
    rope: RopeSection = RopeSection()
    sliding_window: int | None = Field(None, gt=0)
    """A token sees itself and the `sliding_window - 1` tokens before it."""
    global_attention_every: int | None = Field(None, gt=1)
    """With a sliding window: every n-th layer (layers n, 2n, ...) sees everything."""
    attention_dropout: float = Field(0.0, ge=0, lt=1)
    hidden_dropout: float = Field(0.0, ge=0, lt=1)
    init_std: float = Field(0.02, gt=0)
    backend: Literal["auto", "torch", "te"] = "auto"
    """Layer implementation: our own torch spec, or TransformerEngine's; auto takes te where it is importable and a GPU
    is present."""
    megatron: dict[str, Any] = {}
    """Further fields of megatron.core.transformer.TransformerConfig, passed through unchanged."""

    @property
    def query_groups(self) -> int:
        """Key/value heads."""
        return self.num_attention_heads if self.num_query_groups is None else self.num_query_groups

    @property
    def head_size(self) -> int:
        """Dimensions of one attention head."""
        return self.hidden_size // self.num_attention_heads if self.head_dim is None else self.head_dim
