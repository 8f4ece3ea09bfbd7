"""The page of models says of every family what is measured."""

import pytest

from mtrain.hf.schema.registry import FAMILIES
from tests.hf import support
from tests.paths import CONFIGS
from tests.pool import Pool


def test_every_family_has_a_row_and_nothing_else() -> None:
    rows = support.rows_of_page()
    assert list(rows) == list(FAMILIES)
    assert support.MODELS.keys() == FAMILIES.keys()
    text = support.PAGE.read_text()
    assert support.page(rows, *support.origin_of_page()) == text
    files = {f"{model.example}.yaml" for model in support.MODELS.values()}
    assert files < {path.name for path in (CONFIGS / "model").iterdir()}


def test_readme_has_the_short_form_of_the_page() -> None:
    rows = support.rows_of_page()
    assert sorted(family for group in support.GROUPS.values() for family in group) == sorted(FAMILIES)
    assert f"\n## Models\n\n{support.short_table(rows)}\n" in support.README.read_text()
    for column, wrong in (("packed", "✗"), ("logits", "2e-05"), ("PEFT", "?")):
        changed = support.short_table(rows | {"olmo3": rows["olmo3"] | {column: wrong}})
        assert changed.count(" | - |") == 1, column


@pytest.mark.nightly  # by day each cell has a test of its own: tests/convert, tests/parity/models, tests/verify/hf
@pytest.mark.parametrize("family", FAMILIES)
def test_a_row_is_what_is_measured(pool: Pool, family: str) -> None:
    found, said = support.row_of(family, pool), support.rows_of_page()[family]
    for column in support.COLUMNS:
        if column in support.BOUNDS:
            assert float(found[column]) < support.BOUNDS[column]
        else:
            assert said[column] in (found[column], "?"), column
