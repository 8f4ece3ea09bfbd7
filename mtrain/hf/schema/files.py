"""Files of a Hugging Face folder; follows no name that leads outside it, and loads no torch.

A safetensors file begins with the length of a JSON object, in eight bytes; the object and the tensors follow
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
"""Vocabulary that only Python code in a folder reads; conversions copy it."""
ADAPTER_NAME = "adapter_config.json"
NAMED_WEIGHTS = "transformers_weights"
"""Field of config.json with the name of a weights file that transformers prefers to the usual ones."""
_MOST_BYTES = 1 << 26
"""Largest JSON file; the index of the largest models has 10 MB."""
_WEIGHTS = ".safetensors"
_POINTER, _LONGEST_POINTER = b"version https://git-lfs", 1024
"""Prefix of a Git LFS pointer, and its largest size in bytes, from the specification."""
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
    """Yields the paths in the folder that conversions copy: tokenizer, chat templates, generation defaults, licence."""
    for parent in (folder, *(folder / name for name in _SIDE_FOLDERS)):
        for file in sorted(parent.iterdir()) if parent.is_dir() else ():
            name = file.relative_to(folder)
            if file.is_file() and _SIDE_FILES.fullmatch(file.name):
                # refuses a link out of the folder, whose target would be copied
                inside(folder, name.as_posix())
                yield name


def inside(folder: Path, name: str) -> Path:
    """Returns the path of an existing file that must be inside the folder."""
    path = folder / name
    # the file system would refuse other names with many kinds of errors
    is_plain = "\0" not in name and all(len(os.fsencode(part)) <= _LONGEST_FILE_NAME for part in Path(name).parts)
    # checks the name, and then the file, because a link inside the folder can lead anywhere
    if Path(name).is_absolute() or ".." in Path(name).parts or not name or not is_plain:
        raise DataError(
            f"{folder} names the file {name[:_LONGEST_FILE_NAME]!r}, which is not inside it; download it again"
        )
    try:
        # strict, so that a dangling link is missing instead of outside
        real = path.resolve(strict=True)
    except RuntimeError as fault:  # raised by Python 3.11
        raise DataError(f"{path} is a link to itself; download it again") from fault
    except OSError as fault:
        raise DataError(f"{path} cannot be read: {fault.strerror or fault}") from fault
    # a link may lead to weights anywhere, because they are read as numbers and never copied
    is_weights = name.endswith(_WEIGHTS) and real.name.endswith(_WEIGHTS)
    # a blob of huggingface_hub's cache, models--NAME/blobs/HASH
    is_blob = real.parent.name == "blobs" and real.parent.parent.name.startswith("models--")
    if not (is_weights or is_blob or any(real.is_relative_to(root) for root in _roots(folder))):
        raise DataError(f"{path} is a link to {real}, outside the folder; copy the file into it")
    return path


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object."""
    try:
        content = read_plain_file(path, _MOST_BYTES)
    except OSError as fault:
        raise DataError(f"{path} cannot be read: {fault.strerror or fault}") from fault
    return json_object(path, content, "download it again")


def json_object(path: Path, content: bytes, advice: str = "correct it") -> dict[str, Any]:
    """Parses a JSON object; messages contain `path` and `advice`."""
    try:
        value = parsed_json(content)
    except ValueError as fault:
        raise DataError(f"{path} is not JSON: {' '.join(str(fault).split())[:200]}; {advice}") from fault
    if not isinstance(value, dict):
        raise DataError(f"{path} has a value of type {type(value).__name__}, but a JSON object is needed; {advice}")
    return value


def has_weights(folder: Path) -> bool:
    """Returns whether the folder has weights that can be read, of any model."""
    return (folder / SINGLE_NAME).exists() or (folder / INDEX_NAME).exists()


def weight_map(folder: Path, config: Mapping[str, Any]) -> dict[str, str] | None:
    """Returns tensor -> file from the index; None if one file has all weights.

    Refuses a folder whose files contradict each other: transformers uses the file that config.json names, or else the
    single file, or else the index, and applies an adapter in the folder.
    """
    if (folder / ADAPTER_NAME).exists():
        raise DataError(
            f"{folder} has {ADAPTER_NAME}, an adapter that transformers would apply to the weights; merge it into "
            "them, or move it into a separate folder and name that as adapter.path"
        )
    if not has_weights(folder):
        unreadable = sorted(path.name for path in folder.iterdir() if _OTHER_WEIGHTS.fullmatch(path.name))
        listing = f" but {', '.join(unreadable[:_SHOWN_FILES])}" if unreadable else ""
        raise DataError(
            f"{folder} has neither {SINGLE_NAME} nor {INDEX_NAME}{listing}, but needs weights in safetensors with one "
            "of these names; convert or download them"
        )
    chosen = SINGLE_NAME if (folder / SINGLE_NAME).exists() else INDEX_NAME
    if config.get(NAMED_WEIGHTS) not in (None, chosen):
        raise DataError(
            f"{folder / CONFIG_NAME}: {NAMED_WEIGHTS}={config[NAMED_WEIGHTS]!r:.100} names other weights than "
            f"{chosen} in the folder; keep the right ones, as {SINGLE_NAME} or {INDEX_NAME}, without this field"
        )
    if chosen == INDEX_NAME:
        return _index_of(folder)
    if (folder / INDEX_NAME).exists():
        # an index of missing files remains from an earlier save, and transformers does not read it
        shards = sorted(
            {file for file in _index_of(folder).values() if file != SINGLE_NAME and (folder / file).exists()}
        )
        if shards:
            raise DataError(
                f"{folder} contains two models: {SINGLE_NAME}, which transformers reads, and {INDEX_NAME} with "
                f"{', '.join(shards[:_SHOWN_FILES])}; remove the wrong one"
            )
    return None


def _index_of(folder: Path) -> dict[str, str]:
    """Returns tensor -> file from the index, even if transformers would not use it."""
    index = read_json(inside(folder, INDEX_NAME)).get("weight_map")
    is_map = isinstance(index, dict) and all(isinstance(file, str) for file in index.values())
    if not isinstance(index, dict) or not is_map or not all(map(is_tensor_name, index)):
        raise DataError(f"{folder / INDEX_NAME} has no weight_map of names to files; download it again")
    for file in set(index.values()):
        # the library writes no subfolders
        if Path(file).name != file:
            raise DataError(
                f"{folder / INDEX_NAME} names the file {file[:_LONGEST_FILE_NAME]!r}, but a plain name in the folder "
                "is needed"
            )
    return index


def is_tensor_name(name: str) -> bool:
    """Returns whether a tensor may have this name, which messages show on one line."""
    return 0 < len(name) <= _LONGEST_TENSOR_NAME and name.isprintable()


def refuse_pointers(folder: Path) -> None:
    """Refuses a clone without the large files that Git LFS should have fetched."""
    small = (path for path in sorted(folder.iterdir()) if path.is_file() and path.stat().st_size < _LONGEST_POINTER)
    if names := [path.name for path in small if path.read_bytes().startswith(_POINTER)]:
        raise DataError(
            f"{folder} has Git LFS pointers instead of {', '.join(names)}; fetch the files with: git -C {folder} lfs "
            "pull"
        )


def _roots(folder: Path) -> list[Path]:
    """Returns the folder, and in huggingface_hub's cache also the folder of blobs, which its links lead to."""
    real = folder.resolve()
    # models--owner--name/snapshots/COMMIT/file is a link to models--owner--name/blobs/HASH
    blobs = real.parent.parent / "blobs"
    return [real, blobs] if real.parent.name == "snapshots" and blobs.is_dir() else [real]


PREFIX_BYTES = 8
METADATA = "__metadata__"
_LONGEST_BYTES = 100_000_000
"""Longest header that the format allows."""


class Header(NamedTuple):
    """Content of a header, with unchecked positions and shapes."""

    metadata: dict[str, str]
    tensors: dict[str, Any]
    """Name -> unchecked description of a tensor."""
    end: int
    """First byte after the header, from which positions count."""


@contextmanager
def damage_named(path: Path) -> Iterator[None]:
    """Converts errors of a block that reads weights to DataError with the file's name."""
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
    """Reads the header of a safetensors file."""
    with damage_named(path):
        with open_plain_file(path) as file:
            size = os.fstat(file.fileno()).st_size  # of the open file, because the path may name another one by now
            length = int.from_bytes(file.read(PREFIX_BYTES), "little")
            # checks the length, which comes from the file, before it allocates memory; {} has 2 bytes
            if not 2 <= length <= min(_LONGEST_BYTES, size - PREFIX_BYTES):
                raise ValueError(f"its header should have {length} bytes, but the file has {size}")
            content = parsed_json(file.read(length))
        if not isinstance(content, dict):
            raise ValueError("its header is not a JSON object")
        metadata = {} if (raw := content.pop(METADATA, None)) is None else raw
        if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
            raise ValueError(f"{METADATA} is not an object of texts")
        for name in content:
            if not is_tensor_name(name):
                raise ValueError(f"{name[:100]!r} is not the name of a tensor")
    return Header(metadata, content, PREFIX_BYTES + length)


GENERATION_NAME = "generation_config.json"
EOS_KEY = "eos_token_id"


def declared_ends(folder: Path | None) -> list[int]:
    """Returns the ids at which transformers and vLLM end an answer, in the file's order; empty without any.

    Source: transformers 5.24, generation/utils.py, adjust_generation_fn; config.json is the fallback.
    """
    paths = [] if folder is None else [folder / GENERATION_NAME, folder / CONFIG_NAME]
    path = next((entry for entry in paths if entry.is_file()), None)
    if path is None:
        return []
    content = read_json(path)
    # the text model's field is the default in a model of images and text
    text = content.get("text_config")
    value = ({**text, **content} if isinstance(text, dict) else content).get(EOS_KEY)
    ids = value if isinstance(value, list) else [value] if value is not None else []
    if not all(isinstance(entry, int) and not isinstance(entry, bool) for entry in ids):
        raise DataError(
            f"{path} has {EOS_KEY}={str(value)[:60]}, but a token id or a list of them is needed; correct it"
        )
    return ids


def as_declared(ids: list[int]) -> int | list[int]:
    """Returns the value of `EOS_KEY`, one id or a list."""
    return ids[0] if len(ids) == 1 else ids
