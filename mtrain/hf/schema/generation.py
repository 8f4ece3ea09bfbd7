"""Tokens at which generation ends, as a folder of Hugging Face declares them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mtrain.base.errors import DataError
from mtrain.hf.schema.files import CONFIG_NAME, read_json

GENERATION_NAME = "generation_config.json"
EOS_KEY = "eos_token_id"


def declared_ends(folder: Path | None) -> list[int]:
    """Returns the ids that end an answer for transformers and vLLM, in the order of the file; empty where no file names
    any.

    Args:
        folder: Folder of a model; None where there is none.

    Raises:
        DataError: A file is damaged, or names something else than ids.

    Source: transformers 5.24, generation/utils.py, adjust_generation_fn: config.json is read where there is no other.
    """
    for path in [] if folder is None else [folder / GENERATION_NAME, folder / CONFIG_NAME]:
        if path.is_file():
            return _ids(path, read_json(path))
    return []


def as_declared(ids: list[int]) -> int | list[int]:
    """Returns the value of `EOS_KEY`: a list where there are several ids."""
    return ids[0] if len(ids) == 1 else ids


def _ids(path: Path, content: dict[str, Any]) -> list[int]:
    found = content.get(EOS_KEY)
    ids = found if isinstance(found, list) else [] if found is None else [found]
    if not all(isinstance(each, int) and not isinstance(each, bool) for each in ids):
        raise DataError(
            f"{path} has {EOS_KEY}={str(found)[:60]}, but a token id or a list of them is needed; correct it"
        )
    return ids
