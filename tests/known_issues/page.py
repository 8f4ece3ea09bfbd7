"""Pages of the documentation with the table of known issues: `python -m tests.known_issues.page` writes them."""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable, Iterator
from typing import get_args

from tests.known_issues.rows import GROUPS, TABLE, VERSION, KnownIssue
from tests.known_issues.rows.row import VERSIONS, Outcome
from tests.paths import DOCS

COMMAND = "python -m tests.known_issues.page"
PAGE = DOCS / "proof" / "known-issues.md"
FINDINGS = DOCS / "proof" / "megatron-lm-7452.md"
NUM_FINDINGS, UNREAD = 13, (6, 13)
"""Findings of the report, and those whose text could not be had."""

_WRITTEN = (
    f"<!-- Written by `{COMMAND}` from tests/known_issues/rows; a test compares. Change the table, not this page. -->"
)
_INTRODUCTION = f"""# Known issues: silent faults of megatron-core {VERSION} and {VERSIONS[1]}

{_WRITTEN}

These are faults of plain Megatron-Core that raise no error, or not one that names its cause, on some configuration.
Each row says where the fault is in the sources (file below `megatron/core/`, and symbol; of {VERSION}, or of the first
version that has it), when it shows, and what happens here:

- **fixed**: absent by construction; the files that see to it are named.
- **refused**: `mtrain check` and `mtrain train` say so before a rank starts, and end with exit code 2.
- **noted**: it cannot be fixed; the run says so once at its start.
- **absent**: it cannot arise, since nothing here calls that code.

Every row names the tests that show the fault in plain Megatron-Core, on CPU ranks, and its absence here. Two kinds of
row are read from the sources and not shown: those on schedules, layers and models that are not built, and the one that
says it needs a GPU. Their tests show that they are refused, or not called. A test also looks for a line that each row
quotes in the named function of the installed sources, so an upgrade shows what changed. All rows were looked up in both
versions; where the installed one does not have a fault, the test that shows it has to fail.
"""

_OF_FINDINGS = f"""# NVIDIA/Megatron-LM#7452, finding by finding

{_WRITTEN}

[The report](https://github.com/NVIDIA/Megatron-LM/issues/7452) of September 2026 lists {NUM_FINDINGS} silent faults of
parallel training in Megatron-Core, most of them found by a checker of collectives (`spmd_types`). Here is what each of
them is to this program: the [known issue](known-issues.md) that it is, and the tests that show the fault in plain
Megatron-Core and its absence here. All that could be read are in {VERSIONS[1]}. The report was read in a copy that
lacks the text of findings {", ".join(map(str, UNREAD[:-1]))} and {UNREAD[-1]}, and of those on Megatron-Bridge, whose
source 13 reads, too: nothing is said of these.

| finding | known issue | when | in | here | shown by |
|---|---|---|---|---|---|
"""


def page() -> str:
    """Makes the whole page, in Markdown."""
    return "\n".join((_INTRODUCTION, *_summary(), *_sections())) + "\n"


def findings() -> str:
    """Makes the page of the report's findings, in Markdown."""
    by_number = sorted(((number, row) for row in TABLE for number in row.findings), key=operator.itemgetter(0))
    return _OF_FINDINGS + "\n".join(_finding(number, row) for number, row in by_number) + "\n"


def _finding(number: int, row: KnownIssue) -> str:
    versions = " and ".join(version for version in VERSIONS if row.bites(version))
    link = f"[{row.name}](known-issues.md#{_anchor(row.name)})"
    cells = (str(number), link, row.condition, versions, f"**{row.outcome}**: {row.here}", _code(row.tests))
    return f"| {' | '.join(cells)} |"


def _summary() -> Iterator[str]:
    counts = {outcome: sum(row.outcome == outcome for row in TABLE) for outcome in get_args(Outcome)}
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
    yield f"- Where: {_code(dict.fromkeys(map(str, row.places_in(row.since))))}"
    if row.since != VERSION:
        yield f"- Since {row.since}"
    if row.gone_in is not None:
        yield f"- Gone in {row.gone_in}"
    yield f"- When: {row.condition}"
    yield f"- Here: **{row.outcome}**. {row.here} ({_code(row.modules)})"
    yield f"- Shown by: {_code(row.tests)}"


def _code(names: Iterable[object]) -> str:
    return ", ".join(f"`{name}`" for name in names)


if __name__ == "__main__":
    PAGE.write_text(page())
    FINDINGS.write_text(findings())
