"""`model.*`: the architecture.

Our own code reads every key here; `model.megatron` passes a few other fields of Megatron-Core's TransformerConfig.
"""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import Field

from mtrain.config import megatron_fields
from mtrain.config.schema import bounds
from mtrain.config.schema.attention import GlobalAttentionSection, LatentAttentionSection
from mtrain.config.schema.delta_net import DeltaNetSection
from mtrain.config.schema.experts import ExpertsSection
from mtrain.config.schema.mamba import MambaSection
from mtrain.config.schema.output import AnyOutput, HeadOutput, TokenOutput
from mtrain.config.schema.rope import RopeSection
from mtrain.config.schema.section import Section
from mtrain.config.schema.vision import VisionSection
from mtrain.config.towers import description_of

RECURRENT: Mapping[str, type[DeltaNetSection] | type[MambaSection]] = {
    "delta_net": DeltaNetSection,
    "mamba": MambaSection,
}
"""Key of a section of layers with a state instead of keys and values -> its class."""
_LETTERS = "M*-E"
_TWO_SUBLAYER_KEYS = ("mla", "delta_net", "sliding_window", "sandwich_norm", "post_norm", "mtp_depths")
"""Keys of `model.*` that cannot be combined with `layer_pattern`, whose layers have one sublayer each."""


class ModelSection(Section):
    """A decoder-only transformer."""

    hf: Annotated[str | None, bounds.PATH] = Field(None, min_length=1)
    """Path of a Hugging Face folder that gives the architecture and the initial weights; keys that its config.json
    decides may be omitted here and must otherwise agree with it. A checkpoint of the run itself takes precedence. null:
    weights start random or come from checkpoint.initialize_from."""
    num_layers: Annotated[int, bounds.LAYERS] = Field(gt=0)
    """Number of layers, without those of multi-token prediction."""
    hidden_size: Annotated[int, bounds.WIDTH] = Field(gt=0)
    """Width of the residual stream."""
    ffn_hidden_size: Annotated[int, bounds.WIDTH] = Field(gt=0)
    """Width of the feed-forward part between its projections, over all ranks."""
    num_attention_heads: Annotated[int, bounds.WIDTH] = Field(gt=0)
    """Number of query heads."""
    num_query_groups: int | None = Field(None, gt=0)
    """Number of key/value heads; null: as many as query heads."""
    head_dim: Annotated[int | None, bounds.WIDTH] = Field(None, gt=0)
    """Dimensions of a head; null: hidden_size / num_attention_heads."""
    vocab_size: Annotated[int, bounds.VOCABULARY] = Field(gt=0)
    """Number of real tokens; the table is padded to a multiple of `vocab_multiple` x tp, and padding never enters the
    softmax."""
    add_tokens: tuple[str, ...] = ()
    """Texts that become tokens wherever they occur. Their new rows in both tables start as the mean of the other
    rows."""
    add_special_tokens: tuple[str, ...] = ()
    """Added control tokens, with rows as for add_tokens; only chat templates and special_tokens_in_text write them."""
    vocab_multiple: Annotated[int, bounds.WIDTH] = Field(128, gt=0)
    """Divisor of the rows of the embedding table on each rank; vocab_size is padded accordingly."""
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    """Kind of the norms."""
    norm_epsilon: float = Field(1e-5, gt=0)
    """Number that is added to the variance in a norm."""
    zero_centered_norm: bool = False
    """Whether norms multiply by 1 + weight; their weights start at 0."""
    sandwich_norm: bool = False
    """Whether attention and the feed-forward part are also followed by a norm, before the residual is added."""
    post_norm: bool = False
    """Whether norms come only after attention and the feed-forward part, before the residual is added, as in OLMo-2."""
    activation: Literal["swiglu", "swiglu_clamped", "geglu_tanh", "gelu", "gelu_tanh", "relu2"] = "swiglu"
    """Activation of the feed-forward part. swiglu_clamped: (up + 1) x gate x sigmoid(1.702 gate) with gate below 7 and
    up within -7 and 7; relu2: relu(up)^2."""
    qkv_bias: bool = False
    """Whether the projection to queries, keys and values has a bias."""
    linear_bias: bool = False
    """Whether the output projection and both MLP projections (and qkv) have a bias."""
    qk_norm: bool = False
    """Whether queries and keys are normalised before rotation."""
    qk_norm_width: Literal["head", "full"] = "head"
    """Elements that a norm of queries or keys covers. head: each head, with the same weight for all heads. full: the
    whole projection, as in OLMo-2."""
    tied_embeddings: bool = False
    """Whether the output layer shares the table of the embeddings."""
    scale_embeddings: bool = False
    """Whether embeddings are multiplied by sqrt(hidden_size)."""
    attention_sinks: bool = False
    """Whether each head has a learned logit that joins the softmax and belongs to no token."""
    attention_gate: bool = False
    """Whether the sigmoid of an additional output of the query/key/value projection multiplies each element of
    attention's output, as in Qwen3-Next."""
    value_norm: bool = False
    """Whether an RMSNorm without weights normalises each head's values."""
    layer_scalar: bool = False
    """Whether an untrained number per layer multiplies the layer's output, including the residual."""
    logit_softcap: float | None = Field(None, gt=0)
    """Bound c of the token logits, which become c tanh(logit / c); null: no bound."""
    query_scalar: float | None = Field(None, gt=0)
    """Number s in the factor s^-0.5 of attention scores; null: head_dim."""
    rope: RopeSection = RopeSection()
    """Rotary position embedding."""
    sliding_window: int | None = Field(None, gt=0)
    """Number of tokens that a token attends to, including itself; null: all earlier ones and itself."""
    global_attention_every: int | None = Field(None, gt=1)
    """Interval n of the layers that attend to all tokens despite a sliding window (layers n, 2n, ...); null: all layers
    have the window."""
    global_attention: GlobalAttentionSection | None = None
    """Different heads for the layers without a window; null: all layers have the same heads."""
    mla: LatentAttentionSection | None = None
    """Multi-head latent attention instead of grouped-query attention; null: none."""
    delta_net: DeltaNetSection | None = None
    """Gated delta net instead of attention in most layers; null: all layers have attention."""
    layer_pattern: str | None = None
    """Layers with one sublayer each, one letter per layer: M Mamba-2, * attention, - a dense feed-forward part, E
    experts; null: each layer has attention, or its replacement, and a feed-forward part."""
    mamba: MambaSection | None = None
    """Mamba-2 in the layers M of layer_pattern; null: none."""
    experts: ExpertsSection | None = None
    """Mixture of experts in all or some layers; null: all layers are dense."""
    vision: VisionSection | None = None
    """Vision tower, for training with images; null: the model reads only text. With model.hf, {} takes the folder's
    tower."""
    num_labels: Annotated[int | None, bounds.VOCABULARY] = Field(None, gt=0)
    """Number of outputs of a head that replaces the vocabulary logits and reads the hidden state of a sequence's last
    token: 1 for a reward model, the number of classes for a classification (docs/training/heads.md). The head starts
    random if the initial weights have none. null: the model predicts tokens."""
    mtp_depths: Annotated[int, bounds.LAYERS] = Field(0, ge=0)
    """Number of further tokens to predict (multi-token prediction, MTP), each with its own layer after the last one
    (mtp_num_layers)."""
    attention_dropout: float = Field(0.0, ge=0, lt=1)
    """Probability of dropping an attention weight; 0: no dropout."""
    hidden_dropout: float = Field(0.0, ge=0, lt=1)
    """Probability of dropping an element of the embeddings, or of the output of attention or the feed-forward part; 0:
    no dropout."""
    init_std: float = Field(0.02, gt=0)
    """Standard deviation of initial weights; projections back into the residual stream use init_std / sqrt(2 x
    num_layers), or init_std / sqrt(num_layers) with one sublayer per layer (layer_pattern)."""
    backend: Literal["auto", "torch", "te"] = "auto"
    """Implementation of the layers: our own torch spec, or TransformerEngine's. auto: te if it works, a GPU is present
    and it supports the run (it does not support float32, several documents per row, adapters or experts, for
    instance)."""
    megatron: dict[str, Any] = Field(default_factory=dict)
    """Further fields of megatron.core.transformer.TransformerConfig, by name; only fields with a parity test are
    accepted (mtrain/config/megatron_fields.py)."""

    @property
    def query_groups(self) -> int:
        """Number of key/value heads; equals the query heads with latent attention."""
        return self.num_attention_heads if self.num_query_groups is None else self.num_query_groups

    @property
    def head_size(self) -> int:
        """Dimensions of a query or key head."""
        if self.mla is not None:
            return self.mla.query_head_dim
        return self.hidden_size // self.num_attention_heads if self.head_dim is None else self.head_dim

    def attention(self, layer: int) -> Literal["grouped", "global", "latent", "delta_net", "mamba", "none"]:
        """Returns the kind of attention, or of its replacement, in layer `layer`, counted from 0.

        The only place that decides it; all other code calls this method.
        """
        if self.layer_pattern is not None:
            return {"*": "grouped", "M": "mamba"}.get(self.layer_pattern[layer], "none")  # type: ignore[return-value]
        if self.delta_net is not None and self.delta_net.is_in(layer):
            return "delta_net"
        every = self.global_attention_every
        if self.global_attention is not None and every is not None and (layer + 1) % every == 0:
            return "global"
        return "grouped" if self.mla is None else "latent"

    @property
    def recurrent(self) -> list[DeltaNetSection | MambaSection]:
        """Sections of the layers with a state."""
        return [section for section in map(partial(getattr, self), RECURRENT) if section is not None]

    @property
    def sizes_over_tp(self) -> dict[str, int]:
        """Key -> its value, which layout.tp must divide."""
        sizes = {
            "model.num_attention_heads": self.num_attention_heads,
            "model.num_query_groups": self.query_groups,
            "model.ffn_hidden_size": self.ffn_hidden_size,
        }
        if self.delta_net is not None:  # value heads are a multiple of key heads
            sizes["model.delta_net.num_key_heads"] = self.delta_net.num_key_heads
        if self.mamba is not None:  # heads are a multiple of groups
            sizes["model.mamba.num_groups"] = self.mamba.num_groups
        if self.global_attention is not None:
            sizes["model.global_attention.num_query_groups"] = self.global_attention.num_query_groups
        return sizes

    @property
    def query_projections(self) -> frozenset[str]:
        """Projections that produce queries, keys and values, as named in adapter.targets."""
        return frozenset(("q_proj", "k_proj", "v_proj")) if self.mla is None else self.mla.projections

    @property
    def rotary_size(self) -> int:
        """Number of rotated dimensions of a head."""
        if self.mla is not None:
            return self.mla.qk_rope_head_dim
        return self.head_size if self.rope.scaling == "proportional" else int(self.head_size * self.rope.partial)

    def with_global_heads(self) -> "ModelSection":
        """Returns the model with the heads of `global_attention` in all layers."""
        heads = self.global_attention
        if heads is None:
            return self
        sizes = {"head_dim": heads.head_dim, "num_query_groups": heads.num_query_groups, "global_attention": None}
        return self.model_copy(update=sizes)

    @property
    def head(self) -> HeadOutput | None:
        """Head that scores sequences; None if the model predicts tokens."""
        return None if self.num_labels is None else HeadOutput(self.num_labels)

    @property
    def output(self) -> AnyOutput:
        """Output layer, or the head that replaces it."""
        return TokenOutput(self.vocab_size, self.tied_embeddings) if self.head is None else self.head

    @property
    def num_predictions(self) -> int:
        """Number of tokens that each position predicts: the next one and one per MTP depth."""
        return 1 + self.mtp_depths

    @property
    def layers_ahead(self) -> list[int]:
        """Layer, counted from 0, that each MTP depth's layer resembles: the last one."""
        return [self.num_layers - 1] * self.mtp_depths

    @property
    def is_gated(self) -> bool:
        """Whether the feed-forward part multiplies two projections."""
        return self.activation in ("swiglu", "swiglu_clamped", "geglu_tanh")

    @property
    def has_bidirectional_images(self) -> bool:
        """Whether tokens of an image see each other both ways."""
        return self.vision is not None and description_of(self.vision).bidirectional is not None

    @property
    def has_frozen_language_model(self) -> bool:
        """Whether only parts of the vision tower, or adapters, are trained."""
        return self.vision is not None and self.vision.freeze_language_model

    def has_experts(self, layer: int) -> bool:
        """Says whether layer `layer`, counted from 0, has experts."""
        if self.layer_pattern is not None:
            return self.layer_pattern[layer] == "E"
        return self.experts is not None and self.experts.has_experts(layer)

    def has_branches(self, layer: int) -> bool:
        """Says whether layer `layer`, counted from 0, has separate norms for shared and chosen experts."""
        return self.has_experts(layer) and self.experts is not None and self.experts.branch_norms

    def has_dense(self, layer: int) -> bool:
        """Says whether layer `layer`, counted from 0, has a dense feed-forward part."""
        return not self.has_experts(layer) if self.layer_pattern is None else self.layer_pattern[layer] == "-"

    def has_feed_forward(self, layer: int) -> bool:
        """Says whether layer `layer`, counted from 0, has a feed-forward part."""
        return self.has_dense(layer) or self.has_experts(layer)

    @property
    def has_transformer_engine_experts(self) -> bool:
        """Whether TransformerEngine computes the experts."""
        return self.experts is not None and self.experts.implementation == "te"

    def broken_rules(self) -> Iterator[str]:
        yield from self._broken_rules_of_heads()
        if self.mla is not None:
            yield from self._broken_rules_of_latents()
        elif self.rope.interleaved:
            yield "rope.interleaved=true needs model.mla; remove it"
        if self.attention_gate and self.qk_norm_width == "full":
            yield "attention_gate=true cannot be combined with qk_norm_width=full; remove one of them"
        if self.delta_net is not None:
            yield from self._broken_rules_with_delta_nets(self.delta_net)
        yield from self._broken_rules_of_pattern()
        if self.global_attention is not None:
            yield from self._broken_rules_of_global_heads(self.global_attention)
        yield from self._broken_rules_of_norms()
        if self.num_labels is not None and self.mtp_depths:
            yield (
                f"mtp_depths={self.mtp_depths} predicts tokens, which a model with num_labels={self.num_labels} does "
                "not; set it to 0"
            )
        elif self.num_labels is not None and self.num_labels > self.vocab_size:  # labels travel in place of tokens
            yield f"num_labels={self.num_labels} is more than vocab_size={self.vocab_size}; lower it"
        need_a_window = {
            "global_attention_every": self.global_attention_every,
            "rope.local_base": self.rope.local_base,
        }
        for key, value in need_a_window.items():
            if value is not None and self.sliding_window is None:
                yield f"{key}={value} has no effect without a window; set sliding_window or remove it"
        if self.vision is not None:
            yield from self._broken_rules_with_images(self.vision)
        yield from megatron_fields.broken_rules(self.megatron)

    def _broken_rules_with_images(self, vision: VisionSection) -> Iterator[str]:
        tower = description_of(vision)
        yield from (f"vision.{rule}" for rule in tower.broken_rules(vision))
        if vision.standardize and not tower.constants:
            yield f"vision.standardize=true has no meaning for kind={vision.kind}; remove it"
        if tower.bidirectional == "windowed" and self.global_attention is None:
            yield (
                f"vision.kind={vision.kind} needs global_attention, the heads of layers without a window, in which "
                "images see only the past; set it"
            )
        if vision.rope_sections is not None and sum(vision.rope_sections) != self.rotary_size // 2:
            yield (
                f"vision.rope_sections={list(vision.rope_sections)} add up to {sum(vision.rope_sections)} pairs, but "
                f"{self.rotary_size // 2} pairs of a head are rotated; change them"
            )
        if vision.image_token >= self.vocab_size:
            yield f"vision.image_token={vision.image_token} must be below vocab_size={self.vocab_size}; change it"
        if self.num_labels is not None:
            yield (
                f"num_labels={self.num_labels} cannot be combined with model.vision, since no export could write "
                "the head of a model of images; remove one of them"
            )
        if self.mtp_depths and self.has_bidirectional_images:
            yield (
                f"mtp_depths={self.mtp_depths} cannot be combined with vision.kind={vision.kind}, whose image tokens "
                "see later ones, so that a depth would see what it predicts; set mtp_depths to 0"
            )
        unable = {
            "mla": self.mla is not None,
            "sliding_window": self.sliding_window is not None and vision.rope_sections is not None,
            "delta_net": self.delta_net is not None and self.has_bidirectional_images,
            "global_attention": self.global_attention is not None and tower.bidirectional == "all",
            "layer_pattern": self.layer_pattern is not None,
            "rope.attention_temperature": self.rope.attention_temperature > 0 and vision.rope_sections is not None,
        }
        for name in (name for name, holds in unable.items() if holds):
            yield f"{name} cannot be combined with model.vision; remove one of them"

    def _broken_rules_of_heads(self) -> Iterator[str]:
        if self.head_dim is None and self.mla is None and self.hidden_size % self.num_attention_heads:
            yield (
                f"hidden_size={self.hidden_size} is not a multiple of num_attention_heads={self.num_attention_heads}; "
                "change one of them or set head_dim"
            )
        is_even = self.rotary_size % 2 == 0 and self.rotary_size > 0
        if not is_even and self.rope.partial == 1:
            yield f"head_dim={self.head_size} must be even, since the rotary embedding rotates pairs; change it"
        elif not is_even:
            yield (
                f"rope.partial={self.rope.partial} of head_dim={self.head_size} is {self.rotary_size} dimensions, but "
                "the rotary embedding needs an even number above 0; change it"
            )
        if self.num_attention_heads % self.query_groups:
            yield (
                f"num_query_groups={self.query_groups} must divide num_attention_heads={self.num_attention_heads}; "
                "change one of them"
            )

    def _broken_rules_of_latents(self) -> Iterator[str]:
        if self.rope.partial != 1:
            yield (
                f"rope.partial={self.rope.partial} cannot be combined with model.mla (mla.qk_rope_head_dim says how "
                "much is rotated); remove it"
            )
        if self.rope.attention_temperature:
            yield (
                f"rope.attention_temperature={self.rope.attention_temperature} cannot be combined with model.mla, "
                "whose queries have no factor; set it to 0"
            )
        for name, reason in _REFUSED_BY_MLA.items():
            value = getattr(self, name)
            if value is not None and value is not False:
                yield f"{name}={str(value).lower()} cannot be combined with model.mla ({reason}); remove it"

    def _broken_rules_with_delta_nets(self, delta_net: DeltaNetSection) -> Iterator[str]:
        if self.mla is not None:
            yield (
                "delta_net cannot be combined with model.mla (other layers have grouped attention); remove one of them"
            )
        if self.sliding_window is not None:
            yield (
                f"delta_net cannot be combined with sliding_window={self.sliding_window} (its other layers see the "
                "whole row); remove one of them"
            )
        if self.mtp_depths and self.num_layers % delta_net.full_attention_every:
            yield (
                f"mtp_depths={self.mtp_depths} adds layers like the last one, which needs attention, but num_layers="
                f"{self.num_layers} is not a multiple of delta_net.full_attention_every="
                f"{delta_net.full_attention_every}; change one of them, or set mtp_depths to 0"
            )

    def _broken_rules_of_pattern(self) -> Iterator[str]:
        pattern, experts = self.layer_pattern, self.experts
        if pattern is None:
            if self.mamba is not None:
                yield "mamba needs layer_pattern, which says which layers have it; set layer_pattern"
            return
        entry = f"layer_pattern={pattern}"
        if unknown := sorted(set(pattern) - set(_LETTERS)):
            yield f"{entry} may only have the letters {', '.join(_LETTERS)}, but has {', '.join(unknown)}; change it"
        if len(pattern) != self.num_layers:
            yield f"{entry} has {len(pattern)} letters for num_layers={self.num_layers}; change one of them"
        for letter, key in (("M", "mamba"), ("E", "experts")):
            is_set = getattr(self, key) is not None
            if letter in pattern and not is_set:
                yield f"{entry} has a layer {letter}, which needs model.{key}; set it, or change the pattern"
            elif letter not in pattern and is_set:
                yield f"{entry} has no layer {letter} for model.{key}; remove it, or change the pattern"
        if experts is not None and (experts.first_dense_layers or experts.every != 1):
            yield f"{entry} says which layers have experts; remove experts.first_dense_layers and experts.every"
        reason = "its layers have one sublayer each"
        for key in _TWO_SUBLAYER_KEYS:
            if getattr(self, key):
                yield f"{entry} cannot be combined with model.{key} ({reason}); remove one of them"

    def _broken_rules_of_global_heads(self, heads: GlobalAttentionSection) -> Iterator[str]:
        needed = {"global_attention_every": self.global_attention_every, "rope.local_base": self.rope.local_base}
        for name, value in needed.items():
            if value is None:
                yield f"global_attention needs {name}, which is not given; set it, or remove global_attention"
        if self.num_attention_heads % heads.num_query_groups:
            yield (
                f"global_attention.num_query_groups={heads.num_query_groups} must divide num_attention_heads="
                f"{self.num_attention_heads}; change one of them"
            )
        if heads.head_dim % 2:
            yield (
                f"global_attention.head_dim={heads.head_dim} must be even, since the rotary embedding rotates pairs; "
                "change it"
            )
        for name in ("qkv_bias", "linear_bias", "attention_sinks", "attention_gate", "mtp_depths"):
            if value := getattr(self, name):
                yield f"{name}={str(value).lower()} cannot be combined with global_attention; remove one of them"
        if self.qk_norm_width == "full":
            yield "qk_norm_width=full cannot be combined with global_attention; remove one of them"

    def _broken_rules_of_norms(self) -> Iterator[str]:
        temperature = self.rope.attention_temperature
        conflicts = {
            f"norm={self.norm}": self.norm != "rmsnorm",
            f"qk_norm_width={self.qk_norm_width}": self.qk_norm_width != "head",
            f"rope.attention_temperature={temperature}": temperature > 0,
        }
        conflict = next((key for key, holds in conflicts.items() if holds), None)
        if self.value_norm and conflict is not None:
            yield f"value_norm=true cannot be combined with {conflict}; remove one of them"
        if self.layer_scalar and not self.sandwich_norm:
            yield "layer_scalar=true needs sandwich_norm=true; set it, or turn the scalar off"
        if self.post_norm and self.sandwich_norm:
            yield "post_norm=true removes norms that sandwich_norm=true adds; turn one of them off"
        if self.qk_norm_width == "head":
            return
        if not self.qk_norm:
            yield "qk_norm_width=full has no effect without a norm; set qk_norm=true or remove it"
        elif self.norm != "rmsnorm":
            yield f"qk_norm_width=full needs norm=rmsnorm, but norm={self.norm}; change one of them"
        elif temperature:
            yield (
                f"qk_norm_width=full cannot be combined with rope.attention_temperature={temperature}; remove one of "
                "them"
            )


_REFUSED_BY_MLA = {
    "num_query_groups": "keys and values of all heads come from one latent",
    "head_dim": "mla.qk_nope_head_dim, mla.qk_rope_head_dim and mla.v_head_dim are its sizes",
    "qkv_bias": "its projections have no bias",
    "linear_bias": "its projections have no bias",
    "qk_norm": "its latents are normalised instead",
    "attention_sinks": "it has none",
    "attention_gate": "its output has none",
    "value_norm": "its latents are normalised instead",
    "query_scalar": "its scale follows from its sizes and rope.mscale_all_dim",
    "sliding_window": "it sees the whole row",
}
"""Key of grouped-query attention -> why model.mla refuses it."""
