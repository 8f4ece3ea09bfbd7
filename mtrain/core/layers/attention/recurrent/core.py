"""Convolution and recurrent states of a layer, exact under context parallelism and in generation.

Under context parallelism a rank holds parts r and 2 cp - 1 - r of every row (zigzag). If cp divides the key heads,
Ulysses exchanges sequence for heads and computes whole rows. Otherwise ranks pass states: each part maps the state S
before it to carrying @ S + update. Ranks gather these maps of all parts, apply those before their own parts, and
compute from the resulting states; a part in which a document starts carries nothing. The convolution needs the last
inputs of the part before, which are gathered as well.
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
    """Convolves every channel and applies silu; inputs before the document of a token count as 0.

    Args:
        x: Inputs, [seq, batch, channels].
        state: Inputs before the first token, [kernel - 1, batch, channels]; None: 0.
        weight: Weights, [channels, kernel]; the last column belongs to the token itself.
        bias: Bias added before silu, [channels]; None: 0.
        document_starts: Starts as in `delta_rule`.

    Returns:
        Outputs in the shape and dtype of x, and the last kernel - 1 inputs.
    """
    seq, kernel = len(x), weight.shape[1]
    before = x.new_zeros(kernel - 1, *x.shape[1:]) if state is None else state
    inputs = torch.cat((before, x))
    # summed in float32, like kernels for half precision
    taps = widened(weight).unbind(1)
    total = x * taps[-1] if bias is None else torch.addcmul(bias.to(taps[-1].dtype), x, taps[-1])
    positions = torch.arange(seq, device=x.device)
    for back in range(1, kernel):
        # masked after the product, so that backward needs only the inputs, and these are a view
        product = inputs[kernel - 1 - back : kernel - 1 - back + seq] * taps[kernel - 1 - back]
        if document_starts is not None:
            is_inside = document_starts.to(x.device) <= positions - back
            product = torch.where(is_inside.T.unsqueeze(-1), product, 0)
        total = total + product
    return functional.silu(total.to(x.dtype)), inputs[seq:]


class Convolution(DividedModule):
    """Weights of a depthwise causal convolution; a call returns them for the core, which convolves."""

    divided_axes = MappingProxyType({"weight": 0, "bias": 0})
    bias: nn.Parameter | None

    def __init__(
        self, config: TransformerConfig, channels: int, kernel: int, tp: dist.ProcessGroup, has_bias: bool = False
    ) -> None:
        """Builds the weights of this rank's channels for a window of `kernel` tokens."""
        super().__init__(config, tp)
        # with an axis of length 1, as in torch's Conv1d
        self.weight = divided_parameter(config, torch.empty(channels, 1, kernel))
        if has_bias:
            self.bias = divided_parameter(config, torch.zeros(channels))
        else:
            self.register_parameter("bias", None)

    def forward(self) -> tuple[Tensor, Tensor | None]:
        """Returns the weight, [channels, kernel], and the bias, [channels] or None.

        A call is necessary, see `KeyValueProjection`.
        """
        with torch.enable_grad():  # even in passes without a graph, since compiled regions check whether weights train
            return self.weight.squeeze(1), self.bias


@dataclass(frozen=True)
class RowAlignment:
    """Arrangement of the tokens of a generation pass as rows, one per sequence, right-aligned."""

    sequences: Tensor
    """Sequence of each row, [rows]."""
    row: Tensor
    """Row of each token, [tokens]."""
    index: Tensor
    """Index of each token in its row, [tokens]."""
    length: int

    def as_rows(self, tokens: Tensor) -> Tensor:
        """Turns [tokens, 1, ...] into [length, rows, ...], with zeros in front of shorter sequences."""
        rows = tokens.new_zeros(self.length, len(self.sequences), *tokens.shape[2:])
        rows[self.index, self.row] = tokens[:, 0]
        return rows

    def as_tokens(self, rows: Tensor) -> Tensor:
        """Turns [length, rows, ...] into [tokens, 1, ...]."""
        return rows[self.index, self.row].unsqueeze(1)


class Memory:
    """Last inputs of the convolution, and state, of each sequence during generation; for one layer on this rank."""

    def __init__(self, reading: CachedPass) -> None:
        self._reading = reading
        self._window: Tensor | None = None
        """Last inputs, [kernel - 1, sequences, channels]."""
        self._state: Tensor | None = None
        """States, [sequences, value_heads, key_dim, value_dim]."""

    def alignment(self) -> RowAlignment:
        """Returns the arrangement of the tokens of this pass."""
        reading = self._reading
        sequences, row, counts = torch.unique(reading.sequences, return_inverse=True, return_counts=True)
        if not reading.of_prompts:  # one token per sequence; tokens that only pad a row share a position
            return RowAlignment(sequences, row, torch.zeros_like(row), 1)
        length = int(counts.max())
        return RowAlignment(sequences, row, length - counts[row] + reading.positions, length)

    def before(self, alignment: RowAlignment) -> tuple[Tensor | None, Tensor | None]:
        """Returns the inputs before the tokens, [kernel - 1, rows, channels], and the states before them, [rows,
        value_heads, key_dim, value_dim]; both None if sequences start in this pass."""
        if self._reading.of_prompts or self._window is None or self._state is None:
            return None, None
        return self._window[:, alignment.sequences], self._state[alignment.sequences]

    def keep(self, alignment: RowAlignment, window: Tensor, state: Tensor) -> None:
        """Stores the last inputs and the states after the tokens, in the shapes of `before`."""
        count = self._reading.capacity[0]
        if self._window is None or self._state is None:
            self._window = window.new_zeros(len(window), count, *window.shape[2:])
            self._state = state.new_zeros(count, *state.shape[1:])
        self._window[:, alignment.sequences] = window
        self._state[alignment.sequences] = state


class Heads(NamedTuple):
    """Heads of a tensor-parallel rank; each key head serves value_heads / key_heads adjacent value heads."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int

    @property
    def channels(self) -> int:
        """Number of channels per key head: its query, its key and the values of its value heads."""
        return 2 * self.key_dim + self.value_heads // self.key_heads * self.value_dim


class Inputs(NamedTuple):
    """Inputs of a core; channels are grouped by key head: query, key, values."""

    mixed: Tensor
    """Inputs of the convolution, [seq, batch, key_heads x channels]."""
    log_decay: Tensor
    """[seq, batch, value_heads], float32 or float64."""
    beta: Tensor
    """[seq, batch, value_heads]."""


class CoreParameters(NamedTuple):
    """Parameters of a core for the heads that this rank computes."""

    weight: Tensor
    """Weight of the convolution, [key_heads x channels, kernel]."""
    bias: Tensor | None
    """Bias of the convolution, [key_heads x channels]."""
    skip: Tensor | None
    """Factors with which values are added to the outputs, [value_heads]."""

    @torch.enable_grad()  # as in `Convolution.forward`
    def of_part(self, part: int, count: int) -> CoreParameters:
        """Returns the parameters of one of `count` equal parts of the heads."""
        return CoreParameters._make(None if values is None else values.chunk(count)[part] for values in self)


class RecurrentCore(nn.Module, Remembering):
    """Replacement of core attention in a layer with a recurrent state; has no parameters. Subclasses define how tokens
    change the state."""

    compiles_regions = False
    memory: Memory | None = None
    """States during generation, when every context-parallel rank reads whole rows of different sequences."""

    def __init__(self, heads: Heads, cp: dist.ProcessGroup, cp_comm_type: str | None, chunk: int = 64) -> None:
        """Makes a core.

        Args:
            heads: Heads of this tensor-parallel rank.
            cp_comm_type: megatron-core's name of the kind of context parallelism.
        """
        super().__init__()
        self.heads, self.cp, self.chunk, self.exchange = heads, cp, chunk, Exchanged(cp)
        self.exchanges_heads = cp_comm_type == "a2a" and heads.key_heads % cp.size() == 0

    def chunks(self, tokens: Projected, document_starts: Tensor | None) -> Chunks:
        """Returns the effect of each chunk of the rows on states; `document_starts` as in `delta_rule`."""
        raise NotImplementedError

    def outputs(self, tokens: Projected, document_starts: Tensor | None, skip: Tensor | None) -> Tensor:
        """Returns the outputs of whole rows, starting from empty states; see `applied`."""
        return applied(self.chunks(tokens, document_starts), tokens.value, None, skip)[0]

    def remember(self, reading: CachedPass | None) -> None:
        """Starts to store the states and last inputs of sequences; stops if `reading` is None."""
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
        """Convolves the inputs, and carries states inside documents.

        Args:
            mixed: See `Inputs`, as for log_decay and beta; all are of this rank's tokens and heads.
            weight: See `CoreParameters`, as for bias and skip.
            log_decay: See `Inputs`.
            beta: See `Inputs`.
            document_starts: Starts of documents in full rows, see `key_set`.
            bias: See `CoreParameters`.
            skip: See `CoreParameters`.

        Returns:
            [seq_local, batch, value_heads_local x value_dim].
        """
        inputs, parameters = Inputs(mixed, log_decay, beta), CoreParameters(weight, bias, skip)
        if self.memory is not None:
            return self._generated(self.memory, inputs, parameters).flatten(2)
        return self._computed(inputs, parameters, document_starts).flatten(2)

    def _computed(self, inputs: Inputs, parameters: CoreParameters, document_starts: Tensor | None) -> Tensor:
        """Computes [seq_local, batch, value_heads_local, value_dim] by the kind of context parallelism that applies."""
        if self.cp.size() == 1:
            return self._whole_rows(inputs, parameters, document_starts)
        if self.exchanges_heads:
            return self._with_exchanged_heads(inputs, parameters, document_starts)
        return self._with_passed_states(inputs, parameters, document_starts)

    def _whole_rows(self, inputs: Inputs, parameters: CoreParameters, document_starts: Tensor | None) -> Tensor:
        """Computes whole rows; the heads may be a part of this rank's."""
        convolve = causal_convolution.compiled_if(self.compiles_regions)
        convolved, _ = convolve(inputs.mixed, None, parameters.weight, parameters.bias, document_starts)
        tokens = self._tokens(convolved, inputs)
        return self.outputs(tokens, document_starts, parameters.skip)

    def _tokens(self, convolved: Tensor, inputs: Inputs) -> Projected:
        """Splits the output of the convolution into (some of) this rank's heads, [seq, batch, heads, dim]."""
        heads = self.heads
        groups = torch.unflatten(convolved, -1, (-1, heads.channels))
        query, key, values = torch.split(
            groups, [heads.key_dim, heads.key_dim, groups.shape[-1] - 2 * heads.key_dim], -1
        )
        values = values.reshape(*values.shape[:2], -1, heads.value_dim)
        return Projected(query, key, values, inputs.log_decay, inputs.beta)

    def _with_exchanged_heads(
        self, inputs: Inputs, parameters: CoreParameters, document_starts: Tensor | None
    ) -> Tensor:
        """Computes whole rows of some heads. Two all-to-alls over CP before and one after, the same in backward."""
        key_heads, to_heads = self.heads.key_heads, self.exchange.to_heads
        mixed = to_heads(torch.unflatten(inputs.mixed, -1, (key_heads, -1)))
        # not in the first exchange, which may be in half precision
        rates = torch.stack((inputs.log_decay, inputs.beta.to(inputs.log_decay.dtype)), dim=-1)
        rates = to_heads(torch.unflatten(rates.flatten(2), -1, (key_heads, -1)))
        log_decay, beta = torch.unflatten(rates.flatten(2), -1, (-1, 2)).unbind(-1)
        local_parameters = parameters.of_part(self.cp.rank(), self.cp.size())
        output = self._whole_rows(Inputs(mixed.flatten(2), log_decay, beta), local_parameters, document_starts)
        return self.exchange.to_sequence(output)

    def _with_passed_states(self, inputs: Inputs, parameters: CoreParameters, document_starts: Tensor | None) -> Tensor:
        """Computes this rank's two parts of every row from the states before them. Two all-gathers over CP, of inputs
        of the convolution and of maps of states, each with a reduce-scatter in backward."""
        parts = Inputs._make(_parts_as_rows(values) for values in inputs)
        length = len(parts.mixed)
        starts = document_starts
        if starts is not None:
            # relative to the first token of each part, so negative if the document starts before it
            starts = torch.cat([starts[:, part * length :][:, :length] - part * length for part in self._local_parts])
        window = self._inputs_before(parts.mixed, parameters.weight.shape[1] - 1)
        convolve = causal_convolution.compiled_if(self.compiles_regions)
        convolved, _ = convolve(parts.mixed, window, parameters.weight, parameters.bias, starts)
        tokens = self._tokens(convolved, parts)
        chunks = self.chunks(tokens, starts)
        output, _ = applied(chunks, tokens.value, self._states_before(transition(chunks)), parameters.skip)
        return _parts_apart(output).flatten(0, 1)

    def _inputs_before(self, mixed: Tensor, count: int) -> Tensor:
        """Returns the last `count` inputs before each of this rank's parts (0 before the row), [count, 2 x batch,
        channels], from its inputs, [length, 2 x batch, channels]. One all-gather over CP."""
        # parts may be shorter than the window, which then reaches over several of them
        size = min(count, len(mixed))
        ends = self._collected(_parts_apart(mixed[len(mixed) - size :]))
        # [count + 2 cp x size, batch, channels]
        ends = functional.pad(ends.flatten(0, 1), (0, 0, 0, 0, count, 0))
        return torch.cat([ends[part * size :][:count] for part in self._local_parts], dim=1)

    def _states_before(self, maps: Tensor) -> Tensor:
        """Returns the state before each of this rank's parts, [2 x batch, value_heads, key_dim, value_dim], from the
        maps of its parts, the result of `transition`. One all-gather over CP."""
        collected = self._collected(torch.unflatten(maps, 0, (2, -1)))
        updates, carrying = torch.split(collected, [self.heads.value_dim, self.heads.key_dim], dim=-1)
        states = [torch.zeros_like(updates[0])]
        for update, carried in zip(updates.unbind(0), carrying.unbind(0)):
            states.append(carried @ states[-1] + update)
        return torch.cat([states[part] for part in self._local_parts])

    @property
    def _local_parts(self) -> tuple[int, int]:
        """Returns the numbers of this rank's two parts among the 2 cp parts of a row."""
        return self.cp.rank(), 2 * self.cp.size() - 1 - self.cp.rank()

    def _collected(self, parts: Tensor) -> Tensor:
        """Gathers the two parts of each rank, [2, ...], to [2 cp, ...] in the order of the row; one all-gather."""
        # its backward, a reduce-scatter, sums, since parts of all ranks depend on earlier parts
        return self.exchange.rows(parts.contiguous())

    def _generated(self, memory: Memory, inputs: Inputs, parameters: CoreParameters) -> Tensor:
        """Reads the tokens of a generation pass, [tokens, 1, ...], and stores the states after them."""
        alignment = memory.alignment()
        rows = Inputs._make(alignment.as_rows(values) for values in inputs)
        window, state = memory.before(alignment)
        convolved, window = causal_convolution(rows.mixed, window, parameters.weight, parameters.bias)
        tokens = self._tokens(convolved, rows)
        output, state = applied(self.chunks(tokens, None), tokens.value, state, parameters.skip)
        memory.keep(alignment, window, state)
        return alignment.as_tokens(output)


def _parts_apart(rows: Tensor) -> Tensor:
    """Turns [length, 2 x batch, ...] into [2, length, batch, ...]."""
    return torch.unflatten(rows, 1, (2, -1)).transpose(0, 1)


def _parts_as_rows(values: Tensor) -> Tensor:
    """Turns [seq_local, batch, ...] into [seq_local / 2, 2 x batch, ...], rows of the first part before the second."""
    return torch.unflatten(values, 0, (2, -1)).transpose(0, 1).flatten(1, 2)
