"""Combinations that megatron-core 0.16.1 accepts and silently computes wrongly: refusals, and notes for the output.

`tests/known_issues/rows` lists all its faults, including those that our code avoids by construction. Conditions that
need no torch are here, so that `mtrain check` reports them.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, assert_never, get_args

from mtrain.config.derived import layout_dependent_keys
from mtrain.config.schema.data import AnyData
from mtrain.config.schema.layout import CpComm, LayoutSection
from mtrain.config.schema.loss import own_functions
from mtrain.config.schema.model import ModelSection
from mtrain.config.schema.sections import Sections
from mtrain.config.schema.train import COMPILED

CLIP_EPSILON = 1e-6
"""megatron-core and torch clip by clip_grad / (norm + CLIP_EPSILON)."""
_SMALL_CLIP = 1e3 * CLIP_EPSILON
"""Value of clip_grad below which the epsilon can shrink a clipped gradient by more than 0.1 %."""


def _overlaps(model: ModelSection) -> bool:
    """Says whether an interleaved schedule overlaps transfers with computation."""
    return model.megatron.get("overlap_p2p_comm") is not False


@dataclass(frozen=True)
class Refusal:
    """Fields of `model.megatron` that would cause a silent fault."""

    fields: tuple[str, ...]
    reason: str
    """End of "model.megatron.<field>=<value> ..."."""
    remedy: str = "remove it"
    breaks: Callable[[Any, Sections], bool] = lambda value, config: bool(value)
    """Says whether this value of a field causes the fault in a configuration."""


REPLACED = Refusal(
    (
        "apply_query_key_layer_scaling",
        "mrope_section",
        "qk_l2_norm",
        "rotary_interleaved",
    ),
    "is read by layers of megatron-core that our own replace, so it would have no effect",
)
UNREAD = Refusal(
    ("apply_residual_connection_post_layernorm", "qk_clip"),
    "has no effect in megatron-core 0.16.1: no layer reads it, or nothing calls its code",
)
LOW_PRECISION = Refusal(
    ("fp4", "fp8"),
    "is silently ignored without TransformerEngine, and its scales depend on the layout",
    "remove it and choose train.precision or train.fp8",
)
RESIDUAL = Refusal(
    ("fp32_residual_connection",),
    "makes float32 activations, which pipeline stages receive as train.precision",
    "remove it, or set train.precision=fp32",
    lambda value, config: bool(value) and config.train.precision != "fp32",
)
REFUSALS = (
    REPLACED,
    UNREAD,
    LOW_PRECISION,
    RESIDUAL,
    Refusal(
        ("batch_p2p_comm",),
        "pairs activations with gradients where layout.pp=2 and layout.vpp > 1, since both neighbours are the same "
        "rank",
        breaks=lambda value, config: bool(value) and config.layout.pp == 2 and config.layout.vpp > 1,
    ),
    Refusal(
        ("batch_p2p_comm",),
        "cannot be combined with transfers that overlap with computation, as they do with layout.vpp > 1",
        "remove it, or set model.megatron.overlap_p2p_comm=false as well",
        lambda value, config: bool(value) and config.layout.vpp > 1 and _overlaps(config.model),
    ),
    Refusal(
        ("overlap_p2p_comm",),
        "needs an interleaved schedule, but layout.vpp=1",
        "raise layout.vpp, or remove it",
        lambda value, config: bool(value) and config.layout.pp > 1 and config.layout.vpp == 1,
    ),
    Refusal(
        ("overlap_p2p_comm_warmup_flush",),
        "needs layout.vpp > 1 and transfers that overlap with the computation",
        "raise layout.vpp and leave model.megatron.overlap_p2p_comm at true, or remove it",
        lambda value, config: (
            bool(value) and config.layout.pp > 1 and not (config.layout.vpp > 1 and _overlaps(config.model))
        ),
    ),
    Refusal(
        ("bias_activation_fusion",),
        "approximates activations other than swiglu",
        "remove it, or set model.activation=swiglu",
        lambda value, config: bool(value) and config.model.activation != "swiglu",
    ),
    Refusal(
        ("no_rope_freq",),
        "has no effect on latent attention (model.mla), and is undefined for model.mtp_depths",
        breaks=lambda value, config: config.model.mla is not None or config.model.mtp_depths > 0,
    ),
    Refusal(
        ("no_rope_freq",),
        "must divide model.num_layers, or list a 0 or 1 for each of them",
        "change it",
        lambda value, config: (
            len(value) != config.model.num_layers if isinstance(value, list) else config.model.num_layers % value != 0
        ),
    ),
    Refusal(
        ("gradient_accumulation_fusion",),
        "cannot be combined with train.compile=layers, whose graphs hide the gradients that a product accumulates",
        "set train.compile=regions, or turn one of the two off",
        lambda value, config: bool(value) and config.train.compile == "layers",
    ),
    Refusal(
        ("gradient_accumulation_fusion",),
        "cannot be combined with train.offload_layers, which hides a weight from its gradient",
        "turn one of the two off",
        lambda value, config: bool(value) and config.train.offload_layers is not None,
    ),
)


def refusals(config: Sections) -> Iterator[str]:
    """Yields a message for every field of `model.megatron` that would cause a silent fault."""
    fields = config.model.megatron
    for refusal in REFUSALS:
        for field in refusal.fields:
            if field in fields and refusal.breaks(fields[field], config):
                shown = str(fields[field]).lower() if isinstance(fields[field], bool) else fields[field]
                yield f"model.megatron.{field}={shown} {refusal.reason}; {refusal.remedy}"


def documents_need_torch_layers(model: ModelSection, layout: LayoutSection, data: AnyData) -> Iterator[str]:
    """Refuses TransformerEngine with several documents per row under context parallelism, since it cuts each document
    separately."""
    if model.backend == "te" and data.isolate_documents and layout.cp > 1:
        key = "data.packing puts several into one" if data.packing else "data.isolate_documents=true"
        remedy = "remove data.packing" if data.packing else "set data.isolate_documents to false"
        yield (
            f"model.backend=te cuts every document of a row separately under layout.cp={layout.cp}, but {key}; use "
            f"model.backend=auto, or {remedy}"
        )


def beyond_transformer_engine(config: Sections) -> Iterator[str]:
    """Yields, for each key that TransformerEngine's layers do not support in any model, the key with the reason."""
    model, layout = config.model, config.layout
    if config.train.precision == "fp32":
        yield (
            "train.precision=fp32: it multiplies float32 matrices in TF32, and its attention has no float32 under "
            "layout.cp"
        )
    if config.train.compile in COMPILED:
        yield f"train.compile={config.train.compile}, which compiles only our layers"
    if config.train.offload_layers is not None:
        yield f"train.offload_layers={config.train.offload_layers}, which offloads only our layers"
    if config.model.megatron.get("gradient_accumulation_fusion"):
        yield "model.megatron.gradient_accumulation_fusion=true, which is tested only with our layers"
    groups = model.query_groups // layout.tp
    if layout.cp_comm == "ulysses" and groups % layout.cp:
        yield (
            f"layout.cp_comm=ulysses: it exchanges whole key/value heads, but a rank has {groups}, which is not a "
            f"multiple of layout.cp={layout.cp}"
        )


def sizes_of_attention(model: ModelSection, tp: int) -> dict[str, int]:
    """Returns name -> size of the dimensions of attention's projections on a TP rank."""
    num_heads, latent = model.num_attention_heads // tp, model.mla
    if latent is None:
        columns = (model.num_attention_heads + 2 * model.query_groups) * model.head_size
        return {
            "columns of queries, keys and values / layout.tp": columns // tp,
            "model.num_attention_heads x head size / layout.tp": model.num_attention_heads * model.head_size // tp,
        }
    return {
        "model.mla.q_lora_rank": latent.q_lora_rank or 0,
        "model.mla.kv_lora_rank": latent.kv_lora_rank,
        "model.mla.kv_lora_rank + qk_rope_head_dim": latent.kv_lora_rank + latent.qk_rope_head_dim,
        "columns of queries / layout.tp": num_heads * latent.query_head_dim,
        "columns of keys and values / layout.tp": num_heads * (latent.qk_nope_head_dim + latent.v_head_dim),
        "model.num_attention_heads x model.mla.v_head_dim / layout.tp": num_heads * latent.v_head_dim,
    }


def context_kinds(model: ModelSection, data: AnyData) -> tuple[CpComm, ...]:
    """Returns the kinds of context parallelism that the model and its rows allow; whether heads divide over ranks
    depends on the layout."""
    return tuple(kind for kind in get_args(CpComm) if not any(_unsupported(kind, model, data)))


def beyond_cp_comm(model: ModelSection, layout: LayoutSection, data: AnyData) -> Iterator[str]:
    """Yields a message for each feature in use that `layout.cp_comm` does not support, at any cp."""
    kind = layout.cp_comm
    for key, feature in _unsupported(kind, model, data):
        kinds = " or ".join(context_kinds(model, data))
        yield f"layout.cp_comm={kind} does not support {feature} ({key}); set layout.cp_comm to {kinds}"


def _unsupported(kind: CpComm, model: ModelSection, data: AnyData) -> Iterator[tuple[str, str]]:
    """Yields each key in use, with its feature, that a kind of context parallelism does not support; the kernels of a
    ring attend to the keys of one hop, without a mask."""
    match kind:
        case "allgather" | "ulysses":
            return
        case "ring":
            pass
        case _:
            assert_never(kind)
    if model.sliding_window is not None:
        yield "model.sliding_window", "windows that end within a hop"
    if model.attention_sinks:
        yield "model.attention_sinks", "a sink, which every hop would count"
    if model.attention_dropout:
        yield "model.attention_dropout", "dropout"
    if model.mla is not None:
        yield "model.mla", "latents, from which each hop would recompute keys and values"
    if model.has_bidirectional_images:
        yield "model.vision", "images whose tokens see each other both ways"
    if data.isolate_documents:
        yield "data.packing" if data.packing else "data.isolate_documents", "documents that end within a hop"


def too_much_for_transformer_engine(config: Sections) -> Iterator[str]:
    """Yields a message for each feature in use that TransformerEngine's layers lack, if explicitly requested."""
    if config.model.backend == "te":
        for reason in beyond_transformer_engine(config):
            yield f"model.backend=te does not support {reason}; use model.backend=auto"
    if config.model.has_transformer_engine_experts and config.model.backend == "torch":
        yield (
            "model.experts.implementation=te needs TransformerEngine's layers, but model.backend=torch; set "
            "model.backend=auto, or model.experts.implementation=auto"
        )


@dataclass(frozen=True)
class Note:
    """A property of a run that its user should know, reported once."""

    applies: Callable[[Sections], bool]
    text: str


DROPOUT = Note(
    lambda config: bool(config.dropout_keys),
    "dropout draws other numbers on another layout or micro-batch size: this run repeats only with its own",
)
FP8 = Note(
    lambda config: config.train.fp8 is not None and not config.has_own_fp8,
    "train.fp8 rounds the operands of products to 3 or 2 bits after the leading one (2^-4 or 2^-3 of an element), by "
    "scales that depend on how the layout cuts tensors: other layouts and micro-batch sizes agree only to that "
    "precision",
)
CLIPPING = Note(
    lambda config: 0 < config.optimizer.clip_grad < _SMALL_CLIP,
    f"optimizer.clip_grad is so small that clipping, by clip_grad / (norm + {CLIP_EPSILON}), shrinks a gradient whose "
    "norm is about clip_grad by more than 0.1 %",
)
LAYOUT_DEPENDENT = Note(
    lambda config: bool(layout_dependent_keys(config.model, config.loss)),
    "loss.allow_layout_dependent=true, and a balancing loss or a capacity depends on the layout by definition: "
    "losses, gradients and weights of this run are valid only for its layout and micro-batch size",
)
OWN_LOSS = Note(
    lambda config: config.layout.cp > 1 and bool(own_functions(config.loss)),
    "your own loss function runs under context parallelism, where no rank holds a whole sequence: anything not "
    "linear in its tokens needs TermInputs.sum_over_sequence (docs/extending/loss.md); `mtrain verify parity` checks "
    "that it is the same on every layout",
)
NOTES = (DROPOUT, FP8, CLIPPING, LAYOUT_DEPENDENT, OWN_LOSS)


def notes(config: Sections) -> list[str]:
    """Returns the notes that the run prints once."""
    return [note.text for note in NOTES if note.applies(config)]
