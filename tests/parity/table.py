"""Measures every layout of every kind of model against the oracle and prints Markdown tables.

`python -m tests.parity.table` measures all of docs/parity.md; `python -m tests.parity.table experts families` some.
"""

import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

from tests.parity import cases
from tests.parity.batches import GlobalBatch, documents_steps, three_steps
from tests.parity.cases import Case
from tests.parity.compare import Deviation, deviation, run_case, run_oracle
from tests.parity.expert_models import steps_of
from tests.parity.models import test_balance, test_experts, test_families, test_latent_attention, test_multi_token
from tests.pool import Pool


class Row(NamedTuple):
    """A run that is measured."""

    name: str
    """Of the variant; empty where a kind has one."""
    changes: dict[str, Any]
    case: Case
    batches: list[GlobalBatch]

    def __str__(self) -> str:
        layout = f"{self.case.resolved(self.case.config(**self.changes))}-mbs{self.case.micro_batch_size}"
        return f"{self.name}: {layout}" if self.name else layout


def dense() -> Iterator[Row]:
    """Llama-shaped models."""
    for case in cases.LAYOUTS:
        yield Row("", {}, case, three_steps())


def experts() -> Iterator[Row]:
    """Layers with experts, dispatched by either way."""
    for name, changes, case in (*test_experts.RUNS, *test_experts.OPTIONS):
        yield Row(name, changes, case, steps_of(changes))


def balance() -> Iterator[Row]:
    """Losses of routers and biases of the choice."""
    for name, case in test_balance.CASES:
        yield Row(name, test_balance.RUNS[name], case, test_balance.steps_of(name))


def latent_attention() -> Iterator[Row]:
    """Multi-head latent attention."""
    for name, changes, case in test_latent_attention.ROWS:
        yield Row(name, changes, case, three_steps())
    for name, changes, case in test_latent_attention.DOCUMENTS:
        yield Row(f"{name}, documents", changes, case, documents_steps())


def multi_token() -> Iterator[Row]:
    """Several tokens predicted ahead."""
    for name, changes, case in test_multi_token.ROWS:
        yield Row(name, changes, case, three_steps())


def families() -> Iterator[Row]:
    """Gemma-3, OLMo-2, OLMo-3, GPT-OSS and DeepSeek-V3 as a whole."""
    for changes, case in (*test_families.CASES, *test_families.MEASURED):
        yield Row(test_families.family(changes), changes, case, test_families.steps_of(changes))


KINDS = {
    "dense": dense,
    "experts": experts,
    "balance": balance,
    "latent_attention": latent_attention,
    "multi_token": multi_token,
    "families": families,
}


def measured(pool: Pool, row: Row) -> Deviation:
    """How far a row is from the oracle."""
    config = row.case.config(**row.changes)
    return deviation(run_case(pool, row.case, row.batches, **row.changes), run_oracle(config, row.batches), config)


def _line(name: str, found: Deviation) -> str:
    return f"| {name} | " + " | ".join(f"{value:.1e}" for value in found) + " |"


def main(kinds: list[str]) -> None:
    """Prints a table a kind: one row a layout, and the worst of them."""
    pool = Pool()
    for kind in kinds or KINDS:
        print(f"\n## {kind.replace('_', ' ').capitalize()}\n")
        print("| layout | loss | grad-norm | gradients | weights at the end |\n|---|---|---|---|---|")
        rows: list[Deviation] = []
        for row in KINDS[kind]():
            rows.append(measured(pool, row))
            print(_line(str(row), rows[-1]), flush=True)
        print(_line(f"**worst of {len(rows)}**", Deviation(*map(max, *rows))))


if __name__ == "__main__":
    main(sys.argv[1:])
