"""The rules of delta nets and Mamba-2 and their convolution, one token of one head after the other, in float64."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from mtrain.core.layers.attention.recurrent.chunks import Projected

KEY_DIM, VALUE_DIM, KERNEL = 5, 3, 4
Documents = list[list[int]]
"""Lengths of the documents of each row."""


class Inputs(NamedTuple):
    query: Tensor
    key: Tensor
    value: Tensor
    log_decay: Tensor
    beta: Tensor
    state: Tensor

    @property
    def tokens(self) -> Projected:
        return Projected(self.query, self.key, self.value, self.log_decay, self.beta)


def inputs(seq: int, rows: int, key_heads: int, shared: int, seed: int = 0) -> Inputs:
    """Returns float64 inputs with decays from none to one that leaves nothing."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    heads = key_heads * shared
    return Inputs(
        query=draw(seq, rows, key_heads, KEY_DIM),
        key=draw(seq, rows, key_heads, KEY_DIM),
        value=draw(seq, rows, heads, VALUE_DIM),
        log_decay=-(draw(seq, rows, heads) * 2).exp(),
        beta=draw(seq, rows, heads).sigmoid(),
        state=draw(rows, heads, KEY_DIM, VALUE_DIM),
    )


def starts_of(documents: Documents) -> Tensor:
    """Returns [batch, seq] the index at which each token's document starts."""
    rows = []
    for lengths in documents:
        starts = torch.tensor([0, *lengths]).cumsum(0)[:-1]
        rows.append(starts.repeat_interleave(torch.tensor(lengths)))
    return torch.stack(rows).to(torch.int32)


def one_by_one(given: Inputs, starts: Tensor | None, corrects: bool = True) -> tuple[Tensor, Tensor]:
    """Applies the definition to one token of one head after the other: the delta rule, or without corrections that of
    Mamba-2."""
    seq, rows, heads = given.log_decay.shape
    shared = heads // given.key.shape[2]
    outputs = torch.zeros(seq, rows, heads, VALUE_DIM, dtype=torch.float64)
    states = torch.zeros_like(given.state)
    for row in range(rows):
        for head in range(heads):
            state = given.state[row, head]
            for t in range(seq):
                query, key = (part[t, row, head // shared] for part in (given.query, given.key))
                if corrects:
                    query, key = (part / torch.sqrt((part @ part) + 1e-6) for part in (query, key))
                    query = query / KEY_DIM**0.5
                if starts is not None and int(starts[row, t]) == t:
                    state = torch.zeros_like(state)
                state = state * torch.exp(given.log_decay[t, row, head])
                known = state.T @ key if corrects else 0
                state = state + torch.outer(key, given.beta[t, row, head] * (given.value[t, row, head] - known))
                outputs[t, row, head] = state.T @ query
            states[row, head] = state
    return outputs, states


def convolved(
    x: Tensor, weight: Tensor, state: Tensor, starts: Tensor | None, bias: Tensor | float = 0.0
) -> tuple[Tensor, Tensor]:
    """Applies the definition to one token after the other."""
    seq, rows, _ = x.shape
    outputs = []
    for t in range(seq):
        total = []
        for row in range(rows):
            start = -KERNEL if starts is None else int(starts[row, t])
            # states are the inputs at -(kernel - 1) to -1
            window = [
                (x[t - back, row] if t >= back else state[t - back, row]) * weight[:, KERNEL - 1 - back]
                for back in range(KERNEL)
                if t - back >= start
            ]
            total.append(torch.stack(window).sum(0))
        outputs.append(torch.stack(total))
    pre = torch.stack(outputs) + bias
    return pre / (1 + torch.exp(-pre)), torch.cat((state, x))[-(KERNEL - 1) :]
