"""Activation memory of a rank: tensors saved for the backward pass, and temporary tensors at the two heaviest moments.

Counts tensors of our own layers (`model.backend=torch`); TransformerEngine's layers save less. A projection saves its
input only for the gradient of its weight, so a frozen one saves none; an adapter next to it saves the same input for
the gradient of A.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, assert_never

from mtrain.arch.adapters import holds_narrow, in_layer, learns_output, trained_with_frozen
from mtrain.arch.features import LAYER_PARTS, alike, kinds, present
from mtrain.arch.features.feature import EMBEDDING, AdaptedMatrix, hidden_local
from mtrain.arch.features.outside import num_passed_features, patches_of_tokens, recomputes_layers
from mtrain.arch.layout import Layout, most_microbatches
from mtrain.arch.parameters import FP32_BYTES, element_bytes, output_columns
from mtrain.config import Config
from mtrain.config.schema.adapter import GROUPS, AdapterSection
from mtrain.config.schema.loss import CONSUMING_LOSSES, LossSection, own_functions
from mtrain.config.schema.model import ModelSection
from mtrain.config.schema.train import TrainSection
from mtrain.config.towers import description_of

FEWEST_TOKENS = 1024
"""Smallest number of tokens in an automatic chunk: with fewer, matrix products of GPUs are memory-bound."""
TOKENS_ON_GPU = 4096
"""Tokens of an automatic chunk on a GPU: each chunk reads and writes the float32 gradient of the whole table, which at
this size takes a quarter of the product's time."""
MOST_LOGITS_ON_GPU = 2**29
"""Largest number of logits in such a chunk: 4 GiB in half precision, with their exponentials and gradient."""
LOGITS_AT_A_TIME = 2**26
"""Logits of an automatic chunk, if they hold more tokens: 256 MiB in float32."""

LOGITS_AT_A_TIME_ON_CPU = 2**21
"""Logits of an automatic chunk on a CPU: 8 MiB in float32, which malloc reuses; the kernel zeroes larger blocks."""
FEWEST_TOKENS_ON_CPU = 256
"""Smallest number of tokens in such a chunk on a CPU. With fewer, the limits of GPUs apply, because each chunk reads
and writes the table's whole gradient."""


def chunk_tokens(section: LossSection, vocab_local: int, on_cpu: bool) -> int | None:
    """Returns the largest number of tokens in a chunk; None if all logits are computed at once.

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
    """Returns how many of a microbatch's tokens have logits at the same time.

    Args:
        config: Configuration; its user's own loss functions are assumed to need all logits at once.
        tokens: Tokens of the microbatch on one rank.
        vocab_local: Columns of the padded vocabulary on one rank.
    """
    chunk = chunk_tokens(config.loss, vocab_local, on_cpu=config.train.device == "cpu")
    needs_whole = config.loss.chunk_tokens == "auto" and bool(own_functions(config.loss))
    if chunk is None or needs_whole or chunk >= tokens:
        return tokens
    num_chunks = -(-tokens // chunk)  # of about equal length (mtrain/core/loss/vocab_parallel/chunks.py)
    return -(-tokens // num_chunks)


SMALLEST_MOVED_BYTES = 2**18
"""Smallest tensor that train.offload_layers moves; starting a transfer takes longer than copying a smaller one."""


class _ChunkActivations(NamedTuple):
    """Bytes that a forward pass of a virtual chunk saves until its backward pass."""

    inputs: int
    """Inputs of recomputed layers, the input of a stage whose first layer is offloaded (which the schedule holds), and
    tensors of offloaded layers that are too small to move."""
    whole: int
    """Layers that are neither recomputed nor offloaded, the final norm and MTP layers."""
    moved: tuple[int, ...]
    """Bytes of each layer that moves to the host."""
    num_staying: int
    again: int
    """Most that a module repeated by selective recomputation adds in backward."""

    @property
    def on_device(self) -> int:
        return self.inputs + self.whole


@dataclass(frozen=True)
class Activations:
    """Activations of the ranks of a run."""

    config: Config
    layout: Layout
    given_patches: int | None = None
    """Most patches of a microbatch that a rank encodes; None: as many as full rows of images have."""

    def most_bytes(self, pp_rank: int, gathered_in_layers: int = 0, gathered_for_logits: int = 0) -> int:
        """Estimates the peak of activations on a rank of pipeline rank `pp_rank`.

        Args:
            pp_rank: Rank in the pipeline.
            gathered_in_layers: Bytes that exist only in the backward pass of layers.
            gathered_for_logits: Bytes that exist only in the backward pass of the logits.

        The peak is the largest of several moments: on the last stage the backward pass of the logits, which exist in
        the run's precision and in float32 while all activations are saved; and the backward pass of a layer, whose
        activations are recomputed first, or return from the host next to those of the previous layer.
        """
        chunks = [self.chunk_activations(pp_rank, chunk) for chunk in range(self.layout.vpp)]
        largest = max(chunks, key=lambda chunk: chunk.on_device)
        all_kept = self.chunks_in_flight(pp_rank) * largest.on_device
        # recomputed and moved layers come first, so their backward pass follows that of the other layers
        without_last = all_kept - largest.whole
        last_back = without_last + min(largest.whole, self.largest_layer_bytes()) + max(largest.moved, default=0)
        moments = [all_kept, last_back, without_last + self.alive_bytes() + sum(sorted(largest.moved)[-2:])]
        moments.append(all_kept + largest.again)
        passing = self.passing_bytes() + gathered_in_layers
        moments = [moment + passing for moment in moments]
        # if no layer follows, the last one is still being moved when the forward pass ends
        leaving = max(largest.moved, default=0) if largest.num_staying == 0 else 0
        if pp_rank == self.layout.pp - 1:
            moments.append(all_kept + leaving + self.logits_bytes() + gathered_for_logits)
        else:
            moments.append(moments[-1] + leaving)
        if pp_rank > 0:
            return max(moments)
        in_flight = self.chunks_in_flight(pp_rank)
        kept, passing = self._tower_bytes()
        return max(max(moments) + in_flight * kept, (in_flight - 1) * (largest.on_device + kept) + kept + passing)

    def host_bytes(self, pp_rank: int) -> int:
        """Estimates the peak on the host of pipeline rank `pp_rank` (train.offload_layers)."""
        if not self.config.train.offload_layers:
            return 0
        largest = max(sum(self.chunk_activations(pp_rank, chunk).moved) for chunk in range(self.layout.vpp))
        return self.chunks_in_flight(pp_rank) * largest

    @property
    def adapter(self) -> AdapterSection | None:
        """What is trained on a frozen language model; see `trained_with_frozen`."""
        return trained_with_frozen(self.config.model, self.config.adapter)

    @property
    def tokens(self) -> int:
        """Tokens of one microbatch on this rank."""
        return self.config.train.micro_batch_size * self.config.row_width // self.layout.cp

    @property
    def patches(self) -> int:
        """Most patches of a microbatch that a rank encodes."""
        config = self.config
        if self.given_patches is not None:
            return self.given_patches
        of_row, _ = patches_of_tokens(config.model.vision, config.data, config.row_width)
        return -(-config.train.micro_batch_size * of_row // self.layout.num_sharing_images)

    def _tower_bytes(self) -> tuple[int, int]:
        """Estimates what a forward pass of the vision tower saves until its backward pass, and what exists only during
        either."""
        model, train = self.config.model, self.config.train
        vision, size = model.vision, element_bytes(train)
        if vision is None:
            return 0, 0
        tower, is_half = description_of(vision), size < FP32_BYTES
        kept = tower.kept_patch_elements(vision, model.hidden_size, is_half)
        passing = tower.passing_patch_elements(vision, is_half)
        if recomputes_layers(vision, train):
            # beyond their inputs, layers save what they do only while each runs again
            again = tower.kept_layer_elements(vision, is_half) - vision.hidden_size
            kept, passing = kept - vision.num_layers * again, passing + again
        return self.patches * kept * size, self.patches * passing * size

    @property
    def is_on_cpu(self) -> bool:
        return self.config.train.device == "cpu"

    def chunks_in_flight(self, pp_rank: int) -> int:
        """Returns the most forward passes whose backward pass has not run: the schedule's warm-up and one more."""
        layout, num = self.layout, most_microbatches(self.config, self.layout)
        if layout.vpp == 1:
            return min(layout.pp - pp_rank, num)
        warm_up = 2 * (layout.pp - pp_rank - 1) + (layout.vpp - 1) * layout.pp
        return min(warm_up + 1, num * layout.vpp)

    def chunk_activations(self, pp_rank: int, chunk: int) -> _ChunkActivations:
        """Estimates the activations that one forward pass of a virtual chunk saves."""
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
        layer_bytes = [
            self._input_bytes() if number < num_recomputed else self._layer_bytes(layer, skipped)
            for number, layer in enumerate(layers[:num_moved])
        ]
        staying_bytes = [
            sum(_small([self._input_bytes()])) if number < num_recomputed else self._small_bytes(layer)
            for number, layer in enumerate(layers[:num_moved])
        ]
        moved = [whole - stays for whole, stays in zip(layer_bytes, staying_bytes, strict=True)]
        whole_layers = alike(model, layers[max(num_recomputed, num_moved) :])
        whole = sum(count * self._layer_bytes(layer, skipped) for layer, count in whole_layers.items())
        inputs = len(layers[num_moved:num_recomputed]) * self._input_bytes() + sum(staying_bytes)
        if moved and layout.stage(pp_rank, chunk) > 0 and not _small([self._input_bytes()]):
            moved[0] -= self._input_bytes()
            inputs += self._input_bytes()
        inputs += self._features_bytes(layout.stage(pp_rank, chunk))
        if layout.stage(pp_rank, chunk) == layout.num_stages - 1:
            whole += self._norm_bytes()  # the final norm
            inputs += num_depths * self._input_bytes()
            whole += sum(self._layer_bytes(layer, skipped) for layer in model.layers_ahead[num_depths:])
        again = self._again_bytes(layers) if train.recompute == "selective" else 0
        return _ChunkActivations(inputs, whole, tuple(moved), len(layers) - num_moved, again)

    def _again_bytes(self, layers: Sequence[int]) -> int:
        """Estimates the most that a repeated module of a layer adds in backward, when later layers are done, besides
        `passing_bytes`."""
        names, kind_of = set(_recomputed_modules(self.config.train)), kinds(self.config.model)
        # what passes between the projections of a feed-forward part is gone when attention runs again
        passing = {"core_attn": self.passing_bytes()}
        left, most, freed = {kind_of[layer] for layer in layers}, 0, 0
        for layer in reversed(layers):
            if kind_of[layer] in left:
                left.remove(kind_of[layer])
                sizes = self._module_bytes(layer).items()
                most = max([most, *(size - passing.get(name, 0) - freed for name, size in sizes if name in names)])
            freed += self._layer_bytes(layer, [*names]) if left else 0
        return most

    def _features_bytes(self, stage: int) -> int:
        """Estimates the features of images next to the hidden states: deeper ones, which recomputed layers of the first
        stage add, and those that MTP depths read, which later stages receive."""
        model = self.config.model
        if model.vision is None:
            return 0
        if stage > 0:
            return num_passed_features(model) * self._input_bytes()
        is_added_again = self.config.train.recompute == "full" and model.vision.deepstack
        return (1 + len(model.vision.deepstack)) * self._input_bytes() if is_added_again else 0

    def largest_layer_bytes(self) -> int:
        """Estimates the activations of the largest layer."""
        layers = set(kinds(self.config.model))
        return max(self._layer_bytes(layer, _recomputed_modules(self.config.train)) for layer in layers)

    def alive_bytes(self) -> int:
        """Estimates the activations of a recomputed layer."""
        match self.config.train.recompute:
            case "none" | "selective":
                return 0
            case "full":
                return self.largest_layer_bytes()
            case _ as never:
                assert_never(never)

    def passing_bytes(self) -> int:
        """Estimates the gradients between the projections of a feed-forward part, and the gradient of its weight before
        float32 accumulation."""
        model, adapter = self.config.model, self.adapter
        wide = max(part.inner_elements(model, self.layout) for part in present(model))
        hidden_twice = 2 * hidden_local(model, self.layout)
        if adapter is None:
            return (self.tokens * (wide + hidden_twice) + wide * model.hidden_size) * element_bytes(self.config.train)
        # the input of fc2 is freed before the gate's gradient exists only if an adapter saved it
        widths = 2 if "fc2" in adapter.parts else 3
        gradients = self.tokens * (widths * wide + hidden_twice) * element_bytes(self.config.train)
        return max(gradients, self._matrix_bytes(wide))

    def _matrix_bytes(self, wide: int) -> int:
        """Estimates copies of the first projection's frozen weight (in float32, and for DoRA its sum with B A for row
        lengths), minus tensors that do not exist yet at that moment."""
        config, model, adapter = self.config, self.config.model, self.adapter
        assert adapter is not None, "only called with frozen weights"
        copies = int(holds_narrow(adapter, config.train.precision)) + (2 if adapter.has_magnitudes else 0)
        rows = (2 if model.is_gated else 1) * wide
        return copies * rows * model.hidden_size * FP32_BYTES - 2 * self.tokens * wide * element_bytes(config.train)

    def logits_bytes(self) -> int:
        """Estimates the logits in the run's precision and in float32, then their gradient next to the table's."""
        model, size = self.config.model, element_bytes(self.config.train)
        vocab_local = output_columns(model, self.layout.tp)
        table, at_once = vocab_local * model.hidden_size, tokens_at_once(self.config, self.tokens, vocab_local)
        learned, copied = (1, 0) if self.adapter is None else self._frozen_table()
        if at_once < self.tokens:
            chunk = self._chunk_bytes(at_once * vocab_local)
            if learned and self._adds_gradient:
                # instead of the table's gradient, backward returns memory that nothing fills
                chunk, learned = max(chunk, table * size), 0
            return self._hidden_gradient_bytes() + chunk + (learned + copied) * table * FP32_BYTES
        count = model.num_predictions * self.tokens * vocab_local
        capped = count * self._capped_bytes()
        return count * size + capped + max(count * FP32_BYTES, learned * table * size) + copied * table * size

    def _frozen_table(self) -> tuple[int, int]:
        """Returns (gradients, copies) of the output layer's table in a microbatch; a low-rank pair adds one of each."""
        config, adapter = self.config, self.adapter
        assert adapter is not None, "only called with frozen weights"
        if learns_output(config.model, adapter):  # trained tables are never narrow
            return 1, 0
        pairs = int("output" in adapter.parts)
        return pairs, pairs + int(holds_narrow(adapter, config.train.precision))

    def _chunk_bytes(self, num_logits: int) -> int:
        """Estimates a chunk's logits in the run's precision and in float32, and their gradient."""
        size = element_bytes(self.config.train)
        return num_logits * (size if self._consumes_logits else 2 * size + FP32_BYTES + self._capped_bytes())

    def _hidden_gradient_bytes(self) -> int:
        """Estimates the gradient of all hidden states, gathered over TP, as if no token were masked."""
        model = self.config.model
        hidden = model.num_predictions * self.tokens * model.hidden_size * element_bytes(self.config.train)
        return hidden * (2 if self.layout.sp else 1)

    @property
    def _adds_gradient(self) -> bool:
        """Says whether the loss adds the gradient of the table to its buffer; a low-rank pair has none."""
        model = self.config.model
        has_buffer = self.layout.shard == "optimizer" and model.backend != "te"  # core/layers/build.py
        is_fused = has_buffer and self.config.fuses_weight_gradients
        return is_fused and (self.adapter is None or learns_output(model, self.adapter))

    @property
    def _consumes_logits(self) -> bool:
        """Says whether the exponentials and gradient of a chunk in float32 overwrite its logits."""
        config = self.config
        is_alone = config.loss.function in CONSUMING_LOSSES and not config.loss.side_terms
        return is_alone and config.model.logit_softcap is None and config.train.precision == "fp32"

    def _capped_bytes(self) -> int:
        """Returns the bytes per logit of the softcap: the tanh, and its product with the cap."""
        return 0 if self.config.model.logit_softcap is None else 2 * FP32_BYTES

    def _input_bytes(self) -> int:
        return self.tokens * hidden_local(self.config.model, self.layout) * element_bytes(self.config.train)

    def _layer_bytes(self, layer: int, skipped: Sequence[str]) -> int:
        model, layout, size = self.config.model, self.layout, element_bytes(self.config.train)
        adapter = self.adapter
        parts = [part for part in LAYER_PARTS if part.is_in(model, layer)]
        elements = sum(part.kept_elements(model, layout) for part in parts)
        if adapter is not None:
            elements += kept_in_attention(model, adapter, layout, layer)
            elements += kept_in_feed_forward(model, adapter, layout, layer)
            elements -= spared_in_norms(model, adapter, layout, layer)
            elements -= sum(part.spared_elements(model, layout, adapter.parts, not self.is_on_cpu) for part in parts)
        norms = sum(part.num_hidden_norms for part in parts)
        modules = self._module_bytes(layer)
        # `elements` includes feed-forward parts, but not what core attention saves internally
        core = modules["core_attn"] - sum(modules[name] for name in modules.keys() & set(skipped))
        return self.tokens * elements * size + norms * self._unfused_norm_bytes() + core

    def _small_bytes(self, layer: int) -> int:
        model, layout, size = self.config.model, self.layout, element_bytes(self.config.train)
        parts = [part for part in LAYER_PARTS if part.is_in(model, layer)]
        widths = [width for part in parts for width in part.narrow_tensors(model, layout)]
        # inputs of norms; without a fused kernel of torch they are float32, and normalised ones are saved as well
        is_unfused = self._unfused_norm_bytes() > 0
        hidden = self.tokens * hidden_local(model, layout) * (FP32_BYTES if is_unfused else size)
        of_norms = [hidden] * ((1 + is_unfused) * sum(part.num_hidden_norms for part in parts))
        return sum(_small([*(self.tokens * width * size for width in widths), *of_norms]))

    def _module_bytes(self, layer: int) -> dict[str, int]:
        """Returns module in train.recompute_modules -> bytes that it saves between its input and output in a layer."""
        model, layout, size = self.config.model, self.layout, element_bytes(self.config.train)
        parts = [part for part in LAYER_PARTS if part.is_in(model, layer)]
        core = sum(part.core_elements(model, layout, on_gpu=not self.is_on_cpu) for part in parts)
        wide = sum(part.wide_core_elements(model, layout) for part in parts)
        sizes = {"core_attn": self.tokens * (core * size + wide * FP32_BYTES) + self._mask_bytes()}
        for part in parts:
            for name, elements in part.module_elements(model, layout).items():
                sizes[name] = self.tokens * elements * size
                if name == "mlp" and (adapter := self.adapter) is not None:
                    adapter_elements = kept_in_feed_forward(model, adapter, layout, layer)
                    spared = part.spared_elements(model, layout, adapter.parts, not self.is_on_cpu)
                    sizes[name] += self.tokens * (adapter_elements - spared) * size
        return sizes

    def _mask_bytes(self) -> int:
        """Estimates the mask that a CPU needs for the positions of a rank's queries; GPU kernels have none."""
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
        """Estimates the additional bytes of a norm without a fused kernel: its float32 input and normalised input; a
        frozen norm saves only the input."""
        model = self.config.model
        if model.norm == "layernorm" or not (self.is_on_cpu or model.zero_centered_norm):
            return 0
        if self.is_on_cpu and self.config.train.precision == "fp32":  # our own function saves only the input
            return 0
        adapter = self.adapter
        normalised = FP32_BYTES if adapter is None or "norms" in adapter.modules_to_save else 0
        bytes_per_element = FP32_BYTES + normalised - element_bytes(self.config.train)
        return self.tokens * hidden_local(model, self.layout) * bytes_per_element


def _small(tensors: Sequence[int]) -> list[int]:
    return [tensor for tensor in tensors if tensor < SMALLEST_MOVED_BYTES]


def _recomputed_modules(train: TrainSection) -> tuple[str, ...]:
    """Returns the modules that selective recomputation repeats."""
    match train.recompute:
        case "none" | "full":
            return ()
        case "selective":
            modules = train.recompute_modules
            return ("core_attn",) if modules is None else modules
        case _:
            assert_never(train.recompute)


_BEHIND_INPUT_NORM = frozenset((*GROUPS["qkv"], "qkv_proj", *GROUPS["in_proj"], "in_proj_qkvz", "in_proj_ba"))
_BEHIND_INPUT_NORM -= {"q_b_proj", "kv_b_proj"}  # these read latents
_BEHIND_OUTPUT_NORM = frozenset((*GROUPS["fc1"], "gate_up_proj", "experts"))


def spared_in_norms(model: ModelSection, adapter: AdapterSection, layout: Layout, layer: int) -> int:
    """Counts the elements per token of norm outputs that are not saved, because only frozen weights read them."""
    if model.post_norm:
        return 0
    readers = {
        _BEHIND_INPUT_NORM: model.attention(layer) != "none",
        _BEHIND_OUTPUT_NORM: model.has_feed_forward(layer),
    }
    adapted = {matrix.part for matrix in in_layer(model, adapter, layer)}
    read = [bool(adapted & names) for names, exists in readers.items() if exists]
    return read.count(False) * hidden_local(model, layout)


def kept_in_attention(model: ModelSection, adapter: AdapterSection, layout: Layout, layer: int) -> int:
    """Counts the elements per token that adapters of attention save."""
    matrices = [matrix for matrix in in_layer(model, adapter, layer) if "self_attention" in matrix.linear]
    return _adapter_elements(model, adapter, layout, matrices)


def kept_in_feed_forward(model: ModelSection, adapter: AdapterSection, layout: Layout, layer: int) -> int:
    """Counts the elements per token that adapters of the feed-forward part save."""
    matrices = [matrix for matrix in in_layer(model, adapter, layer) if "self_attention" not in matrix.linear]
    return _adapter_elements(model, adapter, layout, matrices)


def _adapter_elements(
    model: ModelSection, adapter: AdapterSection, layout: Layout, matrices: list[AdaptedMatrix]
) -> int:
    """Counts the elements of each pair's A x; for DoRA also both summands of each adapted module's output, for the
    gradient of its magnitudes."""
    elements = 0
    for adapted in matrices:
        assert adapted.linear != EMBEDDING, "the embedding is outside the layers"
        is_local = layout.sp and (adapted.is_row_parallel or bool(adapted.num_experts))
        elements += adapted.num_chosen * adapter.rank_of(adapted.part) // (layout.tp if is_local else 1)
    if adapter.has_magnitudes:
        outputs = {matrix.linear: _outputs(model, layout, matrix) for matrix in matrices}
        elements += 2 * sum(outputs.values())
    return elements


def _outputs(model: ModelSection, layout: Layout, matrix: AdaptedMatrix) -> int:
    """Returns the number of a module's outputs on a rank, including parts without an adapter."""
    if matrix.is_row_parallel:
        return hidden_local(model, layout)
    fused = (
        adapted.rows for part in present(model) for adapted in part.adapted(model) if adapted.linear == matrix.linear
    )
    return sum(fused) // (1 if matrix.is_replicated else layout.tp)
