"""Small checkpoints for tests."""

import hashlib
import json
from pathlib import Path
from typing import Any

from mtrain.checkpoint.store.directory import CheckpointEntry, StagingDir, named_staging, open_staging, publish
from mtrain.checkpoint.store.manifest import CheckpointInfo
from mtrain.checkpoint.store.steps import step_name

FILES = {"common.pt": b"common", "__0_0.distcp": b"shard", "extra/facts.json": b"{}"}


def begin_staging(root: Path, step: int) -> StagingDir:
    """Creates a new empty folder to save the step into."""
    staging = named_staging(root, step)
    open_staging(staging)
    return staging


def write_files(staging: StagingDir) -> None:
    """Writes files as ranks do."""
    for name, content in FILES.items():
        path = staging.path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)


def facts(step: int, valid_loss: float | None = None) -> CheckpointInfo:
    """Returns plausible facts of a checkpoint."""
    versions = {"mtrain": "0.1.0"}
    return CheckpointInfo(
        step=step, layout="tp1-pp1-cp1-dp1", config_hash="c0ffee", versions=versions, valid_loss=valid_loss
    )


def publish_staging(staging: StagingDir) -> CheckpointEntry:
    """Publishes a checkpoint with plausible facts."""
    return publish(staging, facts(staging.step))


def save(root: Path, step: int, valid_loss: float | None = None) -> CheckpointEntry:
    """Runs a whole save."""
    staging = begin_staging(root, step)
    write_files(staging)
    return publish(staging, facts(step, valid_loss))


def damage(root: Path, step: int) -> None:
    """Truncates a shard of a published checkpoint."""
    (root / step_name(step) / "__0_0.distcp").write_bytes(b"sha")


def change_manifest(folder: Path, content: dict[str, Any] | None = None, *, format: int = 3, **changes: object) -> None:
    """Rewrites a manifest with a SHA-256 that fits it; format 2 has none, as 0.1.0 wrote it.

    Args:
        folder: Folder of the checkpoint.
        content: Whole content of the manifest; None changes the existing one.
        format: Format that the manifest states, unless `content` is given.
        changes: Fields with other values.
    """
    path = folder / "mtrain.json"
    content = {**json.loads(path.read_text()), "format": format, **changes} if content is None else {**content}
    content.pop("sha256", None)
    body = json.dumps(content, indent=1)
    seal = hashlib.sha256(body.encode()).hexdigest()
    path.write_text(body + "\n" if format == 2 else body.removesuffix("\n}") + f',\n "sha256": "{seal}"\n}}\n')
