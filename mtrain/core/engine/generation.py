"""The passes of generation: single rows through the stages, with a key/value cache.

megatron-core's schedules exchange microbatches of one shape for a whole step, but passes of generation differ in their
number of tokens, and each depends on the output of the one before. megatron-core's inference contexts are not used: the
static one has one length for all sequences of a batch, and the dynamic one needs kernels that CPUs lack (ADR 44).
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.utils import get_model_config
from torch import Tensor

from mtrain.base.errors import ConfigError
from mtrain.config import Config
from mtrain.config.schema.model import ModelSection
from mtrain.core.batch.batch import Microbatch
from mtrain.core.batch.collate import joined_images
from mtrain.core.batch.images import SampleImages
from mtrain.core.engine.schedule import evaluating
from mtrain.core.layers.attention.key_source import CachedPass, Remembering, remembering
from mtrain.core.layers.build import run_chunk, unwrap
from mtrain.core.layers.compiled import as_written
from mtrain.core.layers.output_layer import Logits
from mtrain.core.ranks.groups import Groups


@dataclass(frozen=True)
class PassTokens:
    """Tokens of one sequence that a pass reads; the pass returns the logits after the last of them."""

    sequence: int
    """Number of the sequence in the cache."""
    start: int
    """Position of the first token; 0 for a prompt."""
    tokens: Sequence[int]
    images: SampleImages | None = None
    """Images of a prompt, whose tokens are all in `tokens`."""
    shift: int = 0
    """Rotary position of a token after images, minus its position in the sequence; 0 without images."""


class CachedModel:
    """The stages of this rank for generation.

    Each data-parallel and context-parallel replica runs independently of all others. But if experts are spread over the
    ranks of several replicas, all of these must run the same number of passes.
    """

    def __init__(self, config: Config, groups: Groups, chunks: Sequence[Any], reading: CachedPass) -> None:
        self._config, self._groups, self._chunks, self._reading = config, groups, chunks, reading
        self._pipeline = dist.get_process_group_ranks(groups.collection.pp)
        translated = get_model_config(chunks[0])
        self._dtype = translated.pipeline_dtype or translated.params_dtype
        # sequence parallelism divides a row over tensor-parallel ranks
        self._multiple = groups.layout.tp if translated.sequence_parallel else 1

    @torch.no_grad()
    def next_logits(self, pieces: Sequence[PassTokens], of_prompts: bool) -> Tensor | None:
        """Computes the logits after the last token of each piece, which is a whole prompt (`of_prompts`) or one token.

        Collective over the replica: transfers between stages and an all-gather of the logits over TP, in addition to
        the collectives of the layers. `pieces` may be empty, for the sake of replicas that need this one's experts.

        Returns:
            Logits, [pieces, vocab_size] float32, on all ranks of the last stage; None on other stages.
        """
        batch, ends = self._row(pieces, of_prompts)
        output = self._through_stages(batch)
        if output is None:
            return None
        hidden, weight, _ = output.main.operands()
        last_hidden = hidden[:, 0].index_select(0, torch.tensor(ends, dtype=torch.int64, device=hidden.device))
        local = output.main.capped(torch.matmul(last_hidden, weight.t()).float())
        parts = [torch.empty_like(local) for _ in range(self._groups.layout.tp)]
        if len(parts) > 1:
            dist.all_gather(parts, local.contiguous(), group=self._groups.tp)
        else:
            parts = [local]
        # the columns after the vocabulary are padding, which is never sampled
        return torch.cat(parts, dim=-1)[:, : self._config.model.vocab_size]

    def from_last_stage(self, values: Tensor) -> None:
        """Fills `values` on all stages of this replica with those of the last stage. One broadcast over PP."""
        if self._groups.layout.pp > 1:
            dist.broadcast(values, self._pipeline[-1], group=self._groups.collection.pp)

    def _row(self, pieces: Sequence[PassTokens], of_prompts: bool) -> tuple[Microbatch, list[int]]:
        """Concatenates pieces to a row, padded to the necessary multiple; also returns the last index of each piece."""
        tokens: list[int] = []
        positions: list[int] = []
        rotary: list[int] = []
        sequences: list[int] = []
        starts: list[int] = []
        ends: list[int] = []
        for piece in pieces:
            starts += [len(tokens)] * len(piece.tokens)
            positions += range(piece.start, piece.start + len(piece.tokens))
            rotary += range(piece.start + piece.shift, piece.start + piece.shift + len(piece.tokens))
            sequences += [piece.sequence] * len(piece.tokens)
            tokens += piece.tokens
            ends.append(len(tokens) - 1)
        # padded to at least one multiple, since experts and stages need a row
        missing = -len(tokens) % self._multiple if tokens else self._multiple
        starts += [len(tokens)] * missing
        tokens, positions, rotary = (values + [0] * missing for values in (tokens, positions, rotary))
        sequences += [self._reading.filler] * missing
        self._reading.read(sequences, positions, of_prompts)
        row, row_positions = (torch.tensor([values], dtype=torch.int64) for values in (tokens, rotary))
        documents = torch.tensor([starts], dtype=torch.int32) if of_prompts else None
        vision = self._config.model.vision
        images = joined_images(
            [[(piece.images, len(piece.tokens)) for piece in pieces]],
            row_positions,
            None if vision is None else vision.patches_per_feature,
            self._config.model.has_bidirectional_images,
        )
        batch = Microbatch(row, row, row_positions, {}, {}, documents, None, images=images)
        return batch.map(lambda values: values.to(self._groups.device)), ends

    def _through_stages(self, batch: Microbatch) -> Logits | None:
        """Runs the row through the stages; returns logits on the last stage, None on other ranks."""
        layout, hidden = self._groups.layout, None
        for stage in range(layout.num_stages):
            if stage % layout.pp != self._groups.pp_rank:
                continue
            chunk = self._chunks[stage // layout.pp]
            if stage > 0:
                unwrap(chunk).set_input_tensor([self._received(stage, hidden, batch.tokens.shape[1])])
            with as_written():
                output = run_chunk(chunk, batch)
            if isinstance(output, Logits):
                return output
            hidden = output
            if layout.pp > 1:
                dist.send(hidden.contiguous(), self._pipeline[(stage + 1) % layout.pp], self._groups.collection.pp)
        return None

    def _received(self, stage: int, previous: Tensor | None, num_tokens: int) -> Tensor:
        """Returns the hidden states of the previous stage, [tokens_local, 1, hidden]."""
        layout = self._groups.layout
        if layout.pp == 1:
            assert previous is not None
            return previous
        shape = (num_tokens // self._multiple, 1, self._config.model.hidden_size)
        hidden = torch.empty(shape, dtype=self._dtype, device=self._groups.device)
        dist.recv(hidden, self._pipeline[(stage - 1) % layout.pp], self._groups.collection.pp)
        return hidden


@contextlib.contextmanager
def cached_model(
    config: Config, groups: Groups, chunks: Sequence[Any], num_sequences: int, length: int
) -> Iterator[CachedModel]:
    """Yields the model without dropout and with caches, which are freed at the end. Parameters must be complete.

    Args:
        length: Length of the longest sequence, prompt and answer together.

    Raises:
        ConfigError: A layer cannot continue from a cache.
    """
    refuse_uncachable(config.model, chunks)
    reading = CachedPass(num_sequences, length, groups.device)
    layers = [module for chunk in chunks for module in chunk.modules() if isinstance(module, Remembering)]
    with evaluating(chunks), remembering(layers, reading):
        yield CachedModel(config, groups, chunks, reading)


def refuse_uncachable(model: ModelSection, chunks: Sequence[Any]) -> None:
    """Refuses models that cannot generate, on all ranks.

    Raises:
        ConfigError: The model has a head, or layers of TransformerEngine, which have no such cache, or experts with a
            capacity, whose outputs would depend on the tokens that are read together.
    """
    if model.head is not None:
        raise ConfigError(f"{model.head} is a head, which writes no text; generate with the original model")
    experts = model.experts
    if experts is not None and experts.capacity_factor is not None:
        raise ConfigError(
            f"model.experts.capacity_factor={experts.capacity_factor} drops tokens depending on the rest of the "
            "batch, so a text cannot be generated token by token; generate with capacity_factor=null"
        )
    # one layer with a cache stands for all of a stage
    if not any(isinstance(module, Remembering) for chunk in chunks for module in chunk.modules()):
        raise ConfigError(
            "model.backend: TransformerEngine's layers have no key/value cache for generation here; set "
            "model.backend=torch"
        )
