"""The page of models says of every family what is measured."""

import pytest
import torch
import transformers

from mtrain.arch import num_parameters
from mtrain.hf.configuration import load_config
from mtrain.hf.schema.registry import FAMILIES, fitting_family
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


SIZED = sorted(path.stem for path in (CONFIGS / "model").glob("*.yaml"))


@pytest.mark.parametrize("name", SIZED)
def test_a_model_of_published_size_has_as_many_parameters_in_transformers(name: str) -> None:
    """transformers builds it without memory, in every family that has it; it has no predictions further ahead."""
    files = [CONFIGS / "model" / f"{name}.yaml", CONFIGS / "run" / "pretrain.yaml"]
    model = load_config(files, []).model.model_copy(update={"mtp_depths": 0})
    named = [FAMILIES[family] for family, given in support.MODELS.items() if given.example == name]
    for family in [each for each in named if each.tower is None] or [fitting_family(model)]:
        said = family.config(model, None)
        if family.model_type == "kimi_k2":  # has its class in DeepSeek-V3
            said["model_type"] = "deepseek_v3"
        with torch.device("meta"):
            theirs = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**said))
        assert sum(each.numel() for each in theirs.parameters()) == num_parameters(model), family.model_type


@pytest.mark.nightly  # by day each cell has a test of its own: tests/convert, tests/parity/models, tests/verify/hf
@pytest.mark.parametrize("family", FAMILIES)
def test_a_row_is_what_is_measured(pool: Pool, family: str) -> None:
    found, said = support.row_of(family, pool), support.rows_of_page()[family]
    for column in support.COLUMNS:
        if column in support.BOUNDS:
            assert float(found[column]) < support.BOUNDS[column]
        else:
            assert said[column] in (found[column], "?"), column
