"""Names in other programs as data: one TOML table per program, and hints for unknown keys."""

import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any


@cache
def table(name: str) -> Mapping[str, Any]:
    """Returns the content of `mtrain/config/tables/NAME.toml`."""
    return tomllib.loads(Path(__file__).with_name(f"{name}.toml").read_text(encoding="utf-8"))


def by_name(groups: Mapping[str, str]) -> dict[str, str]:
    """Inverts value -> names, separated by whitespace, to name -> value."""
    return {name: value for value, names in groups.items() for name in names.split()}
