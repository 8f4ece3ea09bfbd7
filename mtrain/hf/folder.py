"""A folder in Hugging Face's layout: config.json, safetensors with an index, tokenizer and other side files.

Nothing in it runs as code, and no name in it leads out of it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mtrain.errors import DataError
from mtrain.hf.axes import Sizes
from mtrain.hf.safetensors import SafetensorsFile

CONFIG_NAME = "config.json"
SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
_SIDE_FILES = re.compile(
    r"generation_config\.json|tokenizer.*\.(json|model)|.*\.(tiktoken|jinja)|vocab\.(json|txt)|merges\.txt|"
    r"special_tokens_map\.json|added_tokens\.json|chat_template\.json|preprocessor_config\.json|"
    r"sentencepiece.*\.model|LICENSE.*|NOTICE.*|USE_POLICY.*|README\.md"
)
_SIDE_FOLDERS = ("additional_chat_templates",)


class HfFolder:
    """A model on disk, opened and checked; tensors are views of its files."""

    def __init__(self, path: Path) -> None:
        """Reads config.json and the headers of all files.

        Raises:
            DataError: Something is missing, damaged, or lies outside of the folder.
        """
        self.path = path
        if not path.is_dir():
            raise DataError(f"{path} is no folder; give a folder with {CONFIG_NAME} and *.safetensors")
        self.config = read_json(inside(path, CONFIG_NAME))
        self.index = read_json(inside(path, INDEX_NAME)) if (path / INDEX_NAME).exists() else None
        """Content of the index; None where there is one file."""
        self._place = self._places()
        files = dict.fromkeys(self._place.values()) if self.index is not None else [SINGLE_NAME]
        self.files = {name: SafetensorsFile(inside(path, name)) for name in files}
        self._check_index()

    def names(self) -> set[str]:
        """All tensors."""
        return set(self._place)

    def tensor(self, name: str) -> Tensor:
        """One tensor as a view; not to be written to."""
        return self.files[self._place[name]].tensor(name)

    def facts(self, name: str) -> tuple[torch.dtype, Sizes]:
        """Dtype and shape of a tensor."""
        entry = self.files[self._place[name]].entries[name]
        return entry.dtype, entry.shape

    def side_files(self) -> Iterator[Path]:
        """As `side_files` of the folder."""
        return side_files(self.path)

    def _places(self) -> dict[str, str]:
        """Tensor -> file."""
        if self.index is None:
            if not (self.path / SINGLE_NAME).exists():
                raise DataError(
                    f"{self.path} has neither {SINGLE_NAME} nor {INDEX_NAME}; only weights in safetensors are read"
                )
            return dict.fromkeys(SafetensorsFile(inside(self.path, SINGLE_NAME)).entries, SINGLE_NAME)
        places = self.index.get("weight_map")
        if not isinstance(places, dict) or not all(isinstance(file, str) for file in places.values()):
            raise DataError(f"{self.path / INDEX_NAME} has no weight_map of names to files; download it again")
        for file in set(places.values()):
            if Path(file).name != file:
                raise DataError(
                    f"{self.path / INDEX_NAME} names the file {file!r}, but a plain name in the folder is needed"
                )
        return places

    def _check_index(self) -> None:
        for name, file in self._place.items():
            if name not in self.files[file].entries:
                raise DataError(f"{self.path / file} lacks {name}, which {INDEX_NAME} places there; download it again")
        for file, content in self.files.items():
            for name in content.entries:
                if self._place.get(name) != file:
                    raise DataError(f"{self.path / file} holds {name}, which {INDEX_NAME} does not place there")


def side_files(folder: Path) -> Iterator[Path]:
    """Tokenizer, chat templates, generation defaults, licence: what a conversion copies. Paths inside the folder."""
    for place in (folder, *(folder / name for name in _SIDE_FOLDERS)):
        for file in sorted(place.iterdir()) if place.is_dir() else ():
            name = file.relative_to(folder)
            if file.is_file() and _SIDE_FILES.fullmatch(file.name):
                inside(folder, name.as_posix())
                yield name


def inside(folder: Path, name: str) -> Path:
    """The path of a file that must lie in the folder.

    Raises:
        DataError: It is missing, or the name or a link leads elsewhere.
    """
    path = folder / name
    if Path(name).is_absolute() or ".." in Path(name).parts or not name:
        raise DataError(f"{folder} names the file {name!r}, which does not lie inside it")
    try:
        real = path.resolve(strict=True)
    except OSError as fault:
        raise DataError(f"{path} cannot be read: {fault.strerror or fault}") from fault
    if not any(real.is_relative_to(root) for root in _roots(folder)):
        raise DataError(f"{path} is a link to {real}, outside of the folder; copy the file itself")
    return path


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object.

    Raises:
        DataError: The file cannot be read or holds something else.
    """
    try:
        content = json.loads(path.read_bytes())
    except OSError as fault:
        raise DataError(f"{path} cannot be read: {fault.strerror or fault}") from fault
    except ValueError as fault:
        raise DataError(f"{path} is not JSON: {fault}; download it again") from fault
    if not isinstance(content, dict):
        raise DataError(f"{path} holds a {type(content).__name__}, but a JSON object is needed")
    return content


def _roots(folder: Path) -> list[Path]:
    """The folder, and in the cache of huggingface_hub the model's own blobs, where its files are links to."""
    real = folder.resolve()
    blobs = real.parent.parent / "blobs"
    return [real, blobs] if real.parent.name == "snapshots" and blobs.is_dir() else [real]
