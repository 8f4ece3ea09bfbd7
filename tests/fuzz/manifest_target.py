"""Checkpoints as a run finds them: the manifest, and files of other kinds in the place of its files."""

from __future__ import annotations

import hashlib
import json
import os
from functools import cache
from pathlib import Path
from random import Random

from mtrain.checkpoint.store.directory import load_entry, verify_files
from mtrain.checkpoint.store.manifest import FileInfo, Manifest, write_manifest
from mtrain.checkpoint.store.steps import step_name
from tests.checkpoint.checkpoints import FILES, change_manifest, facts
from tests.fuzz.mutations import mutated_bytes, mutated_tree
from tests.fuzz.target import Target

_STEP, _NAME, _SEALED = 20, "mtrain.json", "sealed"


@cache
def _manifest() -> Manifest:
    files = {
        name: FileInfo(size_bytes=len(content), sha256=hashlib.sha256(content).hexdigest())
        for name, content in FILES.items()
    }
    return Manifest(**facts(_STEP).model_dump(), files=files)


def _write(folder: Path, random: Random) -> None:
    checkpoint = folder / step_name(_STEP)
    for name, content in FILES.items():
        (checkpoint / name).parent.mkdir(parents=True, exist_ok=True)
        (checkpoint / name).write_bytes(content)
    write_manifest(checkpoint, _manifest())
    match random.choice(("bytes", "bytes", "flip", "content", "sealed", "sealed", "files", "whole")):
        case "bytes":
            raw = (checkpoint / _NAME).read_bytes()
            (checkpoint / _NAME).write_bytes(mutated_bytes(raw, random))
        case "flip":
            changed = bytearray((checkpoint / _NAME).read_bytes())
            changed[random.randrange(len(changed))] ^= 1 << random.randrange(8)
            (checkpoint / _NAME).write_bytes(changed)
        case "content":
            tree = mutated_tree(json.loads((checkpoint / _NAME).read_bytes()), random)
            (checkpoint / _NAME).write_text(json.dumps(tree, indent=1))
        case "sealed":  # a forgery by an attacker who knows the format
            content = mutated_tree(json.loads((checkpoint / _NAME).read_bytes()), random)
            if isinstance(content, dict):
                change_manifest(checkpoint, content)
                (folder / _SEALED).touch()
        case "files":
            _replace(checkpoint, random)
        case "whole":
            pass


def _replace(checkpoint: Path, random: Random) -> None:
    """Replaces a file by something else, or adds one."""
    path = checkpoint / random.choice((*FILES, _NAME, "more", "extra"))
    kept = checkpoint.parent / "kept"
    if path.exists():
        path.rename(kept)
    match random.choice(("nothing", "link", "folder", "pipe", "sparse", "changed")):
        case "nothing":
            pass
        case "link":
            path.symlink_to(kept)
        case "folder":
            path.mkdir()
        case "pipe":
            os.mkfifo(path)
        case "sparse":
            path.touch()
            os.truncate(path, 40 * 2**30)
        case "changed":
            path.write_bytes(mutated_bytes(kept.read_bytes() if kept.is_file() else b"new", random))


def _read(folder: Path) -> None:
    """Checks that an accepted checkpoint is the saved one, or consistently something else."""
    entry = load_entry(folder / step_name(_STEP))
    verify_files(entry, entry.manifest.files)
    assert {name: (entry.path / name).read_bytes() for name in entry.manifest.files} == FILES
    if not (folder / _SEALED).exists():
        assert entry.manifest == _manifest()
    assert (entry.manifest.step, entry.manifest.files) == (_STEP, _manifest().files)


TARGET = Target(_write, _read, frozenset({3}))
