"""A folder in Hugging Face's layout as the global tensors that a model consists of."""

from __future__ import annotations

import math
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from mtrain.base.errors import DataError
from mtrain.config.schema.model import ModelSection
from mtrain.hf.io.block_scaled import Weights, plain_weights
from mtrain.hf.io.folder import HfFolder
from mtrain.hf.io.matching import check_names
from mtrain.hf.schema.axes import Sizes
from mtrain.hf.schema.description import read_model
from mtrain.hf.schema.family import Family
from mtrain.hf.schema.files import CONFIG_NAME
from mtrain.hf.schema.table import Piece, Table, narrowed, read_box

EMBEDDINGS = "embedding.word_embeddings.weight"


class Source(NamedTuple):
    """An opened folder and what it means."""

    folder: HfFolder
    weights: Weights
    """The folder's, as plain numbers."""
    family: Family
    model: ModelSection
    table: Table

    @property
    def dtype(self) -> torch.dtype:
        """Of the embeddings, as config.json tells it."""
        piece = next(piece for piece in self.table.pieces if piece.key == EMBEDDINGS)
        return self.weights.facts(piece.tensors[0].name)[0]


def open_source(path: Path) -> Source:
    """Opens and checks a folder completely; no tensor is read.

    Raises:
        DataError: The family is unknown, or the folder does not hold exactly the tensors of its model.
    """
    folder = HfFolder(path)
    weights = plain_weights(folder)
    family, model = read_model(path, folder.config, weights.names())
    if model.num_layers > len(weights.names()):  # the table of a mistyped number would fill the memory
        raise DataError(
            f"{path} does not fit its {CONFIG_NAME}, which says {model.num_layers} layers: it holds only "
            f"{len(weights.names())} tensors"
        )
    table = family.table(model)
    check_names(path, weights, table, family.dropped)
    return Source(folder, weights, family, model, table)


class GlobalTensorInfo(NamedTuple):
    """What is known of a global tensor without reading it."""

    dtype: torch.dtype
    shape: Sizes


class FolderTensors:
    """Boxes of global tensors, made from views of the mapped files; nothing is kept but one reordered tensor."""

    def __init__(self, source: Source) -> None:
        """Args:
        source: The folder.
        """
        self.folder = source.folder.path
        self.others: set[str] = set()
        """Of a folder everything is a tensor."""
        self._weights = source.weights
        self._pieces: dict[str, list[Piece]] = {}
        dtypes: dict[str, torch.dtype] = {}
        for tensor, piece in source.table.tensors():
            held = source.weights.facts(tensor.name)[0]
            dtypes[piece.key] = torch.promote_types(dtypes.get(piece.key, held), held)
        for piece in source.table.pieces:
            self._pieces.setdefault(piece.key, []).append(piece)
        self.tensors = {key: GlobalTensorInfo(dtypes[key], shape) for key, shape in source.table.shapes.items()}
        """Key -> facts; where tensors of several dtypes are one, the dtype that holds all their numbers."""
        self._reordered: tuple[Piece, Tensor] | None = None

    def read(self, key: str, offsets: Sizes, sizes: Sizes) -> Tensor:
        """One box of a global tensor, of shape `sizes`; not to be written to.

        A tensor whose numbers lie in another order on disk is put in order as a whole and kept until another one is
        asked for, so boxes are best asked for in the order of their places.

        Raises:
            DataError: The table does not cover the box.
        """
        result: Tensor | None = None
        num_elements = 0
        for piece in self._pieces[key]:
            begin = tuple(max(one, other) for one, other in zip(offsets, piece.offsets))
            end = [min(a + m, b + n) for a, m, b, n in zip(offsets, sizes, piece.offsets, piece.sizes)]
            extent = tuple(last - first for first, last in zip(begin, end))
            if any(size <= 0 for size in extent):
                continue
            found = self._of_piece(piece, begin, extent).to(self.tensors[key].dtype)
            if extent == sizes:
                return found
            if result is None:
                result = found.new_empty(sizes)
            narrowed(result, [first - offset for first, offset in zip(begin, offsets)], extent).copy_(found)
            num_elements += found.numel()
        if result is None or num_elements != math.prod(sizes):
            raise DataError(f"{self.folder}: parts of {key} are missing")
        return result

    def _of_piece(self, piece: Piece, offsets: Sizes, sizes: Sizes) -> Tensor:
        if not any(tensor.arrangement.is_reordered for tensor in piece.tensors):
            return read_box(piece, offsets, sizes, self._weights.tensor)
        if self._reordered is None or self._reordered[0] is not piece:
            self._reordered = None  # two at once would be too many
            self._reordered = piece, read_box(piece, piece.offsets, piece.sizes, self._weights.tensor)
        return narrowed(self._reordered[1], [a - b for a, b in zip(offsets, piece.offsets)], sizes)
