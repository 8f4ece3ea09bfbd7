"""One stage of a language model: embedding, transformer block, MTP depths, output.

Consists of megatron-core's modules, but replaces its GPTModel, which is deprecated from 0.19 on, derives positions from
lengths, and computes losses as means. Names of parameters and keys of checkpoints are the same.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, assert_never

import torch
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import ModelType
from megatron.core.transformer.transformer_block import TransformerBlock
from torch import Tensor

from mtrain.arch import padded_vocab_size
from mtrain.arch.features.outside import num_passed_features
from mtrain.config.schema.model import ModelSection
from mtrain.config.schema.output import HeadOutput, TokenOutput
from mtrain.core.batch.batch import Microbatch
from mtrain.core.layers.attention.full_width_norm import FullWidthNormAttention
from mtrain.core.layers.attention.key_set import with_image_ends
from mtrain.core.layers.attention.rotary import (
    Rotary,
    TemperedRotary,
    ThreeAxesRotary,
    TwoBaseRotary,
    inverse_frequencies,
    local_frequencies,
    take_angles_by_layer,
)
from mtrain.core.layers.attention.rotating import RotatingAttention
from mtrain.core.layers.layer_parts import Backend, rotation_factor
from mtrain.core.layers.layer_spec import block_spec
from mtrain.core.layers.moe.router import router_marks
from mtrain.core.layers.mtp import Depths
from mtrain.core.layers.output_layer import DeferredLogits, Logits, OutputLayer, ScoreHead
from mtrain.core.layers.own_parameters import ShardedOffsets
from mtrain.core.layers.products import EmbeddingTable
from mtrain.core.layers.vision import PlacedFeatures, VisionTower
from mtrain.core.ranks.groups import Groups


class LanguageModel(LanguageModule):
    """One stage of a language model; computes neither logits nor losses.

    megatron-core's schedules and gradient reductions read `model_type`, `pre_process`, `post_process`, `vp_stage`,
    `mtp_process`, `share_embeddings_and_output_weights` and `shared_embedding_or_output_weight`.
    """

    looks_ahead = True
    """Whether MTP depths run, if the model has them and the batch has their tokens."""
    replays = True
    """Whether layers replay the choices in a batch."""
    has_adapters = False
    """Whether only adapters (and parameters selected by `learns_whole`) are trained, here or on other stages."""
    learns_whole: Callable[[str], bool] | None = None
    """Says by global name whether a parameter is fully trained along with adapters; None: none is."""
    base_fingerprint: str | None = None
    """Fingerprint of the frozen weights; None until they are loaded (mtrain/checkpoint/state/base.py)."""

    def __init__(
        self,
        model: ModelSection,
        config: TransformerConfig,
        backend: Backend,
        groups: Groups,
        vp_stage: int | None,
    ) -> None:
        """Builds chunk `vp_stage` of this rank, or its only chunk if that is None."""
        super().__init__(config=config, pg_collection=groups.collection)
        layout = groups.layout
        stage = groups.pp_rank + (vp_stage or 0) * layout.pp  # virtual stages cycle through the ranks
        self.model_type = ModelType.encoder_or_decoder
        self.vp_stage = vp_stage
        self.pre_process, self.post_process = stage == 0, stage == layout.num_stages - 1
        self.mtp_process = self.post_process and bool(model.layers_ahead)
        self.share_embeddings_and_output_weights = model.output.is_tied
        rows = padded_vocab_size(model, layout.tp)
        if self.pre_process or self.mtp_process:
            self.embedding = LanguageModelEmbedding(config, rows, 0, "rope", tp_group=groups.collection.tp)
        if self.pre_process and model.vision is not None:
            self.vision = VisionTower(model.vision, model.hidden_size, config, groups)
        self._received: Tensor | None = None  # from the stage before
        self._passes_features = num_passed_features(model) > 0 and layout.num_stages > 1
        self._sees_ahead = model.has_bidirectional_images
        self._scales_embeddings = model.scale_embeddings
        # the dtype of activations, since parameters of a frozen base may be narrower
        self.rotary = _rotary(model, torch.promote_types(config.pipeline_dtype, torch.float32))
        layers = layout.layers(model.num_layers, groups.pp_rank, vp_stage or 0)
        self.decoder = TransformerBlock(
            config,
            block_spec(model, backend, layers),
            pre_process=self.pre_process,
            post_process=self.post_process,
            pg_collection=groups.collection,
            vp_stage=vp_stage,
        )
        if self.pre_process and model.vision is not None:
            num_deep = len(model.vision.deepstack)
            for number in range(num_deep):
                hook = functools.partial(_with_features, number, number == num_deep - 1)
                self.decoder.layers[number].register_forward_hook(hook, with_kwargs=True)
        if self.mtp_process:
            self.mtp = Depths(model, config, backend, groups.collection, vp_stage)
        if self.post_process:
            self.output_layer = self._output(model, rows)
        if self.pre_process or self.post_process:
            self.setup_embeddings_and_output_layer()
        if config.gradient_accumulation_fusion:
            self._fuse_tables()
        if isinstance(self.rotary, TwoBaseRotary):
            take_angles_by_layer(self, self.rotary)
        for module in self.modules():
            if isinstance(module, RotatingAttention | FullWidthNormAttention):
                module.rotation_factor, module.rotary_size = rotation_factor(model), model.rotary_size
        for module in self.modules():
            # modules of TransformerEngine
            if hasattr(module, "finish_init"):
                module.finish_init(None)

    def _fuse_tables(self) -> None:
        """Lets every use of a table add its own gradient; megatron-core leaves that of its rows to autograd."""
        if hasattr(self, "embedding"):
            # its class, since megatron-core takes no other one
            self.embedding.word_embeddings.__class__ = EmbeddingTable
        if (table := self._table()) is not None:
            table.weight.zero_out_wgrad = False

    def _output(self, model: ModelSection, padded: int) -> OutputLayer | ScoreHead:
        match model.output:
            case TokenOutput():
                # a stage with the embedding table uses it as output weight
                has_table = model.output.is_tied and hasattr(self, "embedding")
                return OutputLayer(self.config, padded, self.tp_group, has_table, model.logit_softcap)
            case HeadOutput(rows):
                return ScoreHead(self.config, rows, self.tp_group)
            case _ as never:
                assert_never(never)

    def set_input_tensor(self, input_tensor: list[Tensor | None]) -> None:
        """Sets the hidden states received from the previous stage; schedules call it before each forward pass."""
        (self._received,) = input_tensor

    def forward(self, batch: Microbatch) -> Tensor | Logits:
        """Runs this stage on a microbatch sliced for context parallelism.

        Returns:
            Deferred logits of the next token and of all MTP depths for which the batch has targets on the last stage,
            hidden states on other stages.
        """
        ends = None if batch.images is None else batch.images.ends
        assert (ends is not None) == (self._sees_ahead and batch.images is not None), "collate tells where images end"
        documents = with_image_ends(batch.document_starts, ends)
        sequence_ids = _sequences_of_text(batch)
        angles = self._angles(batch)
        found = self._embed_all(batch) if self.pre_process else None
        features = self._take_received(batch) if found is None else found.ahead
        # megatron-core passes both "masks" unread to every layer, even in recomputation: our attention reads document
        # starts from `attention_mask`, routers read `router_marks` from `padding_mask`, `_with_features` reads deeper
        # features from `context`, which gets a gradient. Arguments by name, so that a hook can tell the input from
        # tensors that stay alive anyway (offload/activations.py).
        hidden_states = self.decoder(
            hidden_states=None if found is None else found.embedded,
            context=None if found is None else found.deep,
            attention_mask=documents,
            rotary_pos_emb=angles,
            padding_mask=self._own_part(router_marks(sequence_ids, batch.choices if self.replays else {})),
        )
        if not self.post_process:
            return torch.cat((hidden_states, *features)) if features else hidden_states
        ahead = batch.mtp if self.mtp_process and self.looks_ahead else ()
        # before the output layer, since with overlap_param_gather the embedding awaits the table that both share
        embeddings = [self._embed_ahead(batch, number, features) for number, _ in enumerate(ahead)]
        main, further = self._logits(hidden_states), []
        for depth, tokens, targets in zip(self.mtp.layers if ahead else (), embeddings, ahead):
            # depths always choose their experts, since inference engines report only the layers of the model
            marks = sequence_ids
            if sequence_ids is not None and targets.is_padding is not None:
                marks = torch.where(targets.is_padding, -1, sequence_ids)
            hidden_states = depth(tokens, hidden_states, documents, angles, self._own_part(marks))
            further.append(self._logits(hidden_states))
        return Logits(main, tuple(further))

    def _angles(self, batch: Microbatch) -> Tensor:
        angles: Tensor
        if batch.images is not None and isinstance(self.rotary, ThreeAxesRotary):
            angles = self.rotary(batch.images.axes)
        else:
            # without documents all rows have the same positions
            angles = self.rotary(batch.positions[:1] if batch.document_starts is None else batch.positions)
        return angles

    def _embed_all(self, batch: Microbatch) -> PlacedFeatures:
        """Returns embeddings of tokens and features of images at the positions of `_embed`."""
        embedded, images = self._embed(batch.tokens), batch.images
        if not hasattr(self, "vision"):
            return PlacedFeatures(embedded)
        places = self._own_part(None if images is None else images.places)
        ahead = None
        if images is not None and batch.mtp and self.looks_ahead:
            ahead = self._own_part(images.ahead)
        found: PlacedFeatures = self.vision(embedded, images, places, ahead)
        # stages exchange tensors of one shape, also for a microbatch of text
        missing = 0 if found.ahead else self.num_passed_features(batch)
        return found._replace(ahead=[*found.ahead, *(torch.zeros_like(found.embedded) for _ in range(missing))])

    def num_passed_features(self, batch: Microbatch) -> int:
        """Returns the number of tensors of features that a stage passes on besides the hidden states, [seq_local,
        batch, hidden] each, one after the other along the first axis."""
        return len(batch.mtp) if self._passes_features and self.looks_ahead else 0

    def _take_received(self, batch: Microbatch) -> Sequence[Tensor]:
        """Gives the hidden states of the stage before to the decoder; returns the features that came with them."""
        assert self._received is not None, "schedules set the input of every stage but the first"
        received, self._received = self._received, None
        hidden_states, *features = received.chunk(1 + self.num_passed_features(batch))
        self.decoder.set_input_tensor(hidden_states)
        return features

    def _embed_ahead(self, batch: Microbatch, depth: int, features: Sequence[Tensor]) -> Tensor:
        """Returns embeddings of the tokens that an MTP depth, counted from 0, reads, like `_embed`; of images their
        features."""
        embedded = self._embed(batch.mtp[depth].tokens)
        if batch.images is None:
            return embedded
        places = self._own_part(batch.images.ahead)
        assert places is not None, "collate places the features that depths read"
        return torch.where((places[..., depth] >= 0).t().unsqueeze(-1), features[depth], embedded)

    def _embed(self, tokens: Tensor) -> Tensor:
        """Returns embeddings, [seq_local, batch, hidden]; this rank's part under sequence parallelism."""
        embedded: Tensor = self.embedding(tokens, None)
        return scaled(embedded) if self._scales_embeddings else embedded

    def _own_part(self, marks: Tensor | None) -> Tensor | None:
        """Slices marks, [batch, seq_local, ...], to the positions of this sequence-parallel rank."""
        if marks is None or not self.config.sequence_parallel:
            return marks
        return marks.chunk(self.tp_group.size(), dim=1)[self.tp_group.rank()]

    def _logits(self, hidden_states: Tensor) -> DeferredLogits:
        is_tied = self.share_embeddings_and_output_weights
        table = self._table() if is_tied else None
        return DeferredLogits(hidden_states, self.output_layer, table)

    def shared_embedding_or_output_weight(self) -> Tensor | None:
        """Returns the embedding table or the output weight, whose gradients are summed over stages that share it; None
        if this stage has neither."""
        table = self._table()
        weight: Tensor | None = None if table is None else table.weight
        return weight

    def _table(self) -> Any:
        """Returns the module that holds the table, or None."""
        if self.pre_process or self.mtp_process:
            return self.embedding.word_embeddings
        return self.output_layer if self.post_process else None

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: ShardedOffsets = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Describes the parameters of this stage for checkpoints."""
        tensors: dict[str, Any] = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        tensors.pop(f"{prefix}output_layer._extra_state", None)  # empty, and not in any checkpoint
        if self.mtp_process and not self.pre_process:
            # a replica of the table on the first stage, which is saved
            table = tensors[f"{prefix}embedding.word_embeddings.weight"]
            table.replica_id = (1, *table.replica_id[1:])
        if self.post_process and isinstance(self.output_layer, ScoreHead):
            # megatron-core marks it as padded for tp, so a vocabulary's output weight could be loaded in its place
            tensors[f"{prefix}output_layer.weight"].allow_shape_mismatch = False
        return tensors


def _with_features(
    number: int, is_last: bool, layer: object, args: object, options: dict[str, Any], output: Any
) -> Any:
    """Adds the features of a deeper layer of the tower to the output of layer `number`, as a forward hook; the last
    such layer passes them no further."""
    hidden_states, deep = output
    if options["context"] is None:
        return output
    # from the arguments, which a recomputed layer gets again, and returns the gradient of
    return hidden_states + options["context"][number], None if is_last else deep


def _sequences_of_text(batch: Microbatch) -> Tensor | None:
    """Returns the sequence number of each position, [batch, seq_local] int64, -1 at padding; None without routers."""
    if batch.is_padding is None:
        return None
    rows = torch.arange(len(batch.tokens), device=batch.tokens.device).unsqueeze(1).expand_as(batch.tokens)
    return torch.where(batch.is_padding, -1, rows if batch.sequence_ids is None else batch.sequence_ids)


def _rotary(model: ModelSection, dtype: torch.dtype) -> Rotary:
    frequencies = inverse_frequencies(model.rope, model.with_global_heads().rotary_size, dtype)[0]
    if model.rope.attention_temperature:
        return TemperedRotary(frequencies, model.rope)
    if model.vision is not None and model.vision.rope_sections is not None:
        return ThreeAxesRotary(frequencies, model.vision.rope_sections)
    if model.rope.local_base is None:
        return Rotary(frequencies)
    return TwoBaseRotary(frequencies, local_frequencies(model.rope, model.rotary_size, dtype))


def scaled(embedded: Tensor) -> Tensor:
    """Multiplies [seq_local, batch, hidden] by sqrt(hidden), rounded to their dtype as in transformers."""
    return embedded * _rounded_root(embedded.shape[-1], embedded.dtype)


@functools.lru_cache(maxsize=8)
def _rounded_root(size: int, dtype: torch.dtype) -> float:
    # a number, since a tensor would be copied to the GPU in every forward pass, and the host would wait
    return float(torch.tensor(math.sqrt(size), dtype=dtype))
