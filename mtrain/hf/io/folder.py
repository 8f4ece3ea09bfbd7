"""A Hugging Face folder: config.json, safetensors with an index, tokenizer and other side files.

Runs no code from the folder, and follows no name that leads outside it.
"""

from pathlib import Path

import torch
from torch import Tensor

from mtrain.base.errors import DataError
from mtrain.base.files import disk_faults
from mtrain.base.tensor_slice import Sizes
from mtrain.hf.io.safetensors import SafetensorsFile
from mtrain.hf.schema.files import (
    CONFIG_NAME,
    INDEX_NAME,
    SINGLE_NAME,
    inside,
    read_json,
    refuse_pointers,
    weight_map,
)


class HfFolder:
    """An opened and checked model folder, whose tensors are views of its files."""

    def __init__(self, path: Path) -> None:
        """Reads config.json and the headers of all files."""
        self.path = path
        if not path.is_dir():
            raise DataError(f"{path} is not a folder; name a folder with {CONFIG_NAME} and *.safetensors")
        with disk_faults(f"look at {path}"):
            refuse_pointers(path)
        self.config = read_json(inside(path, CONFIG_NAME))
        indexed = weight_map(path, self.config)
        self.has_index = indexed is not None
        """Whether an index locates the tensors; an unused index does not count."""
        # a dict, not a set, to keep the order of the index for an export
        files = [SINGLE_NAME] if indexed is None else dict.fromkeys(indexed.values())
        self.files = {name: SafetensorsFile(inside(path, name)) for name in files}
        self._file_of = dict.fromkeys(self.files[SINGLE_NAME].entries, SINGLE_NAME) if indexed is None else indexed
        # in both directions, because a tensor that the index omits would silently be missing from the model
        self._check_index()

    def names(self) -> set[str]:
        """Returns the names of all tensors."""
        return set(self._file_of)

    def tensor(self, name: str) -> Tensor:
        """Returns a tensor as a view of its file; do not write to it."""
        return self.files[self._file_of[name]].tensor(name)

    def expect(self, name: str) -> None:
        """Asks the system to read a tensor ahead."""
        self.files[self._file_of[name]].expect(name)

    def facts(self, name: str) -> tuple[torch.dtype, Sizes]:
        """Returns a tensor's dtype and shape."""
        entry = self.files[self._file_of[name]].entries[name]
        return entry.dtype, entry.shape

    def _check_index(self) -> None:
        for name, file in self._file_of.items():
            if name not in self.files[file].entries:
                raise DataError(
                    f"{self.path / file} lacks {name}, although {INDEX_NAME} locates it there; download it again"
                )
        for file, content in self.files.items():
            for name in content.entries:
                if self._file_of.get(name) != file:
                    raise DataError(
                        f"{self.path / file} contains {name}, which {INDEX_NAME} does not locate there; download it "
                        "again"
                    )
