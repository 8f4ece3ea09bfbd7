"""Files of a folder in Hugging Face's layout, by name; no name leads out of the folder.

A model's description can be read here without loading torch.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mtrain.base.errors import DataError
from mtrain.base.plain_files import parsed_json, read_plain_file

CONFIG_NAME = "config.json"
SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
ADAPTER_NAME = "adapter_config.json"
NAMED_WEIGHTS = "transformers_weights"
"""Field of config.json that names the file which transformers reads in place of the usual ones."""
_MOST_BYTES = 1 << 26
"""Largest size of a JSON file; the index of the largest models has ten million bytes."""
_LONGEST_FILE_NAME, _LONGEST_TENSOR_NAME = 255, 1000
_SIDE_FILES = re.compile(
    r"generation_config\.json|tokenizer.*\.(json|model)|.*\.(tiktoken|jinja)|vocab\.(json|txt)|merges\.txt|"
    r"special_tokens_map\.json|added_tokens\.json|chat_template\.json|preprocessor_config\.json|"
    r"sentencepiece.*\.model|LICENSE.*|NOTICE.*|USE_POLICY.*|README\.md"
)
_OTHER_WEIGHTS = re.compile(r".*\.(safetensors|bin|pth|pt|gguf|h5|msgpack)")
_SHOWN_FILES = 3
_SIDE_FOLDERS = ("additional_chat_templates",)


def side_files(folder: Path) -> Iterator[Path]:
    """Yields the files that a conversion copies: tokenizer, chat templates, generation defaults, licence. Paths inside
    the folder."""
    for place in (folder, *(folder / name for name in _SIDE_FOLDERS)):
        for file in sorted(place.iterdir()) if place.is_dir() else ():
            name = file.relative_to(folder)
            if file.is_file() and _SIDE_FILES.fullmatch(file.name):
                # refuses a link that leads out: its target would be copied
                inside(folder, name.as_posix())
                yield name


def inside(folder: Path, name: str) -> Path:
    """Returns the path of a file that must lie in the folder.

    Raises:
        DataError: The file is missing, or the name or a link leads elsewhere.
    """
    path = folder / name
    # names that the file system would refuse with errors of many kinds
    is_plain = "\0" not in name and all(len(os.fsencode(part)) <= _LONGEST_FILE_NAME for part in Path(name).parts)
    # first the name, then the file that it leads to: a link inside the folder can lead anywhere
    if Path(name).is_absolute() or ".." in Path(name).parts or not name or not is_plain:
        raise DataError(f"{folder} names the file {name[:_LONGEST_FILE_NAME]!r}, which does not lie inside it")
    try:
        # strict: a link that leads nowhere is missing, not a file that lies outside
        real = path.resolve(strict=True)
    except RuntimeError as fault:  # raised by Python 3.11
        raise DataError(f"{path} is a link to itself; download it again") from fault
    except OSError as fault:
        raise DataError(f"{path} cannot be read: {fault.strerror or fault}") from fault
    if not any(real.is_relative_to(root) for root in _roots(folder)):
        raise DataError(f"{path} is a link to {real}, outside of the folder; copy the file itself")
    return path


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object.

    Raises:
        DataError: The file cannot be read or holds something else.
    """
    try:
        content = parsed_json(read_plain_file(path, _MOST_BYTES))
    except OSError as fault:
        raise DataError(f"{path} cannot be read: {fault.strerror or fault}") from fault
    except ValueError as fault:
        raise DataError(f"{path} is not JSON: {fault}; download it again") from fault
    if not isinstance(content, dict):
        raise DataError(f"{path} holds a {type(content).__name__}, but a JSON object is needed")
    return content


def has_weights(folder: Path) -> bool:
    """Says whether there are weights that can be read, of whatever model."""
    return (folder / SINGLE_NAME).exists() or (folder / INDEX_NAME).exists()


def chosen_places(folder: Path, config: Mapping[str, Any]) -> dict[str, str] | None:
    """Returns tensor -> file, as in the index; None where one file holds all weights.

    Versions 4 and 5 of transformers choose alike: the file that config.json names, else the single file, else the
    index; and they apply an adapter that lies there. A folder in which two of these are different models is refused.

    Args:
        folder: Path of the folder with the weights.
        config: Content of the folder's config.json.

    Raises:
        DataError: There are no weights, or two files contradict each other; names both.
    """
    if (folder / ADAPTER_NAME).exists():
        raise DataError(
            f"{folder} holds {ADAPTER_NAME}: transformers would put that adapter on top of the weights; merge it into "
            "them, or move it into a folder of its own and name that as adapter.path"
        )
    if not has_weights(folder):
        found = sorted(path.name for path in folder.iterdir() if _OTHER_WEIGHTS.fullmatch(path.name))
        there = f" but {', '.join(found[:_SHOWN_FILES])}" if found else ""
        raise DataError(
            f"{folder} has neither {SINGLE_NAME} nor {INDEX_NAME}{there}; only weights in safetensors of these names "
            "are read"
        )
    chosen = SINGLE_NAME if (folder / SINGLE_NAME).exists() else INDEX_NAME
    if config.get(NAMED_WEIGHTS) not in (None, chosen):
        raise DataError(
            f"{folder / CONFIG_NAME}: {NAMED_WEIGHTS}={config[NAMED_WEIGHTS]!r:.100} names other weights than the "
            f"{chosen} that lies there; keep those that are meant, as {SINGLE_NAME} or {INDEX_NAME}, without this field"
        )
    if chosen == INDEX_NAME:
        return places(folder)
    if (folder / INDEX_NAME).exists():
        # an index of absent files is left from an earlier save: transformers does not look at it
        shards = sorted({file for file in places(folder).values() if file != SINGLE_NAME and (folder / file).exists()})
        if shards:
            raise DataError(
                f"{folder} holds two models: {SINGLE_NAME}, which transformers reads, and {INDEX_NAME} with "
                f"{', '.join(shards[:_SHOWN_FILES])}; remove the one that is not meant"
            )
    return None


def places(folder: Path) -> dict[str, str]:
    """Returns tensor -> file, as in the index, whether the index is used or not.

    Raises:
        DataError: The index cannot be read, or names files outside of the folder.
    """
    found = read_json(inside(folder, INDEX_NAME)).get("weight_map")
    is_map = isinstance(found, dict) and all(isinstance(file, str) for file in found.values())
    if not isinstance(found, dict) or not is_map or not all(map(is_tensor_name, found)):
        raise DataError(f"{folder / INDEX_NAME} has no weight_map of names to files; download it again")
    for file in set(found.values()):
        # no sub-folders: the library writes none
        if Path(file).name != file:
            raise DataError(
                f"{folder / INDEX_NAME} names the file {file[:_LONGEST_FILE_NAME]!r}, but a plain name in the folder "
                "is needed"
            )
    return found


def is_tensor_name(name: str) -> bool:
    """Says whether a tensor may have this name: in messages it has to stand on one line."""
    return 0 < len(name) <= _LONGEST_TENSOR_NAME and name.isprintable()


def _roots(folder: Path) -> list[Path]:
    """Returns the folder and, in the cache of huggingface_hub, the model's own blobs, to which its files are links."""
    real = folder.resolve()
    # models--owner--name/snapshots/COMMIT/file is a link to models--owner--name/blobs/HASH
    blobs = real.parent.parent / "blobs"
    return [real, blobs] if real.parent.name == "snapshots" and blobs.is_dir() else [real]
