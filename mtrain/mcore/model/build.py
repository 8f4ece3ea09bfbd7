"""Builds this rank's part of the model on megatron-core's GPTModel."""

from __future__ import annotations

import contextlib
import functools
import math
from typing import Any, assert_never

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module
from torch import Tensor

from mtrain.config import Config
from mtrain.config.schema.model import HeadOutput, ModelSection, TokenOutput
from mtrain.config.schema.train import TrainSection
from mtrain.data.batch import Microbatch, MtpTargets
from mtrain.mcore.distributed.groups import Groups
from mtrain.mcore.model import products
from mtrain.mcore.model.adapters.attach import attach
from mtrain.mcore.model.adapters.narrow import built_narrow, widen_all_but_matrices
from mtrain.mcore.model.attention.frequencies import inverse_frequencies, local_frequencies
from mtrain.mcore.model.attention.rotary import Rotary, TwoBaseRotary, take_angles_by_layer
from mtrain.mcore.model.compiled import compile_layers
from mtrain.mcore.model.init_weights import draw_weights
from mtrain.mcore.model.layer_spec import block_spec, chosen_backend
from mtrain.mcore.model.mtp import depths_spec, drop_unused_table
from mtrain.mcore.model.output_layer import DeferredLogits, Logits, ScoreHead, defer_output, put_head
from mtrain.mcore.model.own_parameters import ShardedOffsets
from mtrain.mcore.model.swiglu import use_own_swiglu
from mtrain.mcore.model.transformer_config import ddp_config, transformer_config
from mtrain.mcore.offload.layers import move_activations
from mtrain.plan import padded_vocab_size
from mtrain.plan.adapters import holds_narrow
from mtrain.plan.layout import Layout


class LanguageModel(GPTModel):
    """GPTModel with positions from the batch; it computes neither logits nor losses, which happens outside."""

    looks_ahead = True
    """Whether tokens ahead are predicted, if the model has depths for them and the batch has the tokens."""
    has_adapters = False
    """Whether only adapters (and a head) learn, here or on other stages."""
    learned_whole: frozenset[str] = frozenset()
    """Global names of parameters that learn themselves although adapters do, here or on other stages."""
    base_fingerprint: str | None = None
    """Fingerprint of the frozen weights, once they are loaded (mtrain/mcore/state/base.py)."""
    _ahead: tuple[MtpTargets, ...] = ()
    _sequence_ids: Tensor | None = None

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        document_starts: Tensor | None,
        sequence_ids: Tensor | None,
        ahead: tuple[MtpTargets, ...] = (),
    ) -> Tensor | Logits:
        """Runs this stage.

        Args:
            input_ids: [batch, seq_local] int64.
            position_ids: [batch, seq_local] int64.
            document_starts: [batch, seq] int32 on the CPU, full rows; None where each row is one document.
            sequence_ids: [batch, seq_local] int64: the sequence of each position in the microbatch, negative where
                there is no text; None where there is no router.
            ahead: Tokens and labels ahead, by depth; empty where only the next token is predicted.

        Returns:
            Last stage: logits, not yet computed, of all depths where `ahead` is given. Other stages: hidden states.
        """
        # GPTModel asks its embedding for angles by length alone; the positions of this batch must be set before
        self.rotary_pos_emb.set_positions(position_ids, rows_agree=document_starts is None)
        # for `_postprocess`, which GPTModel.forward calls without it
        self._ahead = ahead if self.mtp_process and self.looks_ahead else ()
        self._sequence_ids = sequence_ids
        # GPTModel cuts its padding mask, which carries the sequence ids, on the first stage only
        own = sequence_ids if self.pre_process else self._own_part(sequence_ids)
        output: Tensor | Logits = super().forward(input_ids, position_ids, document_starts, padding_mask=own)
        return output

    def _own_part(self, sequence_ids: Tensor | None) -> Tensor | None:
        """Returns the positions of this sequence-parallel rank."""
        if sequence_ids is None or not self.config.sequence_parallel:
            return sequence_ids
        # sequence parallelism gives rank r the r-th part of what its CP rank holds
        return sequence_ids.chunk(self.pg_collection.tp.size(), dim=1)[self.pg_collection.tp.rank()]

    def _postprocess(
        self, hidden_states: Tensor, *, attention_mask: Tensor | None, rotary_pos_emb: Tensor | None, **others: object
    ) -> Tensor | Logits:
        """Replaces megatron-core's losses: returns what the logits of the last stage are computed from."""
        if not self.post_process:  # goes to the next stage unchanged
            return hidden_states
        # Before the output layer: where parameters arrive during the forward pass, the wait for a table shared with the
        # embedding happens at the embedding.
        embedded = [self.embedding(input_ids=ahead.tokens, position_ids=None) for ahead in self._ahead]
        main, further = self._logits(hidden_states), []
        # one after the other: a depth reads the hidden states of the one before
        for number, ahead in enumerate(self._ahead):
            own = self._own_part(_of_text(self._sequence_ids, ahead.is_padding))
            layer = self.mtp.layers[number]
            hidden_states = layer(embedded[number], hidden_states, attention_mask, rotary_pos_emb, own)
            further.append(self._logits(hidden_states))
        return Logits(main, tuple(further))

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: ShardedOffsets = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Returns megatron-core's places; a head has equally many rows under any layout."""
        places: dict[str, Any] = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        if self.post_process and isinstance(self.output_layer, ScoreHead):
            # megatron-core marks it as a table that is padded for tp: one of a vocabulary would be read instead
            places[f"{prefix}output_layer.weight"].allow_shape_mismatch = False
        return places

    def _logits(self, hidden_states: Tensor) -> DeferredLogits:
        is_tied = self.share_embeddings_and_output_weights
        table = self.shared_embedding_or_output_weight() if is_tied else None
        return DeferredLogits(hidden_states, self.output_layer, table)


def build_model(config: Config, groups: Groups, weights_follow: bool = False) -> list[DistributedDataParallel]:
    """Builds this rank's model chunks, one for each virtual stage, with layout-free initial weights, wrapped in DDP.

    Collective over the world where `train.compile` asks for compiled layers.

    Args:
        config: Configuration of the run.
        groups: The process groups.
        weights_follow: Whether the caller loads weights, or draws them once it knows that there are none to load: until
            then they are nan.

    Raises:
        ConfigError: The backend is not available, or megatron-core refuses the configuration.
    """
    translated, chunks = _build_chunks(config, groups)
    for chunk in chunks:
        # before the wrapping: DistributedDataParallel moves parameters into its buffers and main weights copy those
        draw_weights(chunk, config, groups, others_follow=weights_follow)
    wrapped = [_wrap(config, translated, chunk, groups, index) for index, chunk in enumerate(chunks)]
    compile_layers(wrapped, config, groups)
    if config.train.offload_layers is not None:
        move_activations([unwrap(chunk).decoder for chunk in wrapped], config.train.offload_layers, groups.device)
    return wrapped


def build_frozen_model(config: Config, groups: Groups) -> list[torch.nn.Module]:
    """Builds this rank's chunks of a model that only runs forward: no gradients, no dropout, weights still to be
    loaded.

    Raises:
        ConfigError: See `build_model`.
    """
    translated, chunks = _build_chunks(config, groups)
    for chunk in chunks:
        chunk.looks_ahead = False  # a teacher's depths are loaded with the rest and never run
    # without DDP, whose gradient buffers would cost four bytes per parameter
    return [_in_precision(config.train, translated, chunk).eval().requires_grad_(False) for chunk in chunks]


def unwrap(chunk: torch.nn.Module) -> LanguageModel:
    """Returns the LanguageModel inside DDP and the half-precision wrapper."""
    inner: Any = chunk
    while not isinstance(inner, LanguageModel):  # which wrappers there are depends on precision and on DDP
        inner = inner.module
    return inner


def _build_chunks(config: Config, groups: Groups) -> tuple[TransformerConfig, list[LanguageModel]]:
    translated = transformer_config(config, groups.layout, groups.device)
    stages: list[int | None] = [None] if groups.layout.vpp == 1 else list(range(groups.layout.vpp))
    return translated, [_build_chunk(config, translated, groups, stage) for stage in stages]


def _build_chunk(config: Config, translated: TransformerConfig, groups: Groups, vp_stage: int | None) -> LanguageModel:
    layout: Layout = groups.layout
    stage = groups.pp_rank + (vp_stage or 0) * layout.pp  # virtual stages cycle through the ranks
    layers = layout.layers(config.model.num_layers, groups.pp_rank, vp_stage or 0)
    backend = chosen_backend(config, groups.device)
    is_last = stage == layout.num_stages - 1
    is_narrow = holds_narrow(config)
    if config.model.megatron.get(products.FIELD):
        products.install()
    with built_narrow(translated) if is_narrow else contextlib.nullcontext():
        model = LanguageModel(
            config=translated,
            transformer_layer_spec=block_spec(config.model, backend, layers),
            vocab_size=padded_vocab_size(config.model, layout.tp),
            max_sequence_length=config.data.seq_length,
            pre_process=stage == 0,
            post_process=is_last,
            parallel_output=True,  # else logits would be gathered on every rank of TP: large
            share_embeddings_and_output_weights=config.model.ties_output,
            position_embedding_type="rope",  # makes GPTModel ask `rotary_pos_emb`, which is replaced below
            mtp_block_spec=depths_spec(config.model, backend) if is_last else None,
            pg_collection=groups.collection,
            vp_stage=vp_stage,
        )
    # before anything lists parameters: buckets, optimizer and checkpoints must not know it
    drop_unused_table(model)
    if is_last:
        match config.model.output:
            case TokenOutput():
                defer_output(model)
            case HeadOutput(num_labels):
                put_head(model, num_labels)
            case _ as never:
                assert_never(never)
    use_own_swiglu(model)
    model.rotary_pos_emb = _rotary(config.model)
    if config.model.rope.local_base is not None:
        take_angles_by_layer(model)
    # The last stage embeds as well where it predicts ahead. A hook, so that checkpoints keep plain tables.
    if config.model.scale_embeddings and (model.pre_process or model.mtp_process):
        model.embedding.register_forward_hook(_scale_embeddings)
    if is_narrow:
        widen_all_but_matrices(model)
    if config.adapter is not None:
        attach(model, config.model, config.adapter, groups.collection)
    return model.to(groups.device)


def _rotary(model: ModelSection) -> Rotary:
    frequencies = inverse_frequencies(model.rope, model.rotary_size)[0]
    if model.rope.local_base is None:
        return Rotary(frequencies)
    return TwoBaseRotary(frequencies, local_frequencies(model.rope, model.rotary_size))


def _scale_embeddings(embedding: torch.nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor:
    """Multiplies [seq_local, batch, hidden] by sqrt(hidden), rounded to the run's precision as transformers does."""
    return output * _rounded_root(output.shape[-1], output.dtype)


@functools.lru_cache(maxsize=8)
def _rounded_root(size: int, dtype: torch.dtype) -> float:
    # a number, not a tensor: one on a GPU would be copied there in every forward pass, for which the host waits
    return float(torch.tensor(math.sqrt(size), dtype=dtype))


def _wrap(
    config: Config, translated: TransformerConfig, chunk: LanguageModel, groups: Groups, index: int
) -> DistributedDataParallel:
    return DistributedDataParallel(
        config=translated,
        ddp_config=ddp_config(config, groups.layout),
        module=_in_precision(config.train, translated, chunk),
        disable_bucketing=index > 0,  # as in Megatron-LM: only the first chunk's gradients are reduced in buckets
        pg_collection=groups.collection,
    )


def _in_precision(train: TrainSection, translated: TransformerConfig, chunk: LanguageModel) -> torch.nn.Module:
    match train.precision:
        case "fp32":
            return chunk
        case "bf16" | "fp16":
            return Float16Module(translated, chunk)
        case _:
            assert_never(train.precision)


def run_chunk(chunk: torch.nn.Module, batch: Microbatch) -> Tensor | Logits:
    """Runs one stage on one microbatch, sliced for context parallelism; outputs stay in the precision of the run.

    Returns:
            The result of `LanguageModel.forward`.
    """
    is_half = isinstance(chunk, Float16Module) or isinstance(getattr(chunk, "module", None), Float16Module)
    options = {"fp32_output": False} if is_half else {}  # the loss upcasts what it needs
    given = (batch.tokens, batch.positions, batch.document_starts, _sequence_ids(batch), batch.mtp)
    output: Tensor | Logits = chunk(*given, **options)
    return output


def _sequence_ids(batch: Microbatch) -> Tensor | None:
    """Returns [batch, seq_local] int64: the sequence of each position, -1 where there is no text; None if unused."""
    if batch.is_padding is None:
        return None
    rows = torch.arange(len(batch.tokens), device=batch.tokens.device).unsqueeze(1).expand_as(batch.tokens)
    return _of_text(rows if batch.sequence_ids is None else batch.sequence_ids, batch.is_padding)


def _of_text(sequence_ids: Tensor | None, is_padding: Tensor | None) -> Tensor | None:
    """Sets -1 where there is no text."""
    if sequence_ids is None or is_padding is None:
        return None
    return torch.where(is_padding, -1, sequence_ids)
