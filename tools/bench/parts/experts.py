"""Experts one after the other against one grouped product: `python tools/bench/parts/experts.py`.

Each contender runs the feed-forward networks of a rank's experts, forward and backward, on the same tokens: two
products with SwiGLU between them. Tokens spread over the experts as a random router would spread them; some experts can
go without. What brings tokens to their experts and back is measured apart, and both with a capacity of 1.25 as well,
where every expert has as many rows as it may take. Rounds of all alternate in one process; a row shows the median time
of each over rounds, and the median over rounds of the ratio within a round.
"""

from __future__ import annotations

import math
import statistics
import time
from functools import partial
from pathlib import Path
from sys import path as import_path
from typing import Annotated, NamedTuple

import torch
import typer
from megatron.core.transformer.moe.moe_utils import unpermute
from torch import Tensor
from torch.nn import functional

if __name__ == "__main__":
    import_path.insert(0, str(Path(__file__).parents[3]))

from mtrain.core.layers.moe.grouped_gemm import Product, grouped, has_grouped, sequential
from mtrain.core.layers.moe.layer import by_expert


class Size(NamedTuple):
    """Work of a rank in one layer."""

    experts: int
    hidden: int
    ffn: int
    tokens: int
    """Tokens of all experts together, as many times as they are chosen."""


class Times(NamedTuple):
    """Times of one forward and backward pass, medians over rounds."""

    sequential_ms: float
    grouped_ms: float
    ratio: float
    """Ratio grouped / sequential within a round."""
    grouped_to_capacity_ms: float
    sorting_ms: float
    sorting_to_capacity_ms: float


SIZES = [
    Size(8, 256, 128, 2048),
    Size(32, 256, 128, 2048),
    Size(128, 256, 128, 2048),
    Size(8, 1024, 1024, 1024),
    Size(64, 1024, 256, 1024),
]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Inputs(NamedTuple):
    """Inputs of the networks."""

    tokens: Tensor
    fc1: Tensor
    fc2: Tensor
    counts: Tensor


def inputs(size: Size, dtype: torch.dtype, device: torch.device) -> Inputs:
    """Draws tokens and weights, with gradients, and counts as a random router would give them."""
    generator = torch.Generator().manual_seed(0)
    counts = torch.randint(size.experts, (size.tokens,), generator=generator).bincount(minlength=size.experts)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype).requires_grad_()

    return Inputs(
        tokens=drawn(size.tokens, size.hidden),
        fc1=drawn(size.experts, 2 * size.ffn, size.hidden),
        fc2=drawn(size.experts, size.hidden, size.ffn),
        counts=counts,
    )


def run(given: Inputs, product: Product) -> None:
    """Runs forward and backward."""
    gate, up = product(given.tokens, given.fc1, given.counts).chunk(2, dim=-1)
    output = product(functional.silu(gate) * up, given.fc2, given.counts)
    torch.autograd.grad(output, given[:3], torch.ones_like(output))


def sort(tokens: Tensor, scores: Tensor, top_k: int, capacity: int | None) -> None:
    """Brings tokens [n, hidden] to the best experts by scores [n, experts] and adds them up again, forward and
    backward."""
    chosen = torch.zeros_like(scores, dtype=torch.bool).scatter(1, scores.topk(top_k, dim=1).indices, True)
    if capacity is not None:
        chosen &= chosen.cumsum(0) <= capacity
    rows, weights, token_of_row = by_expert(tokens, chosen, scores, top_k, capacity)
    output = unpermute(rows * weights.unsqueeze(1).to(rows.dtype), token_of_row, tokens.shape)
    torch.autograd.grad(output, [tokens, scores], torch.ones_like(output))


def measure(size: Size, dtype: torch.dtype, device: torch.device, rounds: int, top_k: int = 2) -> Times:
    """Measures rounds of all contenders in turn."""
    given, capacity = inputs(size, dtype, device), math.ceil(1.25 * size.tokens / size.experts)
    padded = inputs(size._replace(tokens=size.experts * capacity), dtype, device)
    padded = padded._replace(counts=torch.full_like(padded.counts, capacity))
    tokens = given.tokens[: size.tokens // top_k].detach().requires_grad_()
    scores = torch.rand(len(tokens), size.experts, device=device, requires_grad=True)
    calls = [partial(run, given, sequential), partial(run, given, grouped), partial(run, padded, grouped)]
    calls += [partial(sort, tokens, scores, top_k, room) for room in (None, capacity)]
    # the first round warms up
    times = list(zip(*[[_milliseconds(call, device) for call in calls] for _ in range(rounds + 1)][1:], strict=True))
    one, two, *others = map(statistics.median, times)
    return Times(one, two, statistics.median(b / a for a, b in zip(times[0], times[1], strict=True)), *others)


def _milliseconds(call: partial[None], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - start)


def main(
    rounds: Annotated[int, typer.Option(help="rounds of both contenders")] = 20,
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cuda" if torch.cuda.is_available() else "cpu",
) -> None:
    """Prints a table of times and ratios."""
    print(f"torch {torch.__version__}, {device}, {torch.get_num_threads()} threads")
    print("| | experts | hidden | ffn | tokens | one by one ms | grouped ms | ratio | capacity | sorting | capacity |")
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    for name, dtype in DTYPES.items():
        if not has_grouped(torch.device(device).type, dtype):
            print(f"no grouped product in {name} on {device}")
            continue
        for size in SIZES:
            times = measure(size, dtype, torch.device(device), rounds)
            cells = [name, *size, *(f"{each:.2f}" for each in times)]
            print("| " + " | ".join(map(str, cells)) + " |", flush=True)


if __name__ == "__main__":
    typer.run(main)
