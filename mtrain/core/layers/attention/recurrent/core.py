"""Convolution and states of a layer's heads, exact under context parallelism and while text is generated.

Under context parallelism a rank holds the parts r and 2 cp - 1 - r of every row (zigzag). Ulysses exchanges sequence
for heads where its ranks divide the key heads, and whole rows are computed. Everywhere else states are passed: a part
turns the state S before it into carrying @ S + update, whatever S is. Ranks collect these maps of all parts, apply
those before their own, and compute from the resulting states; a part with a document's start carries nothing. The
convolution needs the last inputs of the part before, which are collected likewise.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

import torch
import torch.distributed as dist
from megatron.core.transformer import TransformerConfig
from torch import Tensor, nn
from torch.nn import functional

from mtrain.core.kernels import region
from mtrain.core.layers.attention.key_source import CachedPass, Exchanged, Remembering
from mtrain.core.layers.attention.recurrent.chunks import Chunks, Projected, applied, transition
from mtrain.core.layers.own_parameters import DividedModule, divided_parameter
from mtrain.core.layers.products import widened


@region(activations=2)
def causal_convolution(
    x: Tensor,
    state: Tensor | None,
    weight: Tensor,
    bias: Tensor | None = None,
    document_starts: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Convolves every channel of x, [seq, batch, channels], and applies silu; what is before a token's document counts
    as 0.

    Args:
        state: [kernel - 1, batch, channels] inputs before the first token; None: 0.
        weight: [channels, kernel]; the last column is that of the token itself.
        bias: [channels] added before silu; None: 0.
        document_starts: Starts as in `delta_rule`.

    Returns:
        Outputs in the shape and dtype of x, and the last kernel - 1 inputs.
    """
    seq, kernel = len(x), weight.shape[1]
    before = x.new_zeros(kernel - 1, *x.shape[1:]) if state is None else state
    inputs = torch.cat((before, x))
    # summed in float32, as kernels for half precision do
    taps = widened(weight).unbind(1)
    total = x * taps[-1] if bias is None else torch.addcmul(bias.to(taps[-1].dtype), x, taps[-1])
    places = torch.arange(seq, device=x.device)
    for back in range(1, kernel):
        # masked after the product: backward then needs the inputs only, of which this is a view
        product = inputs[kernel - 1 - back : kernel - 1 - back + seq] * taps[kernel - 1 - back]
        if document_starts is not None:
            is_inside = document_starts.to(x.device) <= places - back
            product = torch.where(is_inside.T.unsqueeze(-1), product, 0)
        total = total + product
    return functional.silu(total.to(x.dtype)), inputs[seq:]


class Convolution(DividedModule):
    """Weights of a causal convolution, each channel by itself; a call returns them for the core, which convolves after
    the exchange of context parallelism."""

    divided_axes = MappingProxyType({"weight": 0, "bias": 0})
    bias: nn.Parameter | None

    def __init__(
        self, config: TransformerConfig, channels: int, kernel: int, tp: dist.ProcessGroup, has_bias: bool = False
    ) -> None:
        """Builds this rank's channels, each of which sees `kernel` tokens."""
        super().__init__(config, tp)
        # with an axis of one input, as torch's Conv1d has it
        self.weight = divided_parameter(config, torch.empty(channels, 1, kernel))
        if has_bias:
            self.bias = divided_parameter(config, torch.zeros(channels))
        else:
            self.register_parameter("bias", None)

    def forward(self) -> tuple[Tensor, Tensor | None]:
        """Returns [channels, kernel], and [channels] or no bias.

        megatron-core waits for an overlapped gathering before the call of the module that owns the parameter, see
        `KeyValueProjection`.
        """
        with torch.enable_grad():  # a compiled region asks whether the weight learns, also in passes without a graph
            return self.weight.squeeze(1), self.bias


@dataclass(frozen=True)
class Places:
    """Positions of the tokens of a pass if each sequence has its own row, right-aligned."""

    sequences: Tensor
    """[rows] sequence of each row."""
    row: Tensor
    """[tokens] row of each token."""
    place: Tensor
    """[tokens] its index in the row."""
    length: int

    def as_rows(self, tokens: Tensor) -> Tensor:
        """[tokens, 1, ...] -> [length, rows, ...]. Zeros fill the rows in front, as what is before a sequence."""
        rows = tokens.new_zeros(self.length, len(self.sequences), *tokens.shape[2:])
        rows[self.place, self.row] = tokens[:, 0]
        return rows

    def as_tokens(self, rows: Tensor) -> Tensor:
        """[length, rows, ...] -> [tokens, 1, ...]."""
        return rows[self.place, self.row].unsqueeze(1)


class Memory:
    """The convolution's last inputs and the state of each sequence, of one layer on this rank."""

    def __init__(self, reading: CachedPass) -> None:
        self._reading = reading
        self._window: Tensor | None = None
        """[kernel - 1, sequences, channels]"""
        self._state: Tensor | None = None
        """[sequences, value_heads, key_dim, value_dim]"""

    def places(self) -> Places:
        """Returns the places of the tokens of this pass."""
        reading = self._reading
        sequences, row, counts = torch.unique(reading.sequences, return_inverse=True, return_counts=True)
        if not reading.of_prompts:  # one token each; those that only pad a row share one
            return Places(sequences, row, torch.zeros_like(row), 1)
        length = int(counts.max())
        return Places(sequences, row, length - counts[row] + reading.positions, length)

    def before(self, places: Places) -> tuple[Tensor | None, Tensor | None]:
        """Returns what is before the tokens: inputs, [kernel - 1, rows, channels], and states, [rows, value_heads,
        key_dim, value_dim]; None: sequences begin here."""
        if self._reading.of_prompts or self._window is None or self._state is None:
            return None, None
        return self._window[:, places.sequences], self._state[places.sequences]

    def keep(self, places: Places, window: Tensor, state: Tensor) -> None:
        """Keeps what is after the tokens, in the shapes of `before`."""
        count = self._reading.capacity[0]
        if self._window is None or self._state is None:
            self._window = window.new_zeros(len(window), count, *window.shape[2:])
            self._state = state.new_zeros(count, *state.shape[1:])
        self._window[:, places.sequences] = window
        self._state[places.sequences] = state


class Heads(NamedTuple):
    """Heads of a tensor-parallel rank; each key head serves value_heads / key_heads adjacent value heads."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int

    @property
    def channels(self) -> int:
        """Channels of a key head: its query, its key and the values that it serves."""
        return 2 * self.key_dim + self.value_heads // self.key_heads * self.value_dim


class Inputs(NamedTuple):
    """What tokens give to a core; channels are grouped by key head: query, key, values."""

    mixed: Tensor
    """[seq, batch, key_heads x channels] before the convolution."""
    log_decay: Tensor
    """[seq, batch, value_heads], float32 or float64."""
    beta: Tensor
    """[seq, batch, value_heads]."""


class CoreParameters(NamedTuple):
    """Parameters of a core, of the heads that compute."""

    weight: Tensor
    """[key_heads x channels, kernel] of the convolution."""
    bias: Tensor | None
    """[key_heads x channels] of the convolution."""
    skip: Tensor | None
    """[value_heads] factors with which values are added to the outputs."""

    @torch.enable_grad()  # as in `Convolution.forward`
    def of_part(self, part: int, count: int) -> CoreParameters:
        """Returns the parameters of one of `count` equal parts of the heads."""
        return CoreParameters._make(None if values is None else values.chunk(count)[part] for values in self)


class RecurrentCore(nn.Module, Remembering):
    """What replaces core attention in a layer with a state; it has no parameters. Subclasses define how tokens change
    it."""

    compiles_regions = False
    memory: Memory | None = None
    """States during generation. Every context-parallel rank then reads whole rows of different sequences."""

    def __init__(self, heads: Heads, cp: dist.ProcessGroup, cp_comm_type: str | None, chunk: int = 64) -> None:
        """Takes the heads of this rank of TP, megatron-core's name of how context-parallel ranks attend, and the number
        of tokens of a chunk."""
        super().__init__()
        self.heads, self.cp, self.chunk, self.exchange = heads, cp, chunk, Exchanged(cp)
        self.exchanges_heads = cp_comm_type == "a2a" and heads.key_heads % cp.size() == 0

    def chunks(self, tokens: Projected, document_starts: Tensor | None) -> Chunks:
        """Returns the effect of the chunks of rows on states; `document_starts` as in `causal_convolution`."""
        raise NotImplementedError

    def outputs(self, tokens: Projected, document_starts: Tensor | None, skip: Tensor | None) -> Tensor:
        """Returns what whole rows read from states that are empty before them; see `applied`."""
        return applied(self.chunks(tokens, document_starts), tokens.value, None, skip)[0]

    def remember(self, reading: CachedPass | None) -> None:
        """Keeps a state and the convolution's last inputs of each sequence."""
        self.memory = None if reading is None else Memory(reading)

    def forward(
        self,
        mixed: Tensor,
        weight: Tensor,
        log_decay: Tensor,
        beta: Tensor,
        document_starts: Tensor | None,
        bias: Tensor | None = None,
        skip: Tensor | None = None,
    ) -> Tensor:
        """Convolves [seq_local, batch, key_heads_local x channels] `mixed` inputs, and carries states inside documents.

        Log decays and steps (beta) are [seq_local, batch, value_heads_local]; `document_starts` are those of full rows,
        see `key_set`; weight, bias and skip are described by `CoreParameters`.

        Returns:
            [seq_local, batch, value_heads_local x value_dim].
        """
        inputs, held = Inputs(mixed, log_decay, beta), CoreParameters(weight, bias, skip)
        if self.memory is not None:
            return self._generated(self.memory, inputs, held).flatten(2)
        return self._computed(inputs, held, document_starts).flatten(2)

    def _computed(self, inputs: Inputs, held: CoreParameters, document_starts: Tensor | None) -> Tensor:
        """Computes [seq_local, batch, value_heads_local, value_dim] as this rank's group of CP can."""
        if self.cp.size() == 1:
            return self._whole_rows(inputs, held, document_starts)
        if self.exchanges_heads:
            return self._with_own_heads(inputs, held, document_starts)
        return self._with_states_of_parts(inputs, held, document_starts)

    def _whole_rows(self, inputs: Inputs, held: CoreParameters, document_starts: Tensor | None) -> Tensor:
        """Computes rows from their first tokens on; the heads may be fewer than a rank's."""
        convolve = causal_convolution.compiled_if(self.compiles_regions)
        convolved, _ = convolve(inputs.mixed, None, held.weight, held.bias, document_starts)
        tokens = self._tokens(convolved, inputs)
        return self.outputs(tokens, document_starts, held.skip)

    def _tokens(self, convolved: Tensor, inputs: Inputs) -> Projected:
        """Cuts the convolution's output into heads, [seq, batch, heads, dim]; the heads may be fewer than a rank's."""
        heads = self.heads
        groups = torch.unflatten(convolved, -1, (-1, heads.channels))
        query, key, values = torch.split(
            groups, [heads.key_dim, heads.key_dim, groups.shape[-1] - 2 * heads.key_dim], -1
        )
        values = values.reshape(*values.shape[:2], -1, heads.value_dim)
        return Projected(query, key, values, inputs.log_decay, inputs.beta)

    def _with_own_heads(self, inputs: Inputs, held: CoreParameters, document_starts: Tensor | None) -> Tensor:
        """Computes whole rows of a part of the heads: two all-to-alls over CP before, and one after; the same again in
        backward."""
        key_heads, to_heads = self.heads.key_heads, self.exchange.to_heads
        mixed = to_heads(torch.unflatten(inputs.mixed, -1, (key_heads, -1)))
        # not together with the first, whose precision may be half
        rates = torch.stack((inputs.log_decay, inputs.beta.to(inputs.log_decay.dtype)), dim=-1)
        rates = to_heads(torch.unflatten(rates.flatten(2), -1, (key_heads, -1)))
        log_decay, beta = torch.unflatten(rates.flatten(2), -1, (-1, 2)).unbind(-1)
        own = held.of_part(self.cp.rank(), self.cp.size())
        output = self._whole_rows(Inputs(mixed.flatten(2), log_decay, beta), own, document_starts)
        return self.exchange.to_sequence(output)

    def _with_states_of_parts(self, inputs: Inputs, held: CoreParameters, document_starts: Tensor | None) -> Tensor:
        """Computes this rank's two parts of every row from the states before them: two all-gathers over CP, of inputs
        of the convolution and of maps of states; in backward a reduce-scatter for each."""
        parts = Inputs._make(_parts_as_rows(values) for values in inputs)
        length = len(parts.mixed)
        starts = document_starts
        if starts is not None:
            # counted from a part's own first token: negative where the document starts before it
            starts = torch.cat([starts[:, part * length :][:, :length] - part * length for part in self._own_parts])
        window = self._inputs_before(parts.mixed, held.weight.shape[1] - 1)
        convolve = causal_convolution.compiled_if(self.compiles_regions)
        convolved, _ = convolve(parts.mixed, window, held.weight, held.bias, starts)
        tokens = self._tokens(convolved, parts)
        chunks = self.chunks(tokens, starts)
        output, _ = applied(chunks, tokens.value, self._states_before(transition(chunks)), held.skip)
        return _parts_apart(output).flatten(0, 1)

    def _inputs_before(self, mixed: Tensor, count: int) -> Tensor:
        """Returns the last `count` inputs before each of this rank's parts, 0 before the row: [count, 2 x batch,
        channels] of [length, 2 x batch, channels]. One all-gather over CP."""
        # parts shorter than the window: it then reaches over several of them
        size = min(count, len(mixed))
        ends = self._collected(_parts_apart(mixed[len(mixed) - size :]))
        # [count + 2 cp x size, batch, channels]
        ends = functional.pad(ends.flatten(0, 1), (0, 0, 0, 0, count, 0))
        return torch.cat([ends[part * size :][:count] for part in self._own_parts], dim=1)

    def _states_before(self, maps: Tensor) -> Tensor:
        """Returns the state before each of this rank's parts, [2 x batch, value_heads, key_dim, value_dim], from what
        their tokens do to states, the result of `transition`. One all-gather over CP."""
        collected = self._collected(torch.unflatten(maps, 0, (2, -1)))
        updates, carrying = torch.split(collected, [self.heads.value_dim, self.heads.key_dim], dim=-1)
        states = [torch.zeros_like(updates[0])]
        for update, carried in zip(updates.unbind(0), carrying.unbind(0)):
            states.append(carried @ states[-1] + update)
        return torch.cat([states[part] for part in self._own_parts])

    @property
    def _own_parts(self) -> tuple[int, int]:
        """Returns which of the 2 cp parts of a row this rank holds."""
        return self.cp.rank(), 2 * self.cp.size() - 1 - self.cp.rank()

    def _collected(self, own: Tensor) -> Tensor:
        """Collects the parts of all ranks, [2, ...] of each -> [2 cp, ...] in the order of the row; one all-gather."""
        # its backward is a reduce-scatter that sums, since the later parts of every rank depend on a part
        return self.exchange.rows(own.contiguous())

    def _generated(self, memory: Memory, inputs: Inputs, held: CoreParameters) -> Tensor:
        """Continues the sequences of a pass, whose tokens are [tokens, 1, ...]."""
        places = memory.places()
        rows = Inputs._make(places.as_rows(values) for values in inputs)
        window, state = memory.before(places)
        convolved, window = causal_convolution(rows.mixed, window, held.weight, held.bias)
        tokens = self._tokens(convolved, rows)
        output, state = applied(self.chunks(tokens, None), tokens.value, state, held.skip)
        memory.keep(places, window, state)
        return places.as_tokens(output)


def _parts_apart(held: Tensor) -> Tensor:
    """[length, 2 x batch, ...] -> [2, length, batch, ...]."""
    return torch.unflatten(held, 1, (2, -1)).transpose(0, 1)


def _parts_as_rows(held: Tensor) -> Tensor:
    """[seq_local, batch, ...] -> [seq_local / 2, 2 x batch, ...]: rows of the first part, then of the last."""
    return torch.unflatten(held, 0, (2, -1)).transpose(0, 1).flatten(1, 2)
