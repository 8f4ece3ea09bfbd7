"""Page of the documentation with the table of known issues: `python -m tests.known_issues.page` writes it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from tests.known_issues.rows import GROUPS, TABLE, VERSION, KnownIssue
from tests.known_issues.rows.row import VERSIONS
from tests.paths import DOCS

COMMAND = "python -m tests.known_issues.page"
PAGE = DOCS / "known-issues.md"

_INTRODUCTION = f"""# Known issues: silent faults of megatron-core {VERSION}

<!-- Written by `{COMMAND}` from tests/known_issues/rows; a test compares. Change the table, not this page. -->

These are faults of plain Megatron-Core that raise no error, or not one that names its cause, on some configuration.
Each row says where the fault is in the sources of {VERSION} (file below `megatron/core/`, and symbol), when it shows,
and what happens here:

- **fixed**: absent by construction; the files that see to it are named.
- **refused**: `mtrain check` and `mtrain train` say so before a rank starts, and end with exit code 2.
- **noted**: it cannot be fixed; the run says so once at its start.

Every row names the tests that show the fault in plain Megatron-Core, on CPU ranks, and its absence here. Two kinds of
row are read from the sources and not shown: those on schedules that are not built, and the one that says it needs a
GPU. Their tests show that they are refused. A test also looks for a line that each row quotes in the named function of
the installed sources, so an upgrade shows what changed. All rows were looked up in {VERSIONS[1]}, too; some are gone
there.
"""


def page() -> str:
    """Makes the whole page, in Markdown."""
    return "\n".join((_INTRODUCTION, *_summary(), *_sections())) + "\n"


def _summary() -> Iterator[str]:
    counts = {outcome: sum(row.outcome == outcome for row in TABLE) for outcome in ("fixed", "refused", "noted")}
    yield f"{len(TABLE)} rows: " + ", ".join(f"{count} {outcome}" for outcome, count in counts.items()) + ".\n"
    yield "| fault | when | here |\n|---|---|---|"
    for row in TABLE:
        yield f"| [{row.name}](#{_anchor(row.name)}) | {row.condition} | {row.outcome} |"


def _anchor(name: str) -> str:
    """Makes the anchor of a heading as Markdown renderers do."""
    return re.sub(r"[^a-z0-9 -]", "", name.lower()).replace(" ", "-")


def _sections() -> Iterator[str]:
    for heading, rows in GROUPS.items():
        yield f"\n## {heading}"
        for row in rows:
            yield from _entry(row)


def _entry(row: KnownIssue) -> Iterator[str]:
    yield f"\n### {row.name[0].upper()}{row.name[1:]}\n"
    yield f"{row.fault}\n"
    yield f"- Where: {_code(dict.fromkeys(map(str, row.places_in(VERSION))))}"
    if row.gone_in is not None:
        yield f"- Gone in {row.gone_in}"
    yield f"- When: {row.condition}"
    yield f"- Here: **{row.outcome}**. {row.here} ({_code(row.modules)})"
    yield f"- Shown by: {_code(row.tests)}"


def _code(names: Iterable[object]) -> str:
    return ", ".join(f"`{name}`" for name in names)


if __name__ == "__main__":
    PAGE.write_text(page())
