"""Reads a Hugging Face folder as the global tensors of a model."""

import re
from collections.abc import Callable, Collection
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from mtrain.arch.parameters import PADDED_TABLES
from mtrain.base.errors import DataError
from mtrain.base.spelling import counted
from mtrain.base.tensor_slice import Sizes, TensorSlice
from mtrain.config.schema.model import ModelSection
from mtrain.hf.io.block_scaled import PLAIN_NUMBERS, Weights, plain_weights
from mtrain.hf.io.folder import HfFolder
from mtrain.hf.io.safetensors import same_bits, shown_names
from mtrain.hf.schema.description import disagreements, read_model, with_tokens
from mtrain.hf.schema.family import Family
from mtrain.hf.schema.files import CONFIG_NAME
from mtrain.hf.schema.table import FilledSlice, Table, read_slice
from mtrain.hf.tokenizer.tokenizer import added_by, load_tokenizer

EMBEDDINGS, _OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"
_ROWS_AT_ONCE = 4096
_FAULTS_SHOWN = 8


class AddedRows(NamedTuple):
    """Rows of a vocabulary table for the tokens that a run adds, each initialized to the mean of the rows before them.

    transformers' `resize_token_embeddings` adds noise to this mean (1e-9 of the rows' covariance). Without noise, equal
    runs start with equal bits. Every rank computes the mean from the whole table on disk.
    """

    first: int
    end: int
    """Row after the last added one; later rows, which no token uses, come from disk again."""
    num_rows: int

    def are_in(self, region: TensorSlice) -> bool:
        """Returns whether a slice of a table contains an added row."""
        return region.offset[0] < self.end and region.offset[0] + region.shape[0] > self.first

    def filled(self, region: TensorSlice, mean: Tensor, read: Callable[[TensorSlice], Tensor]) -> Tensor:
        """Builds a slice of a table from `mean`, the [hidden] row of every added token, and rows from `read`."""
        start, columns = region.offset[0], slice(region.offset[1], region.offset[1] + region.shape[1])
        result = mean[columns].expand(region.shape).clone()
        for low, high in ((start, self.first), (max(start, self.end), start + region.shape[0])):
            if low < high:
                rows = TensorSlice((low, region.offset[1]), (high - low, region.shape[1]))
                rows.within(region).of(result).copy_(read(rows))
        return result


def _mean_row(num_rows: int, width: int, read: Callable[[TensorSlice], Tensor]) -> Tensor:
    """Computes the mean [hidden] of a table's first rows in float64, rounded to the table's dtype.

    numpy adds rows one by one, whatever the number of threads, so every layout gets the same bits.
    """
    total = np.zeros(width)
    for start in range(0, num_rows, _ROWS_AT_ONCE):
        rows = read(TensorSlice((start, 0), (min(_ROWS_AT_ONCE, num_rows - start), width)))
        dtype = rows.dtype
        total += rows.double().numpy().sum(axis=0)
    return torch.from_numpy(total / num_rows).to(dtype)


class HfSource(NamedTuple):
    """An opened folder, with its family, model and table of tensors."""

    folder: HfFolder
    weights: Weights
    family: Family
    model: ModelSection
    table: Table
    added: AddedRows | None = None

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the embeddings."""
        filled = next(item for item in self.table.slices if item.key == EMBEDDINGS)
        return self.weights.facts(filled.tensors[0].name)[0]


def open_source(path: Path, needs_output: bool = True, depths: int = 0, with_vision: bool = False) -> HfSource:
    """Opens a folder and checks all of it; reads no tensor.

    Args:
        path: Folder with config.json and safetensors.
        needs_output: Whether an untied output layer must exist; base models are saved without one.
        depths: Requested MTP depths, which some families read only on request.
        with_vision: Whether the vision tower belongs to the model.
    """
    folder = HfFolder(path)
    weights = plain_weights(folder)
    family, model = read_model(path, folder.config, weights.names(), depths, with_vision)
    family = family.as_stored(weights.names())
    if (family.carried or with_vision) and weights is not folder:
        raise DataError(
            f"{path} is a quantised {family.model_type} model, but models with images are supported only with plain "
            "weights; use it in bfloat16"
        )
    if model.num_layers > len(weights.names()):  # a table for a mistyped number would fill the memory
        raise DataError(
            f"{path} does not fit its {CONFIG_NAME}: {counted(model.num_layers, 'layer')} need more than its "
            f"{counted(len(weights.names()), 'tensor')}; download it again"
        )
    # config.json alone determines which tensors must exist
    table = family.table(model, {name: weights.facts(name)[1] for name in weights.names()})
    output = {tensor.name for tensor, filled in table.tensors() if filled.key == _OUTPUT}
    if not needs_output and not output & weights.names():
        table = table.without(_OUTPUT)
    check_names(path, weights, table, (*family.dropped, *family.carried))
    return HfSource(folder, weights, family, model, table)


def check_names(path: Path, weights: Weights, table: Table, may_be_left: Collection[str]) -> None:
    """Compares the tensors of a folder with a table; names that match `may_be_left` may stay unread."""
    shapes = {tensor.name: tensor.shape for tensor, _ in table.tensors()}
    names = weights.names()
    # only copies that exist, since some folders have a tied tensor twice and others once
    copies = {name: original for name, original in table.copies.items() if name in names}
    missing = sorted(shapes.keys() - names)
    extra = sorted(names - shapes.keys() - copies.keys())
    unexpected = [name for name in extra if not any(re.fullmatch(pattern, name) for pattern in may_be_left)]
    # all faults in one message, because a wrong config.json gives many tensors another shape
    faults = [f"lacks {shown_names(missing)}"] if missing else []
    faults += [f"has unexpected {shown_names(unexpected)}"] if unexpected else []
    faults += [
        f"{name} has shape {list(shape)} instead of {list(shapes[name])}"
        for name in sorted(shapes.keys() & names)
        if (shape := weights.facts(name)[1]) != shapes[name]
    ][:_FAULTS_SHOWN]
    faults += [
        f"{name} is {dtype}, but weights have to be plain floating-point numbers"
        for name in sorted(shapes.keys() & names)
        if (dtype := weights.facts(name)[0]) not in PLAIN_NUMBERS
    ][:_FAULTS_SHOWN]
    faults += [
        f"{name} differs from {original}, but must be a copy of it"
        for name, original in copies.items()
        # equal in bits, because training continues from only one of the two, and an export writes only one
        if original in names and not same_bits(weights.tensor(name), weights.tensor(original))
    ]
    if faults:
        raise DataError(f"{path} does not fit its {CONFIG_NAME}: {'; '.join(faults)}")


def source_for(path: Path, model: ModelSection) -> HfSource:
    """Opens the folder that a run starts from, and compares it with the run's model; reads no tensor."""
    # a head replaces the output layer
    source = open_source(path, not model.output.is_new, model.mtp_depths, model.vision is not None)
    # compares descriptions, because shapes do not reveal another rope base or norm epsilon
    added = added_by(model)
    described = with_tokens(source.model, path, added)
    if differing := disagreements(described, model):
        shown = "; ".join(f"model.{name}={mine}, but {theirs} there" for name, theirs, mine in differing)
        raise DataError(f"{path} has another model ({shown}); name another model.hf")
    if not any(added):
        return source
    first = load_tokenizer(path).vocab_size
    # a tokenizer may have tokens without a row
    span = min(first, source.model.vocab_size), first + len(added.plain) + len(added.special)
    return source._replace(added=AddedRows(*span, described.vocab_size))


class GlobalTensorInfo(NamedTuple):
    """Dtype and shape of a global tensor, known without reading it."""

    dtype: torch.dtype
    shape: Sizes


class FolderTensors:
    """Slices of global tensors, from views of mapped files; caches one reordered tensor."""

    def __init__(self, source: HfSource) -> None:
        self.folder = source.folder.path
        self.non_tensors: set[str] = set()
        """Entries that are not tensors; always empty."""
        self._weights = source.weights
        self._slices: dict[str, list[FilledSlice]] = {}
        dtypes: dict[str, torch.dtype] = {}
        for tensor, filled in source.table.tensors():
            dtype = source.weights.facts(tensor.name)[0]
            # a fused tensor has one dtype, even if its parts have several; promotion loses no number
            dtypes[filled.key] = torch.promote_types(dtypes.get(filled.key, dtype), dtype)
        for filled in source.table.slices:
            self._slices.setdefault(filled.key, []).append(filled)
        self.tensors = {key: GlobalTensorInfo(dtypes[key], shape) for key, shape in source.table.shapes.items()}
        """Key -> dtype and shape; a tensor from several dtypes gets one that represents all of its numbers."""
        self._reordered: tuple[FilledSlice, Tensor] | None = None
        self._added, self._means = source.added, dict[str, Tensor]()
        if self._added is not None:
            for key in {*PADDED_TABLES} & self.tensors.keys():
                facts = self.tensors[key]
                self.tensors[key] = facts._replace(shape=(self._added.num_rows, *facts.shape[1:]))

    def read(self, key: str, region: TensorSlice) -> Tensor:
        """Reads a region of a global tensor; do not write to the result.

        A tensor that has another order on disk is reordered whole, and cached until the next one, so read regions in
        the order of their positions.
        """
        if self._added is not None and key in PADDED_TABLES and self._added.are_in(region):
            return self._added.filled(region, self._mean(key), lambda rows: self._read(key, rows))
        return self._read(key, region)

    def _mean(self, key: str) -> Tensor:
        """Computes, once per rank, the mean of a table's rows before the added ones."""
        assert self._added is not None, "called only if rows are added"
        if key not in self._means:
            width = self.tensors[key].shape[1]
            self._means[key] = _mean_row(self._added.first, width, lambda rows: self._read(key, rows))
        return self._means[key]

    def _read(self, key: str, region: TensorSlice) -> Tensor:
        result: Tensor | None = None
        num_elements = 0
        # a rank reads only the tensors on disk that overlap its shard
        for filled in self._slices[key]:
            shared = region.intersect(filled.at)
            if shared is None:
                continue
            values = self._read_from(filled, shared).to(self.tensors[key].dtype)
            if shared == region:
                return values
            if result is None:
                # only a region that spans several tensors on disk needs memory
                result = values.new_empty(region.shape)
            shared.within(region).of(result).copy_(values)
            num_elements += values.numel()
        # slices of a table never overlap, so the count alone reveals a gap
        if result is None or num_elements != region.num_elements:
            raise DataError(f"{self.folder}: parts of {key} are missing")
        return result

    def expect(self, key: str, region: TensorSlice) -> None:
        """Asks the system to read ahead the whole tensors of a region; a machine's ranks share the page cache."""
        for filled in self._slices[key]:
            if region.intersect(filled.at) is not None:
                for tensor in filled.tensors:
                    self._weights.expect(tensor.name)

    def _read_from(self, filled: FilledSlice, region: TensorSlice) -> Tensor:
        # tensors in disk order are views of the mapped file
        if not any(tensor.arrangement.is_reordered for tensor in filled.tensors):
            return read_slice(filled, region, self._weights.tensor)
        if self._reordered is None or self._reordered[0] is not filled:
            self._reordered = None  # two at once would take too much memory
            self._reordered = filled, read_slice(filled, filled.at, self._weights.tensor)
        return region.within(filled.at).of(self._reordered[1])
