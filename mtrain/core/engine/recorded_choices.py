"""Records the discrete choices of layers in forward passes, for later replay (`Microbatch.choices`)."""

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
"""Called with (table, number of the pass, first position, choice); writes the choice of a pass, [positions, rows, k]
int32, which begins at the first position of the rows read in the pass, into the table, [samples, tokens, k]."""
_MODULES = {ROUTED_EXPERTS: Router}
"""Classes of the modules that make a choice, by its name; they have `layer_number` and `record`."""


class RecordedChoices:
    """Choices of this rank's layers, their own or replayed ones, in the passes inside `recording`."""

    def __init__(self, model: RankModel, name: str) -> None:
        """Prepares to record the choices called `name`.

        Raises:
            ConfigError: The model does not make this choice, or drops tokens.
        """
        self._model, self._groups = model.config.model, model.groups
        self._shape = replayable(self._model, f"{name} are asked for")
        # MTP depths are not in the decoder
        every = [module for chunk in model.chunks for module in unwrap(chunk).decoder.modules()]
        modules = [module for module in every if isinstance(module, _MODULES[name])]
        # layer_number counts from 1 over all stages
        self._modules = {module.layer_number - 1: module for module in modules if module.layer_number is not None}
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
        nothing was written.

        One all-reduce over the world for each layer that chooses, since a table of all layers would take too much
        device memory.

        Args:
            num_tokens: Length of the longest sample.
            num_rows: Number of rows read in each pass.
            write: Writes the choice of one pass of one layer.
        """
        k = self._shape[1]
        whole = torch.from_numpy(open_choice(num_tokens, self._shape)).repeat(num_samples, 1, 1, 1)
        for layer in choosing_layers(self._model).nonzero()[0].tolist():
            table = torch.zeros(num_samples, num_tokens, k, dtype=torch.int32, device=self._groups.device)
            for number, experts in enumerate(self._reported(layer)):
                rows = experts.view(-1, num_rows, k)
                first = self._groups.tp_rank * len(rows) if self._groups.layout.sp else 0
                write(table, number, first, (rows + 1).to(table.dtype))
            dist.all_reduce(table)
            whole[:, :, layer] = (table - 1).cpu()
        return whole

    def _reported(self, layer: int) -> list[Tensor]:
        # without sequence parallelism all tensor-parallel ranks choose for the same tokens
        is_first = self._groups.tp_rank == 0 or self._groups.layout.sp
        return self._passes.get(layer, []) if is_first else []
