"""What ranks do in the tests of compiled layers."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import fx

from mtrain.config import Config
from mtrain.core import kernels
from mtrain.core.engine.generation import PassTokens, cached_model
from mtrain.core.engine.rank_model import build_model
from mtrain.core.ranks.groups import Groups
from tests.parity.ranks import Outcome, Run, train


class Compiled(NamedTuple):
    """A run whose layers are compiled."""

    outcome: Outcome
    num_graphs: int
    """Number of graphs compiled on this rank."""
    printed: str


def train_each(groups: Groups, runs: Sequence[Run], backend: str, refused_after: int | None = None) -> list[Compiled]:
    """Trains each run of one layout, compiled anew.

    Args:
        groups: The process groups.
        runs: Runs to train.
        backend: Name of a torch.compile backend; "eager" captures graphs and runs them as they are.
        refused_after: Number of graphs after which the backend fails for all others; None: never.
    """
    from torch._dynamo.backends.registry import lookup_backend

    build = lookup_backend(backend)
    found = []
    for run in runs:
        torch._dynamo.reset()
        graphs = 0

        def counted(graph: fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
            nonlocal graphs
            if refused_after is not None and graphs >= refused_after:
                raise NotImplementedError("no such operation\nand what a traceback says")
            graphs += 1
            return build(graph, inputs)

        kernels.BACKEND = counted
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            outcome = train(groups, *run)
        found.append(Compiled(outcome, graphs - 1, printed.getvalue()))  # the first one tries the compiler
    return found


def names(groups: Groups, config: Config) -> list[list[str]]:
    """Returns the names of all parameters and checkpoint tensors, first as written, then compiled."""
    kernels.BACKEND = "eager"
    found = []
    for choice in ("none", "layers"):
        train_section = config.train.model_copy(update={"compile": choice})
        (chunk,) = build_model(config.model_copy(update={"train": train_section}), groups).chunks
        inner: Any = chunk.module
        keys = [shard.key for shard in inner.sharded_state_dict().values() if hasattr(shard, "key")]
        found.append([*(name for name, _ in chunk.named_parameters()), *keys])
    return found


def trained_without_a_compiler(groups: Groups, run: Run, caches: Path) -> Compiled:
    """Trains with torch's own backend on a machine without a C++ compiler."""
    os.environ |= {"PATH": str(caches), "TORCHINDUCTOR_CACHE_DIR": str(caches)}
    os.environ.pop("CXX", None)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        outcome = train(groups, *run)
    return Compiled(outcome, 0, printed.getvalue())


def graphs_of_generation(groups: Groups, config: Config) -> int:
    """Returns the number of graphs compiled while reading a prompt whose length is not that of a row."""
    graphs = 0

    def counted(graph: fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        nonlocal graphs
        graphs += 1
        return graph

    kernels.BACKEND = counted
    chunks = build_model(config, groups).chunks
    graphs = 0
    with cached_model(config, groups, chunks, num_sequences=1, length=8) as model:
        model.next_logits([PassTokens(0, 0, [1, 2, 3])], of_prompts=True)
    return graphs
