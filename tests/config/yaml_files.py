"""YAML files as users write them."""

from pathlib import Path
from typing import Any

import yaml


def write(path: Path, content: dict[str, Any]) -> Path:
    """Writes `content` with PyYAML, not with the code under test."""
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    return path
