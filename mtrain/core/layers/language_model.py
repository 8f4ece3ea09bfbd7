"""One stage of a language model: embedding, transformer block, depths of multi-token prediction, output.

megatron-core's parts in a shell of our own. Its own shell, GPTModel, is deprecated from 0.19 on, derives positions from
lengths, and computes losses as means; names of parameters and checkpoints are the same here.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, assert_never

import torch
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import ModelType
from megatron.core.transformer.transformer_block import TransformerBlock
from torch import Tensor

from mtrain.arch import padded_vocab_size
from mtrain.config.schema.model import ModelSection
from mtrain.config.schema.output import HeadOutput, TokenOutput
from mtrain.core.batch.batch import Microbatch
from mtrain.core.layers.attention.full_width_norm import FullWidthNormAttention
from mtrain.core.layers.attention.rotary import (
    Rotary,
    TemperedRotary,
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
from mtrain.core.ranks.groups import Groups


class LanguageModel(LanguageModule):
    """One stage of a language model; it computes neither logits nor losses.

    megatron-core's schedules and reductions of gradients read `model_type`, `pre_process`, `post_process`, `vp_stage`,
    `mtp_process`, `share_embeddings_and_output_weights` and `shared_embedding_or_output_weight`.
    """

    looks_ahead = True
    """Whether tokens ahead are predicted, if the model has depths for them and the batch has the tokens."""
    replays = True
    """Whether layers take the choices that a batch names."""
    has_adapters = False
    """Whether only adapters (and what `learns_whole`) learn, here or on other stages."""
    learns_whole: Callable[[str], bool] | None = None
    """Function of a global name that says whether the parameter learns itself although adapters do; None: none does."""
    base_fingerprint: str | None = None
    """Fingerprint of the frozen weights, once they are loaded (mtrain/checkpoint/state/base.py)."""

    def __init__(
        self,
        model: ModelSection,
        config: TransformerConfig,
        backend: Backend,
        groups: Groups,
        vp_stage: int | None,
    ) -> None:
        """Builds the chunk `vp_stage` of this rank; None without virtual stages."""
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
        self._scales_embeddings = model.scale_embeddings
        # the dtype of activations: parameters of a frozen base may be narrow
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
        if self.mtp_process:
            self.mtp = Depths(model, config, backend, groups.collection, vp_stage)
        if self.post_process:
            self.output_layer = self._output(model, rows)
        if self.pre_process or self.post_process:
            self.setup_embeddings_and_output_layer()
        if isinstance(self.rotary, TwoBaseRotary):
            take_angles_by_layer(self, self.rotary)
        for module in self.modules():
            if isinstance(module, RotatingAttention | FullWidthNormAttention):
                module.rotation_factor, module.rotary_size = rotation_factor(model), model.rotary_size
        for module in self.modules():
            # TransformerEngine's
            if hasattr(module, "finish_init"):
                module.finish_init(None)

    def _output(self, model: ModelSection, padded: int) -> OutputLayer | ScoreHead:
        match model.output:
            case TokenOutput():
                # a stage that has the embeddings multiplies by them
                has_table = model.output.is_tied and hasattr(self, "embedding")
                return OutputLayer(self.config, padded, self.tp_group, has_table, model.logit_softcap)
            case HeadOutput(rows):
                return ScoreHead(self.config, rows, self.tp_group)
            case _ as never:
                assert_never(never)

    def set_input_tensor(self, input_tensor: list[Tensor | None]) -> None:
        """Sets the hidden states that came from the stage before; a schedule calls it before each forward."""
        (hidden_states,) = input_tensor
        self.decoder.set_input_tensor(hidden_states)

    def forward(self, batch: Microbatch) -> Tensor | Logits:
        """Runs this stage on a microbatch that is sliced for context parallelism.

        Returns:
            Last stage: logits, not yet computed, of the next token and of all depths of multi-token prediction that the
            batch has targets of. Other stages: hidden states.
        """
        documents, sequence_ids = batch.document_starts, _sequences_of_text(batch)
        # without documents all rows have the same positions
        angles = self.rotary(batch.positions[:1] if documents is None else batch.positions)
        # neither is a mask, and megatron-core only hands them to every layer, recomputed ones included: our attention
        # reads the starts of documents in `attention_mask`, routers read `router_marks` in `padding_mask`
        # by name, so that a hook tells the input from tensors that others hold (offload/activations.py)
        hidden_states = self.decoder(
            hidden_states=self._embed(batch.tokens) if self.pre_process else None,
            attention_mask=documents,
            rotary_pos_emb=angles,
            padding_mask=self._own_part(router_marks(sequence_ids, batch.choices if self.replays else {})),
        )
        if not self.post_process:
            return hidden_states
        ahead = batch.mtp if self.mtp_process and self.looks_ahead else ()
        # before the output layer: with overlap_param_gather the embedding waits for a table that both share
        embedded = [self._embed(targets.tokens) for targets in ahead]
        main, further = self._logits(hidden_states), []
        for depth, tokens, targets in zip(self.mtp.layers if ahead else (), embedded, ahead):
            # depths always choose their experts: inference engines report the layers of the model alone
            marks = sequence_ids
            if sequence_ids is not None and targets.is_padding is not None:
                marks = torch.where(targets.is_padding, -1, sequence_ids)
            hidden_states = depth(tokens, hidden_states, documents, angles, self._own_part(marks))
            further.append(self._logits(hidden_states))
        return Logits(main, tuple(further))

    def _embed(self, tokens: Tensor) -> Tensor:
        """Returns [seq_local, batch, hidden], this rank's part under sequence parallelism."""
        embedded: Tensor = self.embedding(tokens, None)
        return scaled(embedded) if self._scales_embeddings else embedded

    def _own_part(self, marks: Tensor | None) -> Tensor | None:
        """Returns the positions of this sequence-parallel rank."""
        if marks is None or not self.config.sequence_parallel:
            return marks
        return marks.chunk(self.tp_group.size(), dim=1)[self.tp_group.rank()]

    def _logits(self, hidden_states: Tensor) -> DeferredLogits:
        is_tied = self.share_embeddings_and_output_weights
        table = self.shared_embedding_or_output_weight() if is_tied else None
        return DeferredLogits(hidden_states, self.output_layer, table)

    def shared_embedding_or_output_weight(self) -> Tensor | None:
        """Returns the table of embeddings or of the output; stages that share it sum its gradients. None: this stage
        has neither."""
        if self.pre_process or self.mtp_process:
            return self.embedding.word_embeddings.weight
        return self.output_layer.weight if self.post_process else None

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: ShardedOffsets = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Returns the places of this stage's parameters in a checkpoint."""
        places: dict[str, Any] = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        places.pop(f"{prefix}output_layer._extra_state", None)  # empty, and no checkpoint has it
        if self.mtp_process and not self.pre_process:
            # a copy of the first stage's, which is saved
            table = places[f"{prefix}embedding.word_embeddings.weight"]
            table.replica_id = (1, *table.replica_id[1:])
        if self.post_process and isinstance(self.output_layer, ScoreHead):
            # megatron-core marks it as padded for tp, so that the table of a vocabulary could be read instead
            places[f"{prefix}output_layer.weight"].allow_shape_mismatch = False
        return places


def _sequences_of_text(batch: Microbatch) -> Tensor | None:
    """Returns [batch, seq_local] int64: the sequence of each position, -1 without text; None without routers."""
    if batch.is_padding is None:
        return None
    rows = torch.arange(len(batch.tokens), device=batch.tokens.device).unsqueeze(1).expand_as(batch.tokens)
    return torch.where(batch.is_padding, -1, rows if batch.sequence_ids is None else batch.sequence_ids)


def _rotary(model: ModelSection, dtype: torch.dtype) -> Rotary:
    frequencies = inverse_frequencies(model.rope, model.with_global_heads().rotary_size, dtype)[0]
    if model.rope.attention_temperature:
        return TemperedRotary(frequencies, model.rope)
    if model.rope.local_base is None:
        return Rotary(frequencies)
    return TwoBaseRotary(frequencies, local_frequencies(model.rope, model.rotary_size, dtype))


def scaled(embedded: Tensor) -> Tensor:
    """Multiplies [seq_local, batch, hidden] by sqrt(hidden), rounded to the run's precision as transformers does."""
    return embedded * _rounded_root(embedded.shape[-1], embedded.dtype)


@functools.lru_cache(maxsize=8)
def _rounded_root(size: int, dtype: torch.dtype) -> float:
    # a number: a tensor would be copied to the GPU in every forward pass, and the host would wait
    return float(torch.tensor(math.sqrt(size), dtype=dtype))
