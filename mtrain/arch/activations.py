"""Activation memory of a rank: tensors kept for backward, and temporary tensors at the two heaviest moments.

Counts tensors of this program's own layers (`model.backend=torch`); TransformerEngine's layers keep less. A projection
keeps its input only for the gradient of its weight, so a frozen one keeps none; an adapter next to it keeps the same
input for the gradient of A.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, assert_never

from mtrain.arch.adapters import holds_narrow, in_layer, learns_output
from mtrain.arch.features import LAYER_PARTS, alike, kinds, present
from mtrain.arch.features.feature import EMBEDDING, AdaptedMatrix, hidden_local
from mtrain.arch.layout import Layout, most_microbatches
from mtrain.arch.parameters import output_columns
from mtrain.config import Config
from mtrain.config.schema.adapter import GROUPS, AdapterSection
from mtrain.config.schema.loss import LossSection, own_functions
from mtrain.config.schema.model import ModelSection
from mtrain.config.schema.train import TrainSection

FEWEST_TOKENS = 1024
"""Fewest tokens of an automatic chunk: in smaller ones, matrix products of GPUs wait for memory."""
TOKENS_ON_GPU = 4096
"""Tokens of an automatic chunk on a GPU: each chunk reads and writes the float32 gradient of the whole table, which
takes a quarter of the product's time then."""
MOST_LOGITS_ON_GPU = 2**29
"""Most logits of such a chunk: 4 GiB in half precision, with their exponentials and gradient."""
LOGITS_AT_A_TIME = 2**26
"""Logits of an automatic chunk, if that gives more tokens: 256 MiB in float32."""

LOGITS_AT_A_TIME_ON_CPU = 2**21
"""Logits of an automatic chunk on a CPU: 8 MiB in float32, which malloc reuses; the kernel would zero a larger block
each time."""
FEWEST_TOKENS_ON_CPU = 256
"""Fewest tokens of a chunk on a CPU; below, chunks are those of GPUs, because each reads and writes the table's whole
gradient."""


def chunk_tokens(section: LossSection, vocab_local: int, on_cpu: bool) -> int | None:
    """Returns the most tokens of a chunk; None if all logits are computed at once.

    Args:
        vocab_local: Columns of the padded vocabulary on one rank.
    """
    match section.chunk_tokens:
        case int(tokens):
            return tokens
        case "auto" if on_cpu and LOGITS_AT_A_TIME_ON_CPU // vocab_local >= FEWEST_TOKENS_ON_CPU:
            return LOGITS_AT_A_TIME_ON_CPU // vocab_local
        case "auto":
            tokens = FEWEST_TOKENS if on_cpu else min(TOKENS_ON_GPU, MOST_LOGITS_ON_GPU // vocab_local)
            return max(FEWEST_TOKENS, tokens, LOGITS_AT_A_TIME // vocab_local)
        case "whole":
            return None
        case _:
            assert_never(section.chunk_tokens)


def tokens_at_once(config: Config, tokens: int, vocab_local: int) -> int:
    """Returns the most tokens of a microbatch whose logits exist at the same time.

    Args:
        config: Configuration; a user's own loss function is assumed to need all logits at once.
        tokens: Tokens of the microbatch on one rank.
        vocab_local: Columns of the padded vocabulary on one rank.
    """
    chunk = chunk_tokens(config.loss, vocab_local, on_cpu=config.train.device == "cpu")
    needs_whole = config.loss.chunk_tokens == "auto" and bool(own_functions(config.loss))
    if chunk is None or needs_whole or chunk >= tokens:
        return tokens
    num_chunks = -(-tokens // chunk)  # of about equal length (mtrain/core/loss/vocab_parallel/chunks.py)
    return -(-tokens // num_chunks)


FP32_BYTES, BF16_BYTES = 4, 2
SMALLEST_MOVED_BYTES = 2**18
"""Smallest tensor that train.offload_layers moves; a smaller one takes longer to start than to copy."""


def element_bytes(train: TrainSection) -> int:
    """Returns the bytes of an element of weights and activations."""
    match train.precision:
        case "fp32":
            return FP32_BYTES
        case "bf16" | "fp16":
            return BF16_BYTES
        case _:
            assert_never(train.precision)


class _Kept(NamedTuple):
    """Bytes that a forward pass of a virtual chunk keeps until its backward pass."""

    inputs: int
    """Inputs of recomputed layers, and of a stage whose first layer is offloaded, which its schedule holds; and tensors
    of offloaded layers that are too small to move."""
    whole: int
    """Layers that are neither recomputed nor offloaded, and what follows them."""
    moved: tuple[int, ...]
    """Bytes of each layer that moves to the host."""
    num_staying: int

    @property
    def on_device(self) -> int:
        return self.inputs + self.whole


@dataclass(frozen=True)
class Activations:
    """Activations of a rank, whatever its pipeline stage."""

    config: Config
    layout: Layout

    def most_bytes(self, pp_rank: int) -> int:
        """Estimates the peak on a rank of pipeline rank `pp_rank`.

        It is the largest of several moments: on the last stage the backward pass of the logits, which exist in the
        run's precision and in float32 while everything is kept; and the backward pass of a layer, whose activations are
        recomputed first, or come back from the host next to those of the layer before it.
        """
        largest = max((self.kept(pp_rank, chunk) for chunk in range(self.layout.vpp)), key=lambda each: each.on_device)
        kept = self.chunks_in_flight(pp_rank) * largest.on_device
        # layers that are recomputed or moved come first: their backward pass follows that of the others
        others = kept - largest.whole
        last_back = others + min(largest.whole, self.largest_layer_bytes()) + max(largest.moved, default=0)
        moments = [kept, last_back, others + self.alive_bytes() + sum(sorted(largest.moved)[-2:])]
        passing = self.passing_bytes()
        moments = [moment + passing for moment in moments]
        # if no layer follows, the last one is still being moved when the forward pass is over
        leaving = max(largest.moved, default=0) if largest.num_staying == 0 else 0
        if pp_rank == self.layout.pp - 1:
            moments.append(kept + leaving + self.logits_bytes())
        else:
            moments.append(moments[-1] + leaving)
        return max(moments)

    def host_bytes(self, pp_rank: int) -> int:
        """Estimates the peak on the host of pipeline rank `pp_rank` (train.offload_layers)."""
        if not self.config.train.offload_layers:
            return 0
        largest = max(sum(self.kept(pp_rank, chunk).moved) for chunk in range(self.layout.vpp))
        return self.chunks_in_flight(pp_rank) * largest

    @property
    def tokens(self) -> int:
        """Tokens of one microbatch on this rank."""
        return self.config.train.micro_batch_size * self.config.row_width // self.layout.cp

    @property
    def is_on_cpu(self) -> bool:
        return self.config.train.device == "cpu"

    def chunks_in_flight(self, pp_rank: int) -> int:
        """Most forward passes of a virtual chunk whose backward has not run: the schedule's warm-up and one more."""
        layout, num = self.layout, most_microbatches(self.config, self.layout)
        if layout.vpp == 1:
            return min(layout.pp - pp_rank, num)
        warm_up = 2 * (layout.pp - pp_rank - 1) + (layout.vpp - 1) * layout.pp
        return min(warm_up + 1, num * layout.vpp)

    def kept(self, pp_rank: int, chunk: int) -> _Kept:
        """Estimates what one forward pass of a virtual chunk keeps."""
        model, layout, train = self.config.model, self.layout, self.config.train
        layers = list(layout.layers(model.num_layers, pp_rank, chunk))
        skipped = _recomputed_modules(self.config.train)
        match train.recompute:
            case "none" | "selective":
                num_recomputed, num_depths = 0, 0
            case "full":
                num_recomputed = len(layers) if train.recompute_layers is None else train.recompute_layers
                num_depths = len(model.layers_ahead)
            case _ as never:
                assert_never(never)
        num_moved = min(train.offload_layers or 0, len(layers))
        kept = [
            self._input_bytes() if number < num_recomputed else self._layer_bytes(layer, skipped)
            for number, layer in enumerate(layers[:num_moved])
        ]
        small = [
            sum(_small([self._input_bytes()])) if number < num_recomputed else self._small_bytes(layer)
            for number, layer in enumerate(layers[:num_moved])
        ]
        moved = [whole - stays for whole, stays in zip(kept, small, strict=True)]
        others = alike(model, layers[max(num_recomputed, num_moved) :])
        whole = sum(count * self._layer_bytes(layer, skipped) for layer, count in others.items())
        inputs = len(layers[num_moved:num_recomputed]) * self._input_bytes() + sum(small)
        if moved and layout.stage(pp_rank, chunk) > 0 and not _small([self._input_bytes()]):
            moved[0] -= self._input_bytes()
            inputs += self._input_bytes()
        if layout.stage(pp_rank, chunk) == layout.num_stages - 1:
            whole += self._norm_bytes()  # the final one
            inputs += num_depths * self._input_bytes()
            whole += sum(self._layer_bytes(layer, skipped) for layer in model.layers_ahead[num_depths:])
        return _Kept(inputs, whole, tuple(moved), len(layers) - num_moved)

    def largest_layer_bytes(self) -> int:
        """Estimates what the backward pass of the largest layer needs."""
        layers = set(kinds(self.config.model))
        return max(self._layer_bytes(layer, _recomputed_modules(self.config.train)) for layer in layers)

    def alive_bytes(self) -> int:
        """Estimates what is recomputed at one time."""
        layers = set(kinds(self.config.model))
        match self.config.train.recompute:
            case "none":
                return 0
            case "selective":
                names = _recomputed_modules(self.config.train)
                return max(self._module_bytes(layer).get(name, 0) for layer in layers for name in names)
            case "full":
                return self.largest_layer_bytes()
            case _ as never:
                assert_never(never)

    def passing_bytes(self) -> int:
        """Estimates gradients between the projections of a feed-forward part, and of its weight before float32
        accumulation."""
        model, adapter = self.config.model, self.config.adapter
        wide = max(part.inner_elements(model, self.layout) for part in present(model))
        hidden_twice = 2 * hidden_local(model, self.layout)
        if adapter is None:
            return (self.tokens * (wide + hidden_twice) + wide * model.hidden_size) * element_bytes(self.config.train)
        # what enters fc2 is freed before its gradient has come to the gate only where an adapter has kept it
        widths = 2 if "fc2" in adapter.parts else 3
        gradients = self.tokens * (widths * wide + hidden_twice) * element_bytes(self.config.train)
        return max(gradients, self._matrix_bytes(wide))

    def _matrix_bytes(self, wide: int) -> int:
        """Estimates copies of the first projection next to frozen weights (widened, or under DoRA summed with its pair
        for row lengths), minus tensors that do not exist yet."""
        config, model = self.config, self.config.model
        assert config.adapter is not None, "asked only where weights are frozen"
        copies = int(holds_narrow(config.adapter, config.train.precision)) + (2 if config.adapter.has_magnitudes else 0)
        rows = (2 if model.is_gated else 1) * wide
        return copies * rows * model.hidden_size * FP32_BYTES - 2 * self.tokens * wide * element_bytes(config.train)

    def logits_bytes(self) -> int:
        """Estimates logits in the run's precision and in float32, then their gradient next to the table's."""
        model, size = self.config.model, element_bytes(self.config.train)
        vocab_local = output_columns(model, self.layout.tp)
        table, at_once = vocab_local * model.hidden_size, tokens_at_once(self.config, self.tokens, vocab_local)
        learned, copied = (1, 0) if self.config.adapter is None else self._frozen_table()
        if at_once < self.tokens:
            return self._chunk_bytes(at_once * vocab_local) + (learned + copied) * table * FP32_BYTES
        count = model.num_predictions * self.tokens * vocab_local
        capped = count * self._capped_bytes()
        return count * size + capped + max(count * FP32_BYTES, learned * table * size) + copied * table * size

    def _frozen_table(self) -> tuple[int, int]:
        """Counts (gradients, copies) of the output layer's table in a microbatch; a low-rank pair next to it makes one
        of each."""
        config = self.config
        assert config.adapter is not None, "asked only where weights are frozen"
        if learns_output(config.model, config.adapter):  # what learns is never narrow
            return 1, 0
        pairs = int("output" in config.adapter.parts)
        return pairs, pairs + int(holds_narrow(config.adapter, config.train.precision))

    def _chunk_bytes(self, num_logits: int) -> int:
        """Estimates a chunk's logits in the run's precision and in float32, their gradient, and the gradient of all
        hidden states, gathered over TP; masks reduce it."""
        model, size = self.config.model, element_bytes(self.config.train)
        hidden = model.num_predictions * self.tokens * model.hidden_size * size
        return num_logits * (2 * size + FP32_BYTES + self._capped_bytes()) + hidden * (2 if self.layout.sp else 1)

    def _capped_bytes(self) -> int:
        """Returns the bytes of a capped logit: its tanh, and that times the cap."""
        return 0 if self.config.model.logit_softcap is None else 2 * FP32_BYTES

    def _input_bytes(self) -> int:
        return self.tokens * hidden_local(self.config.model, self.layout) * element_bytes(self.config.train)

    def _layer_bytes(self, layer: int, skipped: Sequence[str]) -> int:
        model, layout, size = self.config.model, self.layout, element_bytes(self.config.train)
        adapter = self.config.adapter
        parts = [part for part in LAYER_PARTS if part.is_in(model, layer)]
        elements = sum(part.kept_elements(model, layout) for part in parts)
        if adapter is not None:
            elements += kept_in_attention(model, adapter, layout, layer)
            elements += kept_in_feed_forward(model, adapter, layout, layer)
            elements -= spared_in_norms(model, adapter, layout, layer)
            elements -= sum(part.spared_elements(model, layout, adapter.parts, not self.is_on_cpu) for part in parts)
        norms = sum(part.num_hidden_norms for part in parts)
        modules = self._module_bytes(layer)
        # `elements` include feed-forward parts, but not what core attention keeps for itself
        core = modules["core_attn"] - sum(modules[name] for name in modules.keys() & set(skipped))
        return self.tokens * elements * size + norms * self._unfused_norm_bytes() + core

    def _small_bytes(self, layer: int) -> int:
        model, layout, size = self.config.model, self.layout, element_bytes(self.config.train)
        parts = [part for part in LAYER_PARTS if part.is_in(model, layer)]
        widths = [width for part in parts for width in part.narrow_tensors(model, layout)]
        # inputs of norms, in float32 and next to normalised ones where torch has no fused kernel
        is_unfused = self._unfused_norm_bytes() > 0
        hidden = self.tokens * hidden_local(model, layout) * (FP32_BYTES if is_unfused else size)
        of_norms = [hidden] * ((1 + is_unfused) * sum(part.num_hidden_norms for part in parts))
        return sum(_small([*(self.tokens * width * size for width in widths), *of_norms]))

    def _module_bytes(self, layer: int) -> dict[str, int]:
        """Returns what each module of a layer keeps between input and output, by its name in
        train.recompute_modules."""
        model, layout, size = self.config.model, self.layout, element_bytes(self.config.train)
        parts = [part for part in LAYER_PARTS if part.is_in(model, layer)]
        core = sum(part.core_elements(model, layout, on_gpu=not self.is_on_cpu) for part in parts)
        wide = sum(part.wide_core_elements(model, layout) for part in parts)
        found = {"core_attn": self.tokens * (core * size + wide * FP32_BYTES) + self._mask_bytes()}
        for part in parts:
            for name, elements in part.module_elements(model, layout).items():
                found[name] = self.tokens * elements * size
                if name == "mlp" and (adapter := self.config.adapter) is not None:
                    kept = kept_in_feed_forward(model, adapter, layout, layer)
                    spared = part.spared_elements(model, layout, adapter.parts, not self.is_on_cpu)
                    found[name] += self.tokens * (kept - spared) * size
        return found

    def _mask_bytes(self) -> int:
        """Estimates the mask that a CPU needs for the positions of a rank's queries; GPU kernels need none."""
        config, cp = self.config, self.layout.cp
        if not self.is_on_cpu or cp == 1 or config.data.isolate_documents:
            return 0
        match self.layout.cp_comm:
            case "ulysses" | "ring":
                return 0
            case "allgather":
                seq = config.row_width
                run = seq // (2 * cp)
                return run * (seq + run) * element_bytes(config.train)
            case _:
                assert_never(self.layout.cp_comm)

    def _norm_bytes(self) -> int:
        return 2 * self._input_bytes() + self._unfused_norm_bytes()

    def _unfused_norm_bytes(self) -> int:
        """Counts a norm's float32 input and normalised input where torch has no fused kernel; a frozen weight needs
        only the first."""
        model = self.config.model
        if model.norm == "layernorm" or not (self.is_on_cpu or model.zero_centered_norm):
            return 0
        if self.is_on_cpu and self.config.train.precision == "fp32":  # a function of our own keeps the input alone
            return 0
        adapter = self.config.adapter
        normalised = FP32_BYTES if adapter is None or "norms" in adapter.modules_to_save else 0
        each = FP32_BYTES + normalised - element_bytes(self.config.train)
        return self.tokens * hidden_local(model, self.layout) * each


def _small(tensors: Sequence[int]) -> list[int]:
    return [tensor for tensor in tensors if tensor < SMALLEST_MOVED_BYTES]


def _recomputed_modules(train: TrainSection) -> tuple[str, ...]:
    """Returns the modules that are recomputed in layers that are not recomputed entirely."""
    match train.recompute:
        case "none" | "full":
            return ()
        case "selective":
            given = train.recompute_modules
            return ("core_attn",) if given is None else given
        case _:
            assert_never(train.recompute)


_BEHIND_INPUT_NORM = frozenset((*GROUPS["qkv"], "qkv_proj", *GROUPS["in_proj"], "in_proj_qkvz", "in_proj_ba"))
_BEHIND_INPUT_NORM -= {"q_b_proj", "kv_b_proj"}  # these read latents
_BEHIND_OUTPUT_NORM = frozenset((*GROUPS["fc1"], "gate_up_proj", "experts"))


def spared_in_norms(model: ModelSection, adapter: AdapterSection, layout: Layout, layer: int) -> int:
    """Counts the elements per token of norm outputs that only frozen weights would have read."""
    if model.post_norm:
        return 0
    readers = {
        _BEHIND_INPUT_NORM: model.attention(layer) != "none",
        _BEHIND_OUTPUT_NORM: model.has_feed_forward(layer),
    }
    adapted = {each.part for each in in_layer(model, adapter, layer)}
    read = [bool(adapted & names) for names, is_there in readers.items() if is_there]
    return read.count(False) * hidden_local(model, layout)


def kept_in_attention(model: ModelSection, adapter: AdapterSection, layout: Layout, layer: int) -> int:
    """Counts the elements per token that adapters of attention keep."""
    own = [each for each in in_layer(model, adapter, layer) if "self_attention" in each.linear]
    return _kept(model, adapter, layout, own)


def kept_in_feed_forward(model: ModelSection, adapter: AdapterSection, layout: Layout, layer: int) -> int:
    """Counts the elements per token that adapters of the feed-forward part keep."""
    own = [each for each in in_layer(model, adapter, layer) if "self_attention" not in each.linear]
    return _kept(model, adapter, layout, own)


def _kept(model: ModelSection, adapter: AdapterSection, layout: Layout, matrices: list[AdaptedMatrix]) -> int:
    """Counts A x of each pair; for DoRA also both summands of each adapted module's output, for the gradient of its
    magnitudes."""
    found = 0
    for each in matrices:
        assert each.linear != EMBEDDING, "no part of a layer"
        is_local = layout.sp and (each.is_row_parallel or bool(each.num_experts))
        found += each.num_chosen * adapter.rank_of(each.part) // (layout.tp if is_local else 1)
    if adapter.has_magnitudes:
        outputs = {matrix.linear: _outputs(model, layout, matrix) for matrix in matrices}
        found += 2 * sum(outputs.values())
    return found


def _outputs(model: ModelSection, layout: Layout, matrix: AdaptedMatrix) -> int:
    """Returns the outputs of the whole module; some of its parts may have no adapter."""
    if matrix.is_row_parallel:
        return hidden_local(model, layout)
    fused = (each.rows for part in present(model) for each in part.adapted(model) if each.linear == matrix.linear)
    return sum(fused) // (1 if matrix.is_replicated else layout.tp)
