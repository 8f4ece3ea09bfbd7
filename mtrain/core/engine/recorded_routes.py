"""The experts that tokens were sent to in forward passes, for their replay (`Datum.routed_experts`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from mtrain.core.batch.routes import replaying, unknown_routes
from mtrain.core.engine.rank_model import RankModel
from mtrain.core.layers.build import unwrap
from mtrain.core.layers.moe.router import Router

Write = Callable[[Tensor, int, int, Tensor], None]
"""(table, number of the pass, first position, experts [positions, rows, top_k] int32) -> None: writes the experts of a
pass, whose positions begin at the first one of the rows that the pass read, into the table [samples, tokens, top_k]."""


class RecordedRoutes:
    """What the routers of this rank choose, or take, in the passes inside `recording`."""

    def __init__(self, model: RankModel) -> None:
        """
        Args:
            model: Model of this rank.

        Raises:
            ConfigError: The model has no experts, or drops tokens.
        """
        self._model, self._groups = model.config.model, model.groups
        self._section = replaying(self._model, "routed_experts are asked for")
        # depths of multi-token prediction are not in the decoder
        found = [
            module for chunk in model.chunks for module in unwrap(chunk).decoder.modules() if isinstance(module, Router)
        ]
        # numbered from 1 over all stages
        self._routers = {each.layer_number - 1: each for each in found if each.layer_number is not None}
        self._passes: dict[int, list[Tensor]] = {}

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Records the forward passes inside the block."""
        self._passes = {layer: [] for layer in self._routers}
        for layer, router in self._routers.items():
            router.record = self._passes[layer]
        try:
            yield
        finally:
            for router in self._routers.values():
                router.record = None

    def gathered(self, num_samples: int, num_tokens: int, num_rows: int, write: Write) -> Tensor:
        """Returns the experts of all layers and ranks, [num_samples, num_tokens, layers, top_k] int32 on the CPU; -1 in
        dense layers and where nothing was written.

        One all-reduce over the world for each layer with experts, of a table that has the numbers of this rank and 0
        elsewhere: a table of all layers would take as much memory as all of them.

        Args:
            num_samples: Samples of the table.
            num_tokens: Tokens of a sample in the table.
            num_rows: Rows of a pass.
            write: Function that writes one pass of one layer.
        """
        whole = torch.from_numpy(unknown_routes(num_tokens, self._model)).repeat(num_samples, 1, 1, 1)
        for layer in filter(self._model.has_experts, range(self._model.num_layers)):
            table = torch.zeros(
                num_samples, num_tokens, self._section.top_k, dtype=torch.int32, device=self._groups.device
            )
            for number, places in enumerate(self._reported(layer)):
                rows = places.view(-1, num_rows, self._section.top_k)
                first = self._groups.tp_rank * len(rows) if self._groups.layout.sp else 0
                write(table, number, first, (rows + 1).to(table.dtype))
            dist.all_reduce(table)
            whole[:, :, layer] = (table - 1).cpu()
        return whole

    def _reported(self, layer: int) -> list[Tensor]:
        # without sequence parallelism all ranks of TP route the same tokens
        is_first = self._groups.tp_rank == 0 or self._groups.layout.sp
        return self._passes.get(layer, []) if is_first else []
