"""Starts from an adapter of PEFT: each rank maps the file and copies its own shards."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from mtrain.config import Config
from mtrain.config.schema.adapter import AdapterSection
from mtrain.hf.io.peft import PeftFolder
from mtrain.hf.schema.exportable import family_of_run
from mtrain.mcore.distributed.init import on_all_ranks
from mtrain.mcore.engine.rank_model import RankModel
from mtrain.mcore.model.adapters.adapter import is_adapter_key
from mtrain.mcore.model.build import unwrap
from mtrain.mcore.model.init_weights import sharded_tensors
from mtrain.mcore.model.layer_spec import global_name
from mtrain.mcore.state.load import filler_of
from mtrain.plan import adapters as plan


@torch.no_grad()
def load_peft_adapter(folder: Path, model: RankModel) -> None:
    """Copies the values of a folder into the adapters, under any layout. Collective over the world.

    Args:
        folder: Folder with adapter_config.json and adapter_model.safetensors.
        model: Model with the adapters; the main weights of its optimizer follow.

    Raises:
        DataError: The folder is damaged or holds another adapter. On all ranks.
    """
    chunks, optimizer, groups, config = model.chunks, model.optimizer, model.groups, model.config
    optimizer.gather_parameters()  # a gather under way would overwrite what is loaded
    adapter = config.adapter
    assert adapter is not None, "called for runs with adapters"
    saved = on_all_ranks(lambda: _opened(folder, config, adapter))
    weights: dict[Tensor, Tensor] = {}

    def in_float32(parameter: Tensor) -> Tensor | None:
        if not parameter.requires_grad:
            return None
        # values go to the main weights unrounded
        return weights.setdefault(parameter, torch.zeros_like(parameter, dtype=torch.float32, requires_grad=False))

    for chunk in chunks:
        for part in sharded_tensors(unwrap(chunk), groups, in_float32):
            if is_adapter_key(part.key) or part.key in plan.learned_whole(config.model):
                axes = part.prepend_axis_num
                whole = saved.tensor(global_name(part.key, tuple(part.global_offset[:axes])))
                # a table has more rows here, which are padding and stay 0
                own = part.data[: max(0, len(whole) - part.global_offset[axes])]
                region = [slice(start, start + size) for start, size in zip(part.global_offset[axes:], own.shape)]
                own.copy_(whole[tuple(region)])
    fill = filler_of(optimizer)
    for parameter, values in weights.items():
        fill(parameter, values)


def _opened(folder: Path, config: Config, adapter: AdapterSection) -> PeftFolder:
    return PeftFolder(folder, family_of_run(config), config.model, adapter)
