"""Files of a Hugging Face folder, by name; no name leads outside, and no torch is loaded.

A safetensors file begins with eight bytes with the length of a JSON object; the object and the tensors follow
(https://github.com/huggingface/safetensors).
"""

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from mtrain.base.errors import DataError
from mtrain.base.files import disk_faults
from mtrain.base.plain_files import NOT_A_PLAIN_FILE, open_plain_file, parsed_json, read_plain_file

CONFIG_NAME = "config.json"
SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
TIKTOKEN_NAME = "tiktoken.model"
"""Vocabulary that only Python code of a folder reads; a conversion copies it."""
ADAPTER_NAME = "adapter_config.json"
NAMED_WEIGHTS = "transformers_weights"
"""Field of config.json that names a weights file, which transformers prefers to the usual ones."""
_MOST_BYTES = 1 << 26
"""Largest JSON file; the index of the largest models has ten million bytes."""
_WEIGHTS = ".safetensors"
_POINTER, _LONGEST_POINTER = b"version https://git-lfs", 1024
"""Beginning of a Git LFS pointer, and its largest size in bytes, by specification."""
_LONGEST_FILE_NAME, _LONGEST_TENSOR_NAME = 255, 1000
_SIDE_FILES = re.compile(
    r"generation_config\.json|tokenizer.*\.(json|model)(\.v\d+)?|tekken\.json|params\.json|tiktoken\.model|.*\.(tiktoken|jinja)|vocab\.(json|txt)|merges\.txt|"
    r"special_tokens_map\.json|added_tokens\.json|chat_template\.json|(video_)?(pre)?processor_config\.json|"
    r"sentencepiece.*\.model|LICENSE.*|NOTICE.*|USE_POLICY.*|README\.md"
)
_OTHER_WEIGHTS = re.compile(r".*\.(safetensors|bin|pth|pt|gguf|h5|msgpack)")
_SHOWN_FILES = 3
_SIDE_FOLDERS = ("additional_chat_templates",)


def side_files(folder: Path) -> Iterator[Path]:
    """Yields the paths, inside the folder, that a conversion copies: tokenizer, chat templates, generation defaults,
    licence."""
    for place in (folder, *(folder / name for name in _SIDE_FOLDERS)):
        for file in sorted(place.iterdir()) if place.is_dir() else ():
            name = file.relative_to(folder)
            if file.is_file() and _SIDE_FILES.fullmatch(file.name):
                # refuses a link that leads out: its target would be copied
                inside(folder, name.as_posix())
                yield name


_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)


def how_to_download(name: str) -> str:
    """Returns the end of a message on a missing folder: how to get it if this may be a hub name."""
    if Path(name).exists() or not _HUB_NAME.fullmatch(name):
        return ""
    folder = f"models/{name.partition('/')[2]}"
    return f" (nothing is downloaded; if it is one of the hub: hf download {name} --local-dir {folder})"


def inside(folder: Path, name: str) -> Path:
    """Returns the path of a file that must lie in the folder."""
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
    # weights may be linked one by one: they are read as numbers and never copied
    is_weights = name.endswith(_WEIGHTS) and real.name.endswith(_WEIGHTS)
    # a blob of huggingface_hub's cache, models--NAME/blobs/HASH
    is_blob = real.parent.name == "blobs" and real.parent.parent.name.startswith("models--")
    if not (is_weights or is_blob or any(real.is_relative_to(root) for root in _roots(folder))):
        raise DataError(f"{path} is a link to {real}, outside of the folder; copy the file itself")
    return path


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object."""
    try:
        content = read_plain_file(path, _MOST_BYTES)
    except OSError as fault:
        raise DataError(f"{path} cannot be read: {fault.strerror or fault}") from fault
    return json_object(path, content, "download it again")


def json_object(path: Path, content: bytes, advice: str = "correct it") -> dict[str, Any]:
    """Parses a JSON object; path and advice are for messages."""
    try:
        found = parsed_json(content)
    except ValueError as fault:
        raise DataError(f"{path} is not JSON: {' '.join(str(fault).split())[:200]}; {advice}") from fault
    if not isinstance(found, dict):
        raise DataError(f"{path} holds a value of type {type(found).__name__}, but a JSON object is needed; {advice}")
    return found


def has_weights(folder: Path) -> bool:
    """Says whether there are readable weights of any model."""
    return (folder / SINGLE_NAME).exists() or (folder / INDEX_NAME).exists()


def chosen_places(folder: Path, config: Mapping[str, Any]) -> dict[str, str] | None:
    """Returns tensor -> file, from the index; None if one file holds all weights.

    transformers 4 and 5 choose the file that config.json names, else the single file, else the index, and apply an
    adapter in the folder. A folder in which these contradict each other is refused.
    """
    if (folder / ADAPTER_NAME).exists():
        raise DataError(
            f"{folder} holds {ADAPTER_NAME}: transformers would apply that adapter to the weights; merge it into "
            "them, or move it into a separate folder and name that as adapter.path"
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
            f"{chosen} that lies there; keep the right ones, as {SINGLE_NAME} or {INDEX_NAME}, without this field"
        )
    if chosen == INDEX_NAME:
        return _places(folder)
    if (folder / INDEX_NAME).exists():
        # an index of absent files is left from an earlier save: transformers does not look at it
        shards = sorted({file for file in _places(folder).values() if file != SINGLE_NAME and (folder / file).exists()})
        if shards:
            raise DataError(
                f"{folder} holds two models: {SINGLE_NAME}, which transformers reads, and {INDEX_NAME} with "
                f"{', '.join(shards[:_SHOWN_FILES])}; remove the wrong one"
            )
    return None


def _places(folder: Path) -> dict[str, str]:
    """Returns tensor -> file from the index, even if transformers does not use it."""
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
    """Says whether a tensor may have this name; messages need a single line."""
    return 0 < len(name) <= _LONGEST_TENSOR_NAME and name.isprintable()


def refuse_pointers(folder: Path) -> None:
    """Refuses a clone whose large files Git LFS has not fetched."""
    small = (each for each in sorted(folder.iterdir()) if each.is_file() and each.stat().st_size < _LONGEST_POINTER)
    if names := [each.name for each in small if each.read_bytes().startswith(_POINTER)]:
        raise DataError(
            f"{folder} has Git LFS pointers instead of {', '.join(names)}; fetch the files with: git -C {folder} lfs "
            "pull"
        )


def _roots(folder: Path) -> list[Path]:
    """Returns the folder and, in huggingface_hub's cache, the blobs that its links lead to."""
    real = folder.resolve()
    # models--owner--name/snapshots/COMMIT/file is a link to models--owner--name/blobs/HASH
    blobs = real.parent.parent / "blobs"
    return [real, blobs] if real.parent.name == "snapshots" and blobs.is_dir() else [real]


PREFIX_BYTES = 8
METADATA = "__metadata__"
_LONGEST_BYTES = 100_000_000
"""Longest header of the format."""


class Header(NamedTuple):
    """Content of a header; positions and shapes are not checked."""

    metadata: dict[str, str]
    tensors: dict[str, Any]
    """Name -> unchecked description of a tensor."""
    end: int
    """First byte after the header; positions count from here."""


@contextmanager
def damage_named(path: Path) -> Iterator[None]:
    """Turns errors of a block that reads weights into one readable message."""
    try:
        yield
    except ValueError as fault:
        raise DataError(f"{path} is damaged: {fault}; download it again") from fault
    except OSError as fault:
        if fault.errno in NOT_A_PLAIN_FILE:
            raise DataError(f"{path} cannot be read: {fault.strerror or fault}; download it again") from fault
        with disk_faults(f"read {path}"):
            raise


def read_header(path: Path) -> Header:
    """Reads only the header."""
    with damage_named(path):
        with open_plain_file(path) as file:
            size = os.fstat(file.fileno()).st_size  # size of the open file: the path may name another file by now
            length = int.from_bytes(file.read(PREFIX_BYTES), "little")
            # checked before the header is read: the length comes from the file and decides how much memory is taken; {}
            # has 2 bytes
            if not 2 <= length <= min(_LONGEST_BYTES, size - PREFIX_BYTES):
                raise ValueError(f"its header should have {length} bytes, but the file has {size}")
            content = parsed_json(file.read(length))
        if not isinstance(content, dict):
            raise ValueError("its header is not a JSON object")
        metadata = {} if (found := content.pop(METADATA, None)) is None else found
        if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
            raise ValueError(f"{METADATA} is not an object of texts")
        for name in content:
            if not is_tensor_name(name):
                raise ValueError(f"{name[:100]!r} is not the name of a tensor")
    return Header(metadata, content, PREFIX_BYTES + length)


GENERATION_NAME = "generation_config.json"
EOS_KEY = "eos_token_id"


def declared_ends(folder: Path | None) -> list[int]:
    """Returns the ids that end an answer for transformers and vLLM, in the order of the file; empty if none are named.

    Source: transformers 5.24, generation/utils.py, adjust_generation_fn: config.json is the fallback.
    """
    paths = [] if folder is None else [folder / GENERATION_NAME, folder / CONFIG_NAME]
    path = next((each for each in paths if each.is_file()), None)
    if path is None:
        return []
    content = read_json(path)
    # of a model of images and text, what its text model says counts where it says nothing itself
    text = content.get("text_config")
    found = ({**text, **content} if isinstance(text, dict) else content).get(EOS_KEY)
    ids = found if isinstance(found, list) else [found] if found is not None else []
    if not all(isinstance(each, int) and not isinstance(each, bool) for each in ids):
        raise DataError(
            f"{path} has {EOS_KEY}={str(found)[:60]}, but a token id or a list of them is needed; correct it"
        )
    return ids


def as_declared(ids: list[int]) -> int | list[int]:
    """Returns the value of `EOS_KEY`: a list for several ids."""
    return ids[0] if len(ids) == 1 else ids
