"""Report of the findings, as Markdown."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

COLUMNS = ("step s", "best step s", "update s", "tokens/s", "TFLOP/s", "MFU", "peak bytes", "mtrain is faster by")
"""Columns of a table of contenders."""


def markdown(report: Mapping[str, Any]) -> str:
    """Makes the page: the machine, what passed, and each section's numbers."""
    facts = ", ".join(f"{name} {value}" for name, value in report["machine"].items())
    lines = ["# One GPU", "", f"{facts}; {report['seconds']} s in all", "", "| section | result | s |", "|---|---|---|"]
    for name, answer in report["sections"].items():
        result = "passed" if answer["passed"] else f"**failed**: {_in_a_cell(answer['error'])}"
        lines.append(f"| {name} | {result} | {answer['seconds']} |")
    for name, answer in report["sections"].items():
        lines += ["", f"## {name}", "", f"Right if: {answer['right if']}.", "", *_section(answer["found"])]
    return "\n".join(lines) + "\n"


def _section(found: Mapping[str, Any]) -> list[str]:
    contenders = {name: each for name, each in found.items() if isinstance(each, dict) and "step s" in each}
    if not contenders:
        return _items(found) or ["Nothing was found."]
    lines = [f"| contender | {' | '.join(COLUMNS)} |", "|---" * (1 + len(COLUMNS)) + "|"]
    for name, each in contenders.items():
        lines.append(f"| {name} | {' | '.join(_number(column, each.get(column)) for column in COLUMNS)} |")
    for name, each in contenders.items():
        rest = {key: value for key, value in each.items() if key not in COLUMNS and value not in (None, [])}
        lines += ["", f"{name}:", "", *_items(rest)]
    return lines + _items({name: each for name, each in found.items() if name not in contenders})


def _items(found: Mapping[str, Any], depth: int = 0) -> list[str]:
    lines = []
    for name, value in found.items():
        if isinstance(value, dict) and value:
            lines += [f"{'  ' * depth}- {name}:", *_items(value, depth + 1)]
        else:
            lines.append(f"{'  ' * depth}- {name}: {_number(name, value)}")
    return lines


def _number(name: str, value: Any) -> str:
    """Formats a value with a unit for people."""
    match value:
        case None:
            return "not measured"
        case {}:
            return "none"
        case bool() | str():
            return str(value)
        case int() | float() if "bytes" in name:
            return f"{value / 2**30:.2f} GiB"
        case int() | float() if name == "MFU":
            return f"{value:.1%}"
        case float():
            return f"{value:.4g}"
        case list():
            return ", ".join(f"`{each}`" if isinstance(each, str) else str(each) for each in value)
        case _:
            return str(value)


def _in_a_cell(text: str) -> str:
    return " ".join(text.replace("|", "/").split())[:400]
