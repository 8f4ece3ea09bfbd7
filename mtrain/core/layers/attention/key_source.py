"""Sources of the keys and values that a rank's queries see.

Under context parallelism a rank holds chunks r and 2*cp-1-r of every row (zigzag), so its queries are two contiguous
runs of the row. Queries meet all keys and values in one of three ways: `Gathered` collects the keys and values of the
whole row on every rank; `Exchanged` exchanges sequence for heads, so that each rank has whole rows of some heads;
`Ring` passes keys and values around. During generation each rank reads whole rows, with a cache (`Cached`).
"""

import contextlib
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Protocol

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.mappings import all_to_all, gather_from_sequence_parallel_region
from torch import Tensor

from mtrain.core.batch.zigzag import zigzag_index
from mtrain.core.layers.attention.key_set import KeySet, Run
from mtrain.core.layers.attention.ring import ring_attention


# cached, since it is the same in every layer and microbatch, and the host waits for its copy to the device
@lru_cache(maxsize=8)
def row_order(seq: int, cp: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns the row positions ordered by the rank that holds them, and the inverse permutation; [seq] int64 each."""
    by_rank = torch.cat([zigzag_index(seq, cp, rank) for rank in range(cp)])
    return by_rank.to(device), torch.argsort(by_rank).to(device)


class RowKernels(Protocol):
    """Attention on this rank to keys that it has."""

    scale: float

    def attend_runs(self, query: Tensor, key: Tensor, value: Tensor, keys: KeySet, runs: Sequence[Run]) -> Tensor:
        """Attends with the queries of `runs`, concatenated, to keys of whole rows; all [seq, batch, heads, dim]."""


class KeySource(ABC):
    """One way to bring queries and keys together: first call `heads` or `rows`, then `attend` with the result."""

    @abstractmethod
    def rows(self, local: Tensor) -> Tensor:
        """Returns whole rows in order, [seq, batch, ...], from this rank's tokens, [seq_local, batch, ...]."""

    def heads(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Returns keys and values, [seq, batch, groups, dim], of the heads with which this rank attends."""
        # both in one collective
        rows = self.rows(torch.cat((key, value), dim=-1))
        key, value = torch.split(rows, [key.shape[-1], value.shape[-1]], dim=-1)
        return key, value

    def own_heads(self, by_head: Tensor) -> Tensor:
        """Returns the part of [heads, ...] for the heads with which this rank attends."""
        return by_head

    def attend(self, kernels: RowKernels, query: Tensor, key: Tensor, value: Tensor, keys: KeySet) -> Tensor:
        """Attends with this rank's queries, [seq_local, batch, heads_local, dim]; returns outputs of the same shape."""
        return kernels.attend_runs(query, _heads_apart(key), _heads_apart(value), keys, [(0, len(query))])


class Whole(KeySource):
    """No context parallelism: rows are whole on this rank."""

    def rows(self, local: Tensor) -> Tensor:
        return local

    def heads(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        return key, value


class Gathered(KeySource):
    """Every rank gathers whole rows: one all-gather over CP, with a reduce-scatter in backward."""

    def __init__(self, cp: dist.ProcessGroup) -> None:
        self.cp = cp

    def rows(self, local: Tensor) -> Tensor:
        # despite its name the function gathers along the first axis over any group; its backward sums, which is needed
        # because queries of all ranks read all keys
        gathered = gather_from_sequence_parallel_region(local, group=self.cp)
        return gathered.index_select(0, self.orders(gathered)[1])

    def orders(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Returns `row_order` of [seq, ...]."""
        return row_order(len(rows), self.cp.size(), rows.device)

    def attend(self, kernels: RowKernels, query: Tensor, key: Tensor, value: Tensor, keys: KeySet) -> Tensor:
        # an early and a late chunk, so that under a causal mask all ranks compute equally many pairs
        chunk, last = len(query) // 2, 2 * self.cp.size() - 1
        runs = [(index * chunk, (index + 1) * chunk) for index in (self.cp.rank(), last - self.cp.rank())]
        return kernels.attend_runs(query, _heads_apart(key), _heads_apart(value), keys, runs)


class Exchanged(Gathered):
    """Ulysses: each rank has whole rows of some heads. One all-to-all over CP for each of queries, keys, values and
    output, and the same in backward. Latents, which all heads share, are gathered.

    Source: Jacobs et al. 2023, "DeepSpeed Ulysses", arXiv 2309.14509.
    """

    def heads(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        cp, groups = self.cp.size(), key.shape[2]
        if groups % cp:  # key/value heads are repeated until cp divides them
            repeats = cp // math.gcd(groups, cp)
            key, value = (part.repeat_interleave(repeats, dim=2) for part in (key, value))
        return self.to_heads(key), self.to_heads(value)

    def own_heads(self, by_head: Tensor) -> Tensor:
        return by_head.chunk(self.cp.size())[self.cp.rank()]

    def attend(self, kernels: RowKernels, query: Tensor, key: Tensor, value: Tensor, keys: KeySet) -> Tensor:
        # rows are whole from here on, so documents and windows do not depend on cp
        query = self.to_heads(query)
        return self.to_sequence(kernels.attend_runs(query, key, value, keys, [(0, len(query))]))

    def to_heads(self, part: Tensor) -> Tensor:
        """Turns [seq_local, batch, heads, dim] into whole rows, [seq, batch, heads / cp, dim], by one all-to-all."""
        size, (seq, batch, heads, dim) = self.cp.size(), part.shape
        # the axis of receivers goes first, since the all-to-all cuts the first axis into equal parts
        part = part.reshape(seq, batch, size, heads // size, dim).permute(2, 0, 1, 3, 4)
        received = all_to_all(self.cp, part.reshape(size * seq, batch, heads // size, dim))
        return received.index_select(0, self.orders(received)[1])

    def to_sequence(self, rows: Tensor) -> Tensor:
        """Turns whole rows, [seq, batch, heads / cp, dim], into [seq_local, batch, heads, dim], by one all-to-all."""
        size, (seq, batch, heads, dim) = self.cp.size(), rows.shape
        # rank r sends the heads of part r: [cp, seq_local, batch, heads / cp, dim]
        part = all_to_all(self.cp, rows.index_select(0, self.orders(rows)[0]).contiguous())
        part = part.view(size, seq // size, batch, heads, dim)
        return part.permute(1, 2, 0, 3, 4).reshape(seq // size, batch, size * heads, dim)


class Ring(Whole):
    """Keys and values are passed around while each rank attends to those it has, see `ring_attention`. Cannot be
    combined with documents, windows, sinks, dropout or latents (config/known_issues.py)."""

    def __init__(self, cp: dist.ProcessGroup) -> None:
        self.cp = cp

    def attend(self, kernels: RowKernels, query: Tensor, key: Tensor, value: Tensor, keys: KeySet) -> Tensor:
        assert keys == KeySet(), "documents and windows are refused with a ring (config/known_issues.py)"
        return ring_attention(query, key, value, kernels.scale, self.cp)


class CachedPass:
    """The tokens that a generation pass reads, for all layers of a rank.

    A pass reads one row of tokens, each with a sequence and a position: whole prompts, concatenated as documents, or
    one further token of each sequence. So sequences of any lengths share a pass without padding, and sequence
    parallelism divides the row like any other.
    """

    def __init__(self, num_sequences: int, length: int, device: torch.device) -> None:
        """Makes a cache for `num_sequences` sequences of up to `length` tokens, prompt and answer together. One
        additional sequence takes the tokens that only pad a row."""
        self.capacity = (num_sequences + 1, length)
        self.device = device
        self.of_prompts = True
        self.num_keys = 0
        self.sequences = self.positions = torch.empty(0, dtype=torch.int64, device=device)

    @property
    def filler(self) -> int:
        """Returns the number of the sequence for tokens that only pad a row."""
        return self.capacity[0] - 1

    def read(self, sequences: Sequence[int], positions: Sequence[int], of_prompts: bool) -> None:
        """Sets the sequence and the position of each token of the next pass.

        With `of_prompts` the pass starts sequences, each with consecutive tokens from position 0; otherwise each token
        continues a sequence.
        """
        self.sequences = torch.tensor(sequences, dtype=torch.int64, device=self.device)
        self.positions = torch.tensor(positions, dtype=torch.int64, device=self.device)
        self.num_keys, self.of_prompts = max(positions) + 1, of_prompts


class Remembering(ABC):
    """A module that remembers sequences during generation."""

    @abstractmethod
    def remember(self, reading: CachedPass | None) -> None:
        """Starts an empty cache for these passes; None turns the cache off."""


@contextlib.contextmanager
def remembering(modules: Iterable[Remembering], reading: CachedPass) -> Iterator[None]:
    """Makes the modules remember sequences inside the block."""
    layers = list(modules)
    try:
        for layer in layers:
            layer.remember(reading)
        yield
    finally:
        for layer in layers:
            layer.remember(None)


class Cached(KeySource):
    """Key/value cache of one attention layer on this rank during generation; latent attention caches latents.

    Every context-parallel rank reads whole rows of different sequences.
    """

    def __init__(self, reading: CachedPass) -> None:
        """Makes an empty cache; `reading` describes the tokens of each pass, the same for all layers of a rank."""
        self._reading = reading
        self._rows: Tensor | None = None
        """[sequences, length, ...]"""

    def rows(self, local: Tensor) -> Tensor:
        """Caches the rows of this pass's tokens, [tokens, 1, ...]; returns the rows that the queries may see.

        For prompts these are the same rows. Otherwise they are [keys, tokens, ...]: for each token all rows of its
        sequence so far, followed by rows that `attend` hides.
        """
        reading = self._reading
        if self._rows is None:
            self._rows = local.new_zeros((*reading.capacity, *local.shape[2:]))
        self._rows[reading.sequences, reading.positions] = local[:, 0]
        if reading.of_prompts:
            return local
        return self._rows[:, : reading.num_keys].index_select(0, reading.sequences).transpose(0, 1)

    def attend(self, kernels: RowKernels, query: Tensor, key: Tensor, value: Tensor, keys: KeySet) -> Tensor:
        if self._reading.of_prompts:
            return super().attend(kernels, query, key, value, keys)
        keys = replace(keys, chosen=keys.seen_from(self._reading.positions, len(key))[:, None, None])
        # one query per sequence, as a batch: [1, tokens, heads, dim]
        return kernels.attend_runs(query.transpose(0, 1), key, value, keys, [(len(key) - 1, len(key))]).transpose(0, 1)


_KINDS = {"all_gather": Gathered, "a2a": Exchanged, "p2p": Ring}


def source_of(cp_comm_type: str | None, cp: dist.ProcessGroup) -> KeySource:
    """Returns the source for megatron-core's name of the kind of context parallelism, which may be None at cp = 1."""
    return Whole() if cp.size() == 1 else _KINDS[str(cp_comm_type)](cp)


def _heads_apart(part: Tensor) -> Tensor:
    """Makes the positions of each head of [seq, batch, heads, dim] contiguous in memory on a CPU: torch's kernel reads
    one head at a time, and rows a power of two apart would collide in the cache."""
    if part.device.type != "cpu" or part.stride(0) == part.shape[-1]:
        return part
    return part.permute(1, 2, 0, 3).contiguous().permute(2, 0, 1, 3)
