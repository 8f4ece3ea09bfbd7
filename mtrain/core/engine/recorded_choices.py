"""The discrete choices that layers make in forward passes, for their replay (`Microbatch.choices`)."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from mtrain.config.extras import ROUTED_EXPERTS
from mtrain.core.batch.choices import choosing_layers, open_choice, replayable
from mtrain.core.engine.rank_model import RankModel
from mtrain.core.layers.build import unwrap
from mtrain.core.layers.moe.router import Router

Write = Callable[[Tensor, int, int, Tensor], None]
"""(table, number of the pass, first position, choice [positions, rows, k] int32) -> None: writes the choice of a pass,
whose positions begin at the first one of the rows that the pass read, into the table [samples, tokens, k]."""
_MODULES = {ROUTED_EXPERTS: Router}
"""Modules that make a choice, by its name; they have `layer_number` and `record`."""


class RecordedChoices:
    """What the layers of this rank choose, or take, in the passes inside `recording`."""

    def __init__(self, model: RankModel, name: str) -> None:
        """
        Raises:
            ConfigError: The model does not make this choice, or drops tokens.
        """
        self._model, self._groups = model.config.model, model.groups
        self._shape = replayable(self._model, f"{name} are asked for")
        # depths of multi-token prediction are not in the decoder
        every = [module for chunk in model.chunks for module in unwrap(chunk).decoder.modules()]
        found = [module for module in every if isinstance(module, _MODULES[name])]
        # numbered from 1 over all stages
        self._modules = {module.layer_number - 1: module for module in found if module.layer_number is not None}
        self._passes: dict[int, list[Tensor]] = {}

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Records the forward passes inside the block."""
        self._passes = {layer: [] for layer in self._modules}
        for layer, module in self._modules.items():
            module.record = self._passes[layer]
        try:
            yield
        finally:
            for module in self._modules.values():
                module.record = None

    def gathered(self, num_samples: int, num_tokens: int, num_rows: int, write: Write) -> Tensor:
        """Returns the choices of all layers and ranks, [num_samples, num_tokens, layers, k] int32 on the CPU; -1 where
        nothing was written. A pass has read `num_rows` rows, and `write` writes one pass of one layer.

        One all-reduce over the world for each layer that chooses: a table of all layers would take as much memory as
        they.
        """
        k = self._shape[1]
        whole = torch.from_numpy(open_choice(num_tokens, self._shape)).repeat(num_samples, 1, 1, 1)
        for layer in choosing_layers(self._model).nonzero()[0].tolist():
            table = torch.zeros(num_samples, num_tokens, k, dtype=torch.int32, device=self._groups.device)
            for number, places in enumerate(self._reported(layer)):
                rows = places.view(-1, num_rows, k)
                first = self._groups.tp_rank * len(rows) if self._groups.layout.sp else 0
                write(table, number, first, (rows + 1).to(table.dtype))
            dist.all_reduce(table)
            whole[:, :, layer] = (table - 1).cpu()
        return whole

    def _reported(self, layer: int) -> list[Tensor]:
        # without sequence parallelism all ranks of TP choose for the same tokens
        is_first = self._groups.tp_rank == 0 or self._groups.layout.sp
        return self._passes.get(layer, []) if is_first else []
