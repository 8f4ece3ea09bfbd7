"""Measures every layout of every kind of model against the oracle and prints Markdown tables.

`python -m tests.parity.table` measures all of docs/proof/parity.md; `python -m tests.parity.table experts families`
some.
"""

import sys
from collections.abc import Iterator, Sequence

from mtrain.config import Config
from tests.parity import cases
from tests.parity.batches import documents_steps, three_steps
from tests.parity.cases import Case
from tests.parity.compare import Deviation, Row, deviations, rows_by_layout
from tests.parity.expert_models import steps_of
from tests.parity.layouts import test_sharded_weights
from tests.parity.models import (
    test_balance,
    test_experts,
    test_families,
    test_images,
    test_latent_attention,
    test_multi_token,
)
from tests.pool import Pool


def dense() -> Iterator[Row]:
    """Yields Llama-shaped models."""
    for case in cases.LAYOUTS:
        yield Row("", {}, case, three_steps())


def experts() -> Iterator[Row]:
    """Yields layers with experts, with either dispatcher."""
    for name, changes, case in (*test_experts.RUNS, *test_experts.OPTIONS):
        yield Row(name, changes, case, steps_of(changes))


def balance() -> Iterator[Row]:
    """Yields losses of routers and biases of the choice."""
    for name, case in test_balance.CASES:
        yield Row(name, test_balance.RUNS[name], case, test_balance.steps_of(name))


def latent_attention() -> Iterator[Row]:
    """Yields multi-head latent attention."""
    for name, changes, case in test_latent_attention.ROWS:
        yield Row(name, changes, case, three_steps())
    for name, changes, case in test_latent_attention.DOCUMENTS:
        yield Row(f"{name}, documents", changes, case, documents_steps())


def multi_token() -> Iterator[Row]:
    """Yields models that predict several tokens ahead."""
    for name, changes, case in test_multi_token.ROWS:
        yield Row(name, changes, case, three_steps())


def families() -> Iterator[Row]:
    """Yields whole models of Gemma-3, OLMo-2, OLMo-3, GPT-OSS and DeepSeek-V3."""
    for changes, case in (*test_families.CASES, *test_families.MEASURED):
        yield Row(test_families.family(changes), changes, case, test_families.steps_of(changes))


def sharded_weights() -> Iterator[Row]:
    """Yields models of every kind whose weights the ranks of DP x CP divide."""
    yield from (*test_sharded_weights.DAY, *test_sharded_weights.NIGHT)


KINDS = {
    "dense": dense,
    "experts": experts,
    "balance": balance,
    "latent_attention": latent_attention,
    "multi_token": multi_token,
    "families": families,
    "sharded_weights": sharded_weights,
}

IMAGES = "images"


def measured(pool: Pool, rows: Sequence[Row]) -> Iterator[tuple[Row, Deviation]]:
    """Measures the distance of each row to the oracle, layout by layout: the rows of one share its ranks."""
    for of_layout in rows_by_layout(rows).values():
        yield from zip(of_layout, deviations(pool, of_layout), strict=True)


def of_rows(pool: Pool, rows: Sequence[Row]) -> list[tuple[str, Deviation]]:
    """Measures rows against the reference; returns name and deviation of each."""
    found = {id(row): each for row, each in measured(pool, rows)}
    return [(_name(row.name, row.case, row.config), found[id(row)]) for row in rows]


def of_images(pool: Pool) -> list[tuple[str, Deviation]]:
    """Measures models of images against transformers' own."""
    return [
        (
            _name(name, case, test_images.config_of(case, kind, vision, **changes)),
            test_images.compared(pool, case, kind, vision, **changes)[1],
        )
        for name, case, kind, vision, changes in test_images.TABLE
    ]


def _name(name: str, case: Case, config: Config) -> str:
    layout = f"{case.resolved(config)}-mbs{case.micro_batch_size}"
    return f"{name}: {layout}" if name else layout


def _line(name: str, found: Deviation) -> str:
    return f"| {name} | " + " | ".join(f"{value:.1e}" for value in found) + " |"


def main(kinds: list[str]) -> None:
    """Prints one table per kind, with one row per layout, and the worst of them."""
    pool = Pool()
    for kind in kinds or [*KINDS, IMAGES]:
        print(f"\n## {kind.replace('_', ' ').capitalize()}\n")
        print("| layout | loss | grad-norm | gradients | weights at the end |\n|---|---|---|---|---|")
        found = of_images(pool) if kind == IMAGES else of_rows(pool, list(KINDS[kind]()))
        for name, each in found:
            print(_line(name, each))
        print(_line(f"**worst of {len(found)}**", Deviation(*map(max, *(each for _, each in found)))), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
