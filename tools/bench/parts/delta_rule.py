"""Gated delta rule: lengths of chunks, and documents packed against padded: `python tools/bench/parts/delta_rule.py`.

Forward and backward on one CPU core in float32:

- "transformers": Qwen3-Next's chunked function, whose rows are single documents.
- "chunk n": the rule of this package, on the same rows.
- "chunk n, packed": the same tokens as documents of log-normal length, in rows without padding.
- "padded": the same documents with a row for each of eight, padded to the longest of them.

Seconds are those of all rows, so the last two compare what the same tokens cost. All contenders alternate in one run;
times are user + system seconds, the least of all rounds.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from pathlib import Path
from sys import path as import_path
from typing import Annotated, NamedTuple

import numpy as np
import torch
import typer
from torch import Tensor

if __name__ == "__main__":
    import_path.insert(0, str(Path(__file__).parents[3]))

from mtrain.core.layers.attention.delta_net import delta_rule
from mtrain.core.layers.attention.recurrent.chunks import Projected
from tools.bench.peers.padding import BATCH_SIZE

CHUNKS = (16, 32, 64, 128)


class Heads(NamedTuple):
    """Heads of a layer, in the ratios of Qwen3-Next."""

    keys: int
    values: int
    dim: int


def drawn(seq: int, rows: int, heads: Heads) -> Projected:
    """Draws the leaves of some rows, always the same."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    keys, values = (seq, rows, heads.keys, heads.dim), (seq, rows, heads.values)
    rates = -draw(*values).exp() / 4, draw(*values).sigmoid()
    return Projected._make(
        each.requires_grad_() for each in (draw(*keys), draw(*keys), draw(*values, heads.dim), *rates)
    )


def document_lengths(seq: int, rows: int) -> list[list[int]]:
    """Draws documents of log-normal length, of each row; the last one of a row ends with it."""
    rng = np.random.default_rng(0)
    found: list[list[int]] = []
    for _ in range(rows):
        lengths: list[int] = []
        while sum(lengths) < seq:
            lengths.append(min(max(8, int(rng.lognormal(5.0, 0.9))), seq - sum(lengths)))
        found.append(lengths)
    return found


def starts_of(lengths: list[list[int]]) -> Tensor:
    """Returns [rows, seq] the index at which each token's document starts."""
    rows = [np.repeat(np.cumsum([0, *row[:-1]]), row) for row in lengths]
    return torch.from_numpy(np.stack(rows))


def ours(tokens: Projected, chunk: int, starts: Tensor | None) -> Tensor:
    """Applies the rule of this package."""
    return delta_rule(tokens, starts, chunk)[0]


def theirs(tokens: Projected) -> Tensor:
    """Applies transformers' function."""
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

    query, key, value, log_decay, beta = (part.transpose(0, 1) for part in tokens)
    output: Tensor = torch_chunk_gated_delta_rule(query, key, value, log_decay, beta, use_qk_l2norm_in_kernel=True)[0]
    return output


def cpu_seconds(rule: Callable[[Projected], Tensor], batches: list[Projected]) -> float:
    """Returns the processor seconds of forward and backward of all batches."""
    start = time.process_time()
    for tokens in batches:
        torch.autograd.backward(rule(tokens).sum())
    return time.process_time() - start


def main(
    tokens: Annotated[int, typer.Option(help="of a row")] = 2048,
    rows: Annotated[int, typer.Option(help="of a microbatch")] = 2,
    key_heads: Annotated[int, typer.Option(help="of the layer; it has twice as many value heads")] = 4,
    dim: Annotated[int, typer.Option(help="of each head")] = 64,
    rounds: Annotated[int, typer.Option(help="of all contenders")] = 5,
) -> None:
    """Prints the table."""
    torch.set_num_threads(1)
    heads = Heads(key_heads, 2 * key_heads, dim)
    lengths = document_lengths(tokens, rows)
    starts, whole = starts_of(lengths), [drawn(tokens, rows, heads)]
    each = sorted(length for row in lengths for length in row)
    # neighbours by length together, which is kind to padding
    parts = [each[start : start + BATCH_SIZE] for start in range(0, len(each), BATCH_SIZE)]
    padded = [drawn(max(part), len(part), heads) for part in parts]
    contenders: dict[str, tuple[Callable[[Projected], Tensor], list[Projected]]] = {"transformers": (theirs, whole)}
    for chunk in CHUNKS:
        contenders[f"chunk {chunk}"] = functools.partial(ours, chunk=chunk, starts=None), whole
    for chunk in CHUNKS:
        contenders[f"chunk {chunk}, packed"] = functools.partial(ours, chunk=chunk, starts=starts), whole
    contenders["padded"] = functools.partial(ours, chunk=64, starts=None), padded
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, (rule, batches) in contenders.items():
            seconds[name].append(cpu_seconds(rule, batches))
    best = min(seconds["transformers"])
    typer.echo(f"{rows} rows of {tokens} tokens, {len(each)} documents, {heads}, float32, one core")
    typer.echo(f"{'':20}{'cpu-s':>8}{'ratio':>8}{'tokens a cpu-s':>16}")
    for name, found in seconds.items():
        typer.echo(f"{name:20}{min(found):8.3f}{min(found) / best:8.2f}{rows * tokens / min(found):16.0f}")


if __name__ == "__main__":
    typer.run(main)
