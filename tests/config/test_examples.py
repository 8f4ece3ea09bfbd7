"""The fragments under configs/: every legal combination loads, and known models have their known size."""

from itertools import product
from pathlib import Path

import pytest

from mtrain import planning
from mtrain.config import Config
from mtrain.config.load import load_config
from mtrain.errors import ConfigError
from mtrain.layout import Layout

CONFIGS = Path(__file__).parents[2] / "configs"
PARAMETERS = {
    "llama3_8b": 8_030_261_248,
    "qwen2.5_7b": 7_615_616_512,
    "qwen3_8b": 8_190_735_360,
    "llama3.2_1b": 1_235_814_400,
    "mistral_7b": 7_248_023_552,
}
MODELS = ["tiny", *PARAMETERS]
LAYOUTS = {"single": 1, "tp2sp": 2, "cp2": 2, "tp2pp2": 4, "tp4cp2": 8, "tp8pp4": 32}
ILLEGAL = {("tiny", "tp4cp2"), ("tiny", "tp8pp4"), ("qwen2.5_7b", "tp8pp4")}
"""Too few query groups for so many tensor ranks."""


def fragments(model: str, layout: str, run: str) -> list[Path]:
    names = {"model": model, "layout": layout, "run": run}
    return [CONFIGS / axis / f"{name}.yaml" for axis, name in names.items()]


def load(model: str, layout: str = "single", run: str = "pretrain") -> Config:
    return load_config(fragments(model, layout, run), [])


def test_every_fragment_is_covered() -> None:
    assert {path.stem for path in (CONFIGS / "model").glob("*.yaml")} >= set(MODELS)
    assert {path.stem for path in (CONFIGS / "layout").glob("*.yaml")} >= LAYOUTS.keys()


@pytest.mark.parametrize("run", ["pretrain", "finetune"])
@pytest.mark.parametrize(("model", "layout"), sorted(set(product(MODELS, LAYOUTS)) - ILLEGAL))
def test_legal_combinations_run_on_two_copies_of_the_model(model: str, layout: str, run: str) -> None:
    assert Layout.from_config(load(model, layout, run), 2 * LAYOUTS[layout]).dp == 2


@pytest.mark.parametrize(("model", "layout"), sorted(ILLEGAL))
def test_other_combinations_are_refused(model: str, layout: str) -> None:
    with pytest.raises(ConfigError, match=r"model\.num_query_groups=\d must be a multiple of layout\.tp="):
        load(model, layout)


@pytest.mark.parametrize(("model", "expected"), PARAMETERS.items())
def test_known_models_have_their_known_size(model: str, expected: int) -> None:
    assert planning.num_parameters(load(model).model) == expected
