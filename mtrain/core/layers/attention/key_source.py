"""Where the keys and values come from that a rank's queries see.

Under context parallelism a rank holds chunks r and 2*cp-1-r of every row (zigzag), so queries come as two contiguous
runs of the row. Keys and values are brought together in one of three ways: `Gathered` collects those of the whole row
on every rank; `Exchanged` exchanges sequence for heads, so that each rank sees whole rows of a part of the heads; in a
`Ring` they are passed around. During generation each rank reads whole rows, with a cache (`Cached`).
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


# Cached: it is the same in every layer and microbatch, and making it copies to the device, for which the host waits.
@lru_cache(maxsize=8)
def row_order(seq: int, cp: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns row positions in the order of the ranks that hold them, and the inverse permutation; [seq] int64 each."""
    held = torch.cat([zigzag_index(seq, cp, rank) for rank in range(cp)])
    return held.to(device), torch.argsort(held).to(device)


class RowKernels(Protocol):
    """Attention on this rank, once it has the keys."""

    scale: float

    def attend_runs(self, query: Tensor, key: Tensor, value: Tensor, keys: KeySet, runs: Sequence[Run]) -> Tensor:
        """Attends with the queries of `runs`, one after the other, to keys of whole rows, all [seq, batch, heads,
        dim]."""


class KeySource(ABC):
    """One way to bring queries and keys together; `heads` or `rows` comes first, then `attend` with their result."""

    @abstractmethod
    def rows(self, own: Tensor) -> Tensor:
        """Returns [seq, batch, ...] in the order of the row, from [seq_local, batch, ...] of this rank's tokens."""

    def heads(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Returns keys and values [seq, batch, groups, dim] for the heads that this rank attends with, from those of
        its tokens."""
        # both in one collective
        rows = self.rows(torch.cat((key, value), dim=-1))
        key, value = torch.split(rows, [key.shape[-1], value.shape[-1]], dim=-1)
        return key, value

    def own_heads(self, by_head: Tensor) -> Tensor:
        """Returns the part of [heads, ...] of the heads that this rank attends with."""
        return by_head

    def attend(self, kernels: RowKernels, query: Tensor, key: Tensor, value: Tensor, keys: KeySet) -> Tensor:
        """Attends with the queries of this rank's tokens, [seq_local, batch, heads_local, dim]; returns their values in
        the same form."""
        return kernels.attend_runs(query, _heads_apart(key), _heads_apart(value), keys, [(0, len(query))])


class Whole(KeySource):
    """Rows are whole on this rank."""

    def rows(self, own: Tensor) -> Tensor:
        return own

    def heads(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        return key, value


class Gathered(KeySource):
    """Every rank collects whole rows: one all-gather over CP, whose backward is a reduce-scatter."""

    def __init__(self, cp: dist.ProcessGroup) -> None:
        self.cp = cp

    def rows(self, own: Tensor) -> Tensor:
        # The function has another purpose by its name, but gathers along the first axis, over any group. Its backward
        # sums, since queries of every rank read all keys.
        gathered = gather_from_sequence_parallel_region(own, group=self.cp)
        return gathered.index_select(0, self.orders(gathered)[1])

    def orders(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Returns `row_order` of [seq, ...]."""
        return row_order(len(rows), self.cp.size(), rows.device)

    def attend(self, kernels: RowKernels, query: Tensor, key: Tensor, value: Tensor, keys: KeySet) -> Tensor:
        # an early and a late chunk each: under a causal mask all ranks have equally many pairs to compute
        chunk, last = len(query) // 2, 2 * self.cp.size() - 1
        runs = [(index * chunk, (index + 1) * chunk) for index in (self.cp.rank(), last - self.cp.rank())]
        return kernels.attend_runs(query, _heads_apart(key), _heads_apart(value), keys, runs)


class Exchanged(Gathered):
    """Ulysses: each rank has whole rows of a part of the heads. One all-to-all over CP each of queries, keys, values
    and output; the same in backward. Latents, which all heads share, are gathered.

    Source: Jacobs et al. 2023, "DeepSpeed Ulysses", arXiv 2309.14509.
    """

    def heads(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        cp, groups = self.cp.size(), key.shape[2]
        if groups % cp:  # fewer key/value heads than ranks are repeated
            repeats = cp // math.gcd(groups, cp)
            key, value = (part.repeat_interleave(repeats, dim=2) for part in (key, value))
        return self.to_heads(key), self.to_heads(value)

    def own_heads(self, by_head: Tensor) -> Tensor:
        return by_head.chunk(self.cp.size())[self.cp.rank()]

    def attend(self, kernels: RowKernels, query: Tensor, key: Tensor, value: Tensor, keys: KeySet) -> Tensor:
        # whole rows from here on, so documents and windows do not depend on CP
        query = self.to_heads(query)
        return self.to_sequence(kernels.attend_runs(query, key, value, keys, [(0, len(query))]))

    def to_heads(self, part: Tensor) -> Tensor:
        """[seq_local, batch, heads, dim] -> [seq in the order of the row, batch, heads / cp, dim]; one all-to-all."""
        size, (seq, batch, heads, dim) = self.cp.size(), part.shape
        # the receiver goes first, because the all-to-all cuts the first axis in equal parts
        part = part.reshape(seq, batch, size, heads // size, dim).permute(2, 0, 1, 3, 4)
        received = all_to_all(self.cp, part.reshape(size * seq, batch, heads // size, dim))
        return received.index_select(0, self.orders(received)[1])

    def to_sequence(self, rows: Tensor) -> Tensor:
        """[seq in the order of the row, batch, heads / cp, dim] -> [seq_local, batch, heads, dim]; one all-to-all."""
        size, (seq, batch, heads, dim) = self.cp.size(), rows.shape
        # rank r sends the heads of part r: [cp, seq_local, batch, heads / cp, dim]
        part = all_to_all(self.cp, rows.index_select(0, self.orders(rows)[0]).contiguous())
        part = part.view(size, seq // size, batch, heads, dim)
        return part.permute(1, 2, 0, 3, 4).reshape(seq // size, batch, size * heads, dim)


class Ring(Whole):
    """Keys and values are passed around while each rank attends to those that it has; see `ring_attention`. Neither
    documents nor windows, sinks, dropout and latents can be combined with it (config/known_issues.py)."""

    def __init__(self, cp: dist.ProcessGroup) -> None:
        self.cp = cp

    def attend(self, kernels: RowKernels, query: Tensor, key: Tensor, value: Tensor, keys: KeySet) -> Tensor:
        assert keys == KeySet(), "documents and windows are refused with a ring (config/known_issues.py)"
        return ring_attention(query, key, value, kernels.scale, self.cp)


class CachedPass:
    """The tokens that a pass of generation reads, for all layers of a rank.

    A pass reads one row of tokens, each of some sequence at some position: whole prompts one after the other (as
    documents), or one further token of each sequence. So sequences of any lengths go together without padding, and the
    row divides over sequence-parallel ranks like any other.
    """

    def __init__(self, num_sequences: int, length: int, device: torch.device) -> None:
        """Takes the largest number of sequences (a further one takes tokens that only pad a row), and the length of the
        longest, prompt and answer."""
        self.capacity = (num_sequences + 1, length)
        self.device = device
        self.of_prompts = True
        self.num_keys = 0
        self.sequences = self.positions = torch.empty(0, dtype=torch.int64, device=device)

    @property
    def filler(self) -> int:
        """Returns the sequence of tokens that only pad a row."""
        return self.capacity[0] - 1

    def read(self, sequences: Sequence[int], positions: Sequence[int], of_prompts: bool) -> None:
        """Sets the tokens of the next pass by their sequences and positions there. Sequences begin here, each in one
        run from position 0 (`of_prompts`), or each token continues one."""
        self.sequences = torch.tensor(sequences, dtype=torch.int64, device=self.device)
        self.positions = torch.tensor(positions, dtype=torch.int64, device=self.device)
        self.num_keys, self.of_prompts = max(positions) + 1, of_prompts


class Remembering(ABC):
    """A module that remembers a sequence during generation."""

    @abstractmethod
    def remember(self, reading: CachedPass | None) -> None:
        """Starts with an empty cache for these passes; None: keeps nothing from here on."""


@contextlib.contextmanager
def remembering(modules: Iterable[Remembering], reading: CachedPass) -> Iterator[None]:
    """Makes all such modules of a rank remember their sequences inside the block."""
    layers = list(modules)
    try:
        for layer in layers:
            layer.remember(reading)
        yield
    finally:
        for layer in layers:
            layer.remember(None)


class Cached(KeySource):
    """Rows of each sequence that one attention layer keeps on this rank during generation.

    Every context-parallel rank reads whole rows of different sequences. Of latent attention it keeps the latents.
    """

    def __init__(self, reading: CachedPass) -> None:
        """Takes the tokens of each pass, the same for all layers of a rank."""
        self._reading = reading
        self._rows: Tensor | None = None
        """[sequences, length, ...]"""

    def rows(self, own: Tensor) -> Tensor:
        """Keeps the rows of this pass's tokens, [tokens, 1, ...], and returns the rows that its queries may see.

        Of prompts these are the same. Else [keys, tokens, ...]: for each token all rows that its sequence has so far,
        followed by others, which `attend` hides.
        """
        reading = self._reading
        if self._rows is None:
            self._rows = own.new_zeros((*reading.capacity, *own.shape[2:]))
        self._rows[reading.sequences, reading.positions] = own[:, 0]
        if reading.of_prompts:
            return own
        return self._rows[:, : reading.num_keys].index_select(0, reading.sequences).transpose(0, 1)

    def attend(self, kernels: RowKernels, query: Tensor, key: Tensor, value: Tensor, keys: KeySet) -> Tensor:
        if self._reading.of_prompts:
            return super().attend(kernels, query, key, value, keys)
        keys = replace(keys, chosen=keys.seen_from(self._reading.positions, len(key))[:, None, None])
        # a query of each sequence: the batch, [1, tokens, heads, dim]
        return kernels.attend_runs(query.transpose(0, 1), key, value, keys, [(len(key) - 1, len(key))]).transpose(0, 1)


_KINDS = {"all_gather": Gathered, "a2a": Exchanged, "p2p": Ring}


def source_of(cp_comm_type: str | None, cp: dist.ProcessGroup) -> KeySource:
    """Returns the source by megatron-core's name of the kind of context parallelism; None only without any."""
    return Whole() if cp.size() == 1 else _KINDS[str(cp_comm_type)](cp)


def _heads_apart(part: Tensor) -> Tensor:
    """Lays out [seq, batch, heads, dim], on a CPU, with the positions of a head contiguous: torch's kernel multiplies
    one head at a time, and rows a power of two apart would collide in the cache."""
    if part.device.type != "cpu" or part.stride(0) == part.shape[-1]:
        return part
    return part.permute(1, 2, 0, 3).contiguous().permute(2, 0, 1, 3)
