"""Output layer and cross entropy, whole, in chunks, of counted tokens: `python tools/bench/parts/output_layer.py`.

It runs forward and backward on one CPU core in float32, from hidden states to their gradient and the table's:

- "torch": logits by a matrix product, torch's own cross entropy.
- "whole": the same logits under this package's losses of a split vocabulary, as `loss.chunk_tokens=whole` has it.
- "chunks of n": logits of n tokens at a time, gradients formed in the forward pass.
- "counted": the tokens that are not masked, chosen before the output layer, in chunks of the last size.

All contenders alternate in one run. Times are user + system seconds, the least of all rounds; memory is the largest
allocation at one time, above what was there before.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from pathlib import Path
from sys import path as import_path
from typing import Annotated, NamedTuple

import torch
import torch.nn.functional as F
import typer
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

if __name__ == "__main__":
    import_path.insert(0, str(Path(__file__).parents[3]))

from mtrain.core.loss.vocab_parallel.chunks import Table, sum_over_chunks
from mtrain.core.loss.vocab_parallel.logits import VocabParallelLogits
from mtrain.core.step.loss import true_positions


class Sizes(NamedTuple):
    """Sizes of one microbatch."""

    tokens: int
    vocab: int
    hidden: int
    masked: float
    """Share of the tokens that no term counts."""


class Given(NamedTuple):
    """Tensors of a microbatch: leaves, labels and mask."""

    hidden: Tensor
    table: Tensor
    labels: Tensor
    """Labels, [1, tokens]."""
    counted: Tensor
    """Mask of the counted tokens, [1, tokens] bool."""


def drawn(sizes: Sizes) -> Given:
    """Draws a microbatch, always the same; the first tokens are masked, as a prompt is."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(sizes.tokens, sizes.hidden, generator=generator).requires_grad_()
    table = (0.05 * torch.randn(sizes.vocab, sizes.hidden, generator=generator)).requires_grad_()
    labels = torch.randint(sizes.vocab, (1, sizes.tokens), generator=generator)
    counted = torch.arange(sizes.tokens).unsqueeze(0) >= round(sizes.masked * sizes.tokens)
    return Given(hidden, table, labels, counted)


def plain(given: Given) -> Tensor:
    """Computes the loss with torch alone."""
    losses = F.cross_entropy(given.hidden @ given.table.t(), given.labels[0], reduction="none")
    return torch.where(given.counted[0], losses, 0.0).sum()


def whole(given: Given) -> Tensor:
    """Computes the loss from whole logits."""
    logits = VocabParallelLogits((given.hidden @ given.table.t()).unsqueeze(1), None, 0, len(given.table))
    return torch.where(given.counted, logits.cross_entropy(given.labels), 0.0).sum()


def in_chunks(given: Given, size: int, counted_only: bool) -> Tensor:
    """Computes the loss with `size` tokens at a time."""
    hidden, labels, counted = given.hidden, given.labels, given.counted
    if counted_only:
        index = true_positions(counted, int(counted.sum()))
        hidden, labels, counted = hidden.index_select(0, index), labels[:, index], counted[:, index]

    def loss_of_chunk(number: int, rows: slice, local: Tensor) -> Tensor:
        logits = VocabParallelLogits(local, None, 0, len(given.table))
        return torch.where(counted[:, rows], logits.cross_entropy(labels[:, rows]), 0.0).sum()

    return sum_over_chunks(Table(given.table), [hidden], loss_of_chunk, size, torch.tensor(1.0))


def cpu_seconds(loss: Callable[[Given], Tensor], given: Given) -> float:
    """Returns the processor seconds of forward and backward."""
    given.hidden.grad = given.table.grad = None
    start = time.process_time()
    loss(given).backward()  # type: ignore[no-untyped-call]
    return time.process_time() - start


def most_bytes(loss: Callable[[Given], Tensor], given: Given) -> int:
    """Returns the largest number of bytes allocated at one time in forward and backward."""
    given.hidden.grad = given.table.grad = None
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched:
        loss(given).backward()  # type: ignore[no-untyped-call]
    assert watched.profiler is not None
    results = watched.profiler.kineto_results
    assert results is not None
    held = largest = 0
    changes = [event for event in results.events() if event.name() == "[memory]"]
    for change in sorted(changes, key=lambda event: event.start_ns()):
        held += change.nbytes()
        largest = max(largest, held)
    return largest


def main(
    tokens: Annotated[int, typer.Option(help="of the microbatch")] = 2048,
    vocab: Annotated[int, typer.Option(help="words")] = 65_536,
    hidden: Annotated[int, typer.Option(help="width")] = 256,
    masked: Annotated[float, typer.Option(help="share of the tokens that no term counts")] = 0.77,
    rounds: Annotated[int, typer.Option(help="of all contenders")] = 5,
) -> None:
    """Prints the table."""
    torch.set_num_threads(1)
    given, sizes = drawn(Sizes(tokens, vocab, hidden, masked)), (128, 512, 1024)
    contenders: dict[str, Callable[[Given], Tensor]] = {"torch": plain, "whole": whole}
    contenders |= {f"chunks of {size}": functools.partial(in_chunks, size=size, counted_only=False) for size in sizes}
    contenders["counted"] = functools.partial(in_chunks, size=sizes[-1], counted_only=True)
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, loss in contenders.items():
            seconds[name].append(cpu_seconds(loss, given))
    best = min(seconds["whole"])
    typer.echo(f"{tokens} tokens, {vocab} words, width {hidden}, {masked:.0%} masked, float32, one core")
    typer.echo(f"{'':16}{'cpu-s':>8}{'ratio':>8}{'MB':>8}")
    for name, loss in contenders.items():
        least, megabytes = min(seconds[name]), most_bytes(loss, given) / 1e6
        typer.echo(f"{name:16}{least:8.2f}{least / best:8.2f}{megabytes:8.0f}")


if __name__ == "__main__":
    typer.run(main)
