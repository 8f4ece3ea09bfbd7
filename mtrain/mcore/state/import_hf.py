"""Starts from a Hugging Face folder: each rank maps the files and copies its own shards."""

from __future__ import annotations

from pathlib import Path

from mtrain.hf.io.source import FolderTensors, source_for
from mtrain.mcore.distributed.init import on_all_ranks
from mtrain.mcore.engine.rank_model import RankModel
from mtrain.mcore.model.build import unwrap
from mtrain.mcore.model.sharded_parameters import base_parameters
from mtrain.mcore.state.load import filler_of, read_weights

_DEPTHS = "mtp."
"""Beginning of the keys of multi-token prediction."""


def load_hf_weights(folder: Path, model: RankModel) -> None:
    """Starts from the weights of a folder, under any layout. Collective over the world; no tensor is sent.

    A rank reads views of the mapped files and its own shards; of a tensor that is stored in another order, or in FP8
    with scales, it reads the whole, one at a time.

    Args:
        folder: Folder with config.json and safetensors.
        model: Model to fill; the main weights of its optimizer follow.

    Raises:
        DataError: The folder is damaged or holds another model. On all ranks.
    """
    chunks, optimizer, groups, config = model.chunks, model.optimizer, model.groups, model.config
    optimizer.gather_parameters()  # a gather under way would overwrite what is loaded
    # every rank opens the folder itself: what is mapped in one process cannot be given to another
    saved = on_all_ranks(lambda: FolderTensors(source_for(folder, config.model)))

    def may_be_left(key: str) -> bool:
        # a run without depths may start from a model that has them
        return config.model.mtp_depths == 0 and key.startswith(_DEPTHS)

    places = base_parameters([unwrap(chunk) for chunk in chunks], groups)
    # global names are the keys here: the source converts names and axes as it reads
    read_weights(saved, places, config.model, lambda key: key, may_be_left, filler_of(optimizer))
