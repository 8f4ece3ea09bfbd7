"""A Hugging Face folder: config.json, safetensors with an index, tokenizer and other side files.

Nothing in it runs as code, and no name in it leads outside.
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
    chosen_places,
    inside,
    read_json,
    refuse_pointers,
)


class HfFolder:
    """An opened and checked model folder; tensors are views of its files."""

    def __init__(self, path: Path) -> None:
        """Reads config.json and the headers of all files."""
        self.path = path
        if not path.is_dir():
            raise DataError(f"{path} is no folder; give a folder with {CONFIG_NAME} and *.safetensors")
        with disk_faults(f"look at {path}"):
            refuse_pointers(path)
        self.config = read_json(inside(path, CONFIG_NAME))
        indexed = chosen_places(path, self.config)
        self.has_index = indexed is not None
        """Whether the index says where tensors are; an unused index does not count."""
        # a dict, not a set: in the order of the index, which an export keeps
        files = [SINGLE_NAME] if indexed is None else dict.fromkeys(indexed.values())
        # headers alone are read here; a tensor is mapped when it is asked for
        self.files = {name: SafetensorsFile(inside(path, name)) for name in files}
        self._place = dict.fromkeys(self.files[SINGLE_NAME].entries, SINGLE_NAME) if indexed is None else indexed
        # both ways: a tensor that the index leaves out would be dropped from the model in silence
        self._check_index()

    def names(self) -> set[str]:
        """Returns the names of all tensors."""
        return set(self._place)

    def tensor(self, name: str) -> Tensor:
        """Returns a tensor as a view, which must not be written to."""
        return self.files[self._place[name]].tensor(name)

    def expect(self, name: str) -> None:
        """Lets the system read a tensor ahead."""
        self.files[self._place[name]].expect(name)

    def facts(self, name: str) -> tuple[torch.dtype, Sizes]:
        """Returns dtype and shape of a tensor."""
        entry = self.files[self._place[name]].entries[name]
        return entry.dtype, entry.shape

    def _check_index(self) -> None:
        for name, file in self._place.items():
            if name not in self.files[file].entries:
                raise DataError(f"{self.path / file} lacks {name}, which {INDEX_NAME} places there; download it again")
        for file, content in self.files.items():
            for name in content.entries:
                if self._place.get(name) != file:
                    raise DataError(f"{self.path / file} holds {name}, which {INDEX_NAME} does not place there")
