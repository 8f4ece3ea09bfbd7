"""Names on the Hugging Face Hub, `org/name` or `org/name@revision`: read from its local cache, without network."""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

Kind = Literal["model", "dataset"]

_NAME = re.compile(r"(\w[\w.-]*)/(\w[\w.-]*)(?:@([\w./-]+))?", re.ASCII)
_INSIDE = re.compile(r"(\w[\w.-]*/\w[\w.-]*(?:@[\w.-]+)?)/(.+)", re.ASCII)
"""Name of a dataset and a path or pattern inside it."""
_OF_FILES = (".jsonl", ".json", ".gz", ".zst", ".parquet", ".arrow", ".model", ".txt", ".csv", ".bin", ".idx", ".yaml")
_SNAPSHOT = re.compile(r"(?:models|datasets)--([\w.-]+?)--([\w.-]+)/snapshots/([0-9a-f]{40})", re.ASCII)
"""End of a snapshot's path in the cache; its folder is named after the commit."""


def cached(name: str, kind: Kind = "model") -> str:
    """Returns the path of the snapshot of a name in the cache; any other text, including an existing path, unchanged.

    A name without a revision is the `main` of the last download.
    """
    match = _NAME.fullmatch(name)
    if match is None or Path(name).exists() or not (_cache() / f"{kind}s--{match[1]}--{match[2]}").is_dir():
        return name
    from huggingface_hub import snapshot_download  # tokenizers needs the package; loading it takes half a second
    from huggingface_hub.errors import LocalEntryNotFoundError

    repository = f"{match[1]}/{match[2]}"
    try:
        return str(
            snapshot_download(
                repository, repo_type=kind, revision=match[3], cache_dir=str(_cache()), local_files_only=True
            )
        )
    except LocalEntryNotFoundError:
        return name


def _cache() -> Path:
    """Returns the folder of the cache. Source: huggingface_hub 2.4, constants.py."""
    environ = os.environ
    if (cache := environ.get("HF_HUB_CACHE") or environ.get("HUGGINGFACE_HUB_CACHE")) is not None:
        return Path(cache).expanduser()
    home = environ.get("HF_HOME") or f"{environ.get('XDG_CACHE_HOME') or '~/.cache'}/huggingface"
    return Path(home).expanduser() / "hub"


def how_to_download(name: str, kind: Kind = "model") -> str:
    """Returns the end of a message about a missing path: the download command, if the path may be a name on the Hub.

    Empty for names of files and for paths in an existing folder, which are more likely misspelt.
    """
    match = _NAME.fullmatch(name)
    if match is None or Path(name).exists() or Path(match[1]).is_dir() or Path(name).suffix in _OF_FILES:
        return ""
    owner = "ORG" if match[1] == f"{kind}s" else match[1]  # a folder named as below, or in the documentation
    options = (" --repo-type dataset" if kind == "dataset" else "") + (f" --revision {match[3]}" if match[3] else "")
    return (
        f" (mtrain downloads nothing, and the hub's cache does not have it; if this is a {kind} on the hub, run "
        f"hf download {owner}/{match[2]}{options} --local-dir {kind}s/{match[2]})"
    )


def revision_of(path: str) -> str | None:
    """Returns `org/name@commit`, which identifies every byte, for a snapshot in the cache; None for other paths."""
    match = _SNAPSHOT.search(path)
    return None if match is None or match.end() != len(path.rstrip("/")) else f"{match[1]}/{match[2]}@{match[3]}"


def is_same_repository(first: str, second: str) -> bool:
    """Says whether two paths are snapshots of one repository in the cache."""
    names = [(revision_of(path) or "").partition("@")[0] for path in (first, second)]
    return names[0] != "" and names[0] == names[1]


def with_snapshots(content: Mapping[Any, Any]) -> dict[Any, Any]:
    """Replaces names by snapshots in `model.hf`, `data.tokenizer` and the sources of records, which may add a path
    inside the dataset: org/name/data/train-*."""
    changed = dict(content)
    if isinstance(model := content.get("model"), Mapping) and isinstance(model.get("hf"), str):
        changed["model"] = {**model, "hf": cached(model["hf"])}
    if isinstance(data := content.get("data"), Mapping):
        if isinstance(tokenizer := data.get("tokenizer"), str):
            data = {**data, "tokenizer": cached(tokenizer)}
        if data.get("kind") == "sft":
            data = {**data, **{key: _sources(data[key]) for key in ("train", "valid", "test") if key in data}}
        changed["data"] = data
    return changed


def _sources(value: Any) -> Any:
    """Replaces the names in a list of sources, or in a mapping of such lists."""
    if isinstance(value, list | tuple):
        return [_sources(part) for part in value]
    if not isinstance(value, Mapping):
        return value
    if not isinstance(path := value.get("path"), str):
        return {name: _sources(part) for name, part in value.items()}
    inside = _INSIDE.fullmatch(path)
    name, rest = (path, "") if inside is None else (inside[1], f"/{inside[2]}")
    return {**value, "path": cached(name, "dataset") + rest}
