"""A Hugging Face folder as the global tensors of a model."""

import re
from collections.abc import Callable, Collection
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from mtrain.arch.parameters import PADDED_TABLES
from mtrain.base.errors import DataError
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
    """Rows of a table for tokens that a run adds: each begins as the mean of the rows before them.

    transformers' `resize_token_embeddings` draws around this mean (with 1e-9 of the rows' covariance). Without the draw
    the same run starts with the same bits. Every rank computes it from the whole table on disk.
    """

    first: int
    end: int
    """Row after the last added one; rows from here on are read again, although no token has them."""
    num_rows: int

    def are_in(self, wanted: TensorSlice) -> bool:
        """Says whether a slice of a table contains any added row."""
        return wanted.offset[0] < self.end and wanted.offset[0] + wanted.shape[0] > self.first

    def filled(self, wanted: TensorSlice, mean: Tensor, read: Callable[[TensorSlice], Tensor]) -> Tensor:
        """Builds a slice of a table from the [hidden] row of every added token, and rows that `read` returns."""
        start, columns = wanted.offset[0], slice(wanted.offset[1], wanted.offset[1] + wanted.shape[1])
        result = mean[columns].expand(wanted.shape).clone()
        for low, high in ((start, self.first), (max(start, self.end), start + wanted.shape[0])):
            if low < high:
                own = TensorSlice((low, wanted.offset[1]), (high - low, wanted.shape[1]))
                own.within(wanted).of(result).copy_(read(own))
        return result


def _mean_row(num_rows: int, width: int, read: Callable[[TensorSlice], Tensor]) -> Tensor:
    """Computes the mean [hidden] of a table's first rows in float64, rounded to its dtype.

    numpy adds rows one by one with any number of threads, so every layout gets the same bits.
    """
    total = np.zeros(width)
    for start in range(0, num_rows, _ROWS_AT_ONCE):
        rows = read(TensorSlice((start, 0), (min(_ROWS_AT_ONCE, num_rows - start), width)))
        dtype = rows.dtype
        total += rows.double().numpy().sum(axis=0)
    return torch.from_numpy(total / num_rows).to(dtype)


class HfSource(NamedTuple):
    """An opened folder with its family, model and table."""

    folder: HfFolder
    weights: Weights
    family: Family
    model: ModelSection
    table: Table
    added: AddedRows | None = None

    @property
    def dtype(self) -> torch.dtype:
        """Returns the dtype of the embeddings."""
        filled = next(each for each in self.table.slices if each.key == EMBEDDINGS)
        return self.weights.facts(filled.tensors[0].name)[0]


def open_source(path: Path, needs_output: bool = True, depths: int = 0) -> HfSource:
    """Opens and checks a folder completely; reads no tensor.

    Args:
        path: Folder with config.json and safetensors.
        needs_output: Whether an untied output layer must exist; base models are saved without one.
        depths: Requested MTP depths, which some families read only on request.
    """
    folder = HfFolder(path)
    weights = plain_weights(folder)
    family, model = read_model(path, folder.config, weights.names(), depths)
    family = family.as_stored(weights.names())
    if family.carried and weights is not folder:
        raise DataError(
            f"{path} is a {family.model_type} model in few bits; only plain weights of models with images are read: "
            "use it in bfloat16"
        )
    if model.num_layers > len(weights.names()):  # the table of a mistyped number would fill the memory
        raise DataError(
            f"{path} does not fit its {CONFIG_NAME}, which says {model.num_layers} layers: it holds only "
            f"{len(weights.names())} tensors"
        )
    # config.json says which tensors have to be there; nothing is inferred from the tensors
    table = family.table(model)
    output = {tensor.name for tensor, filled in table.tensors() if filled.key == _OUTPUT}
    if not needs_output and not output & weights.names():
        table = table.without(_OUTPUT)
    check_names(path, weights, table, (*family.dropped, *family.carried))
    return HfSource(folder, weights, family, model, table)


def check_names(path: Path, weights: Weights, table: Table, may_be_left: Collection[str]) -> None:
    """Compares the tensors of a folder with a table; names that match `may_be_left` carry no information."""
    wanted = {tensor.name: tensor.shape for tensor, _ in table.tensors()}
    names = weights.names()
    # only copies that exist: some folders hold a tied tensor twice, others once
    copies = {name: original for name, original in table.copies.items() if name in names}
    missing = sorted(wanted.keys() - names)
    left = sorted(names - wanted.keys() - copies.keys())
    unexpected = [name for name in left if not any(re.fullmatch(pattern, name) for pattern in may_be_left)]
    # all faults in one message: a wrong config.json shows as many tensors of another shape
    faults = [f"lacks {shown_names(missing)}"] if missing else []
    faults += [f"holds unexpected {shown_names(unexpected)}"] if unexpected else []
    faults += [
        f"{name} has shape {list(found)} instead of {list(wanted[name])}"
        for name in sorted(wanted.keys() & names)
        if (found := weights.facts(name)[1]) != wanted[name]
    ][:_FAULTS_SHOWN]
    faults += [
        f"{name} is {dtype}, but weights have to be plain floating-point numbers"
        for name in sorted(wanted.keys() & names)
        if (dtype := weights.facts(name)[0]) not in PLAIN_NUMBERS
    ][:_FAULTS_SHOWN]
    faults += [
        f"{name} differs from {original}, of which it must be a copy"
        for name, original in copies.items()
        # bits, not nearly equal: training would go on from one of the two, and an export writes one
        if original in names and not same_bits(weights.tensor(name), weights.tensor(original))
    ]
    if faults:
        raise DataError(f"{path} does not fit its {CONFIG_NAME}: {'; '.join(faults)}")


def source_for(path: Path, model: ModelSection) -> HfSource:
    """Opens and checks the folder that a run starts from; reads no tensor."""
    # a head replaces the output layer
    source = open_source(path, needs_output=not model.output.is_new, depths=model.mtp_depths)
    # before any tensor is looked at: shapes alone do not show another rope base or norm epsilon
    added = added_by(model)
    described = with_tokens(source.model, path, added)
    if differing := disagreements(described, model):
        shown = "; ".join(f"model.{name}={mine}, but {theirs} there" for name, theirs, mine in differing)
        raise DataError(f"{path} holds another model ({shown}); name another model.hf")
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
    """Slices of global tensors, made from views of the mapped files; keeps a single reordered tensor."""

    def __init__(self, source: HfSource) -> None:
        self.folder = source.folder.path
        self.others: set[str] = set()
        """Entries that are not tensors; always empty for a folder."""
        self._weights = source.weights
        self._slices: dict[str, list[FilledSlice]] = {}
        dtypes: dict[str, torch.dtype] = {}
        for tensor, filled in source.table.tensors():
            held = source.weights.facts(tensor.name)[0]
            # a fused tensor has one dtype, and the parts may have several; promotion loses no number
            dtypes[filled.key] = torch.promote_types(dtypes.get(filled.key, held), held)
        for filled in source.table.slices:
            self._slices.setdefault(filled.key, []).append(filled)
        self.tensors = {key: GlobalTensorInfo(dtypes[key], shape) for key, shape in source.table.shapes.items()}
        """Key -> dtype and shape; tensors of several dtypes become the dtype that holds all their numbers."""
        self._reordered: tuple[FilledSlice, Tensor] | None = None
        self._added, self._means = source.added, dict[str, Tensor]()
        if self._added is not None:
            for key in {*PADDED_TABLES} & self.tensors.keys():
                facts = self.tensors[key]
                self.tensors[key] = facts._replace(shape=(self._added.num_rows, *facts.shape[1:]))

    def read(self, key: str, wanted: TensorSlice) -> Tensor:
        """Reads a slice of a global tensor, of the wanted shape; it must not be written to.

        A tensor with another order on disk is reordered as a whole and kept until another is requested, so read slices
        in the order of their positions.
        """
        if self._added is not None and key in PADDED_TABLES and self._added.are_in(wanted):
            return self._added.filled(wanted, self._mean(key), lambda own: self._read(key, own))
        return self._read(key, wanted)

    def _mean(self, key: str) -> Tensor:
        """Computes, once per rank, the mean of a table's rows before the added ones."""
        assert self._added is not None, "asked for where rows are added"
        if key not in self._means:
            width = self.tensors[key].shape[1]
            self._means[key] = _mean_row(self._added.first, width, lambda own: self._read(key, own))
        return self._means[key]

    def _read(self, key: str, wanted: TensorSlice) -> Tensor:
        result: Tensor | None = None
        num_elements = 0
        # a rank asks for its shard: only the tensors on disk that lie in it are touched, the others stay unread
        for filled in self._slices[key]:
            shared = wanted.intersect(filled.at)
            if shared is None:
                continue
            found = self._read_from(filled, shared).to(self.tensors[key].dtype)
            if shared == wanted:
                return found
            if result is None:
                # memory only here, where several tensors on disk make up the slice
                result = found.new_empty(wanted.shape)
            shared.within(wanted).of(result).copy_(found)
            num_elements += found.numel()
        # slices of a table never overlap, so the count alone shows a gap
        if result is None or num_elements != wanted.num_elements:
            raise DataError(f"{self.folder}: parts of {key} are missing")
        return result

    def expect(self, key: str, wanted: TensorSlice) -> None:
        """Lets the system read the tensors of a slice ahead, each as a whole: a machine's ranks share the page
        cache."""
        for filled in self._slices[key]:
            if wanted.intersect(filled.at) is not None:
                for tensor in filled.tensors:
                    self._weights.expect(tensor.name)

    def _read_from(self, filled: FilledSlice, wanted: TensorSlice) -> Tensor:
        # in order: a view of the mapped file is enough
        if not any(tensor.arrangement.is_reordered for tensor in filled.tensors):
            return read_slice(filled, wanted, self._weights.tensor)
        if self._reordered is None or self._reordered[0] is not filled:
            self._reordered = None  # two at once would take too much memory
            self._reordered = filled, read_slice(filled, filled.at, self._weights.tensor)
        return wanted.within(filled.at).of(self._reordered[1])
