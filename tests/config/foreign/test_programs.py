"""LLaMA-Factory, TRL, transformers, torchtitan and Megatron-Bridge, judged by their own argument classes."""

import json
import random
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from mtrain.config.foreign.translation import Translation
from mtrain.config.foreign.values import is_same
from mtrain.config.tables import table
from tests.config.foreign.programs import PROGRAMS, TRAINERS, head
from tests.config.foreign.test_images import OF_IMAGES
from tests.config.foreign.test_same_run import read_by_none, without_ours

_ALL = pytest.mark.parametrize("program", PROGRAMS)
_UNUSED_SECTIONS = tuple(f"{name}." for name in table("megatron_bridge")["unused_sections"].split())
_SET_LATER = {
    "output_dir": "trainer_output",  # transformers' __post_init__
}
"""Fields whose default is not in the class: name -> default."""
_FILE_TYPES = (str, int, float, list, dict)


def names(program: str) -> dict[str, Any]:
    return {name: value for name, value in PROGRAMS[program].fields().items() if not name.startswith(_UNUSED_SECTIONS)}


@_ALL
def test_every_field_has_a_place(program: str) -> None:
    """No field of an argument class is unknown: it is carried over, named as lost, or named as without effect."""
    assert [name for name in names(program) if name not in PROGRAMS[program].rows] == []


@_ALL
def test_defaults_are_those_of_the_classes(program: str) -> None:
    fields = names(program)
    wrong = {
        name: (row.default, fields[name])
        for name, row in PROGRAMS[program].rows.items()
        if name in fields and row.default is not None and not is_same(row.default, _SET_LATER.get(name, fields[name]))
    }
    assert wrong == {}


@_ALL
def test_a_default_that_is_given_changes_nothing(program: str, tmp_path: Path) -> None:
    """An absent field has the same effect as its default value, for every default that differs from ours."""
    way = PROGRAMS[program]
    absent = way.translate(way.base, tmp_path)
    wrong = {}
    for name, default in names(program).items():
        if program == "Megatron-Bridge" and name.startswith(("model.", "peft.")):
            continue  # a model has its own defaults, and an adapter begins with any of its fields
        if name in OF_IMAGES:
            continue  # makes this a run on images
        if (
            name in way.base
            or default in (None, "", [], {})
            or not isinstance(default, str | int | float | list | dict)
        ):
            continue
        given = way.translate({**way.base, name: default}, tmp_path)
        is_same_run = without_ours(given.content) == without_ours(absent.content)
        says_more = len(read_by_none(given)) > len(read_by_none(absent))
        if not is_same_run or says_more or given.wrong:
            wrong[name] = (default, set(given.lost) - set(absent.lost), given.wrong)
    assert wrong == {}


@pytest.mark.parametrize("kind", TRAINERS)
def test_saved_arguments_are_the_default_ones(kind: str, tmp_path: Path) -> None:
    """All arguments, as the class itself writes them, train what none of them trains."""
    import trl

    way = PROGRAMS[f"trl {kind}"]
    saved = json.loads(getattr(trl, TRAINERS[kind])(output_dir="x", use_cpu=True).to_json_string())
    del saved["use_cpu"]  # without which the class refuses bf16 on this machine
    base = {**way.base, "output_dir": "x"}
    full, short = (way.translate(given, tmp_path) for given in (base | saved, base))
    assert without_ours(full.content) == without_ours(short.content)
    more = {line.partition("=")[0] for line in {*full.lost} - {*short.lost}}
    assert more <= {"steps_per_generation", "generation_batch_size"}  # of a loop, and computed by the class
    assert unmentioned(saved, full) == []


def values_for(default: Any) -> list[Any]:
    """Returns values to draw from, of any type that a file may have."""
    match default:
        case bool():
            return [True, False, "true", "no", "maybe", [1]]
        case int() | float():
            return [0, 1, 7, 0.25, -1, "3", "fast", [1], None]
        case str():
            return ["x", "no", False, 0, None, default, ["a", "b"], {"a": 1}]
    return [None, False, 0, 3, "x", ["q_proj"], {"a": 1}, ""]


def unmentioned(given: Mapping[str, Any], found: Translation) -> list[str]:
    text = head(found)
    return [name for name in given if not re.search(rf"(?<![\w.-]){re.escape(name)}(?![\w-]|\.\w)", text)]


@pytest.mark.parametrize("seeds", [range(6), pytest.param(range(6, 60), marks=pytest.mark.nightly)], ids=str)
@_ALL
def test_no_drawn_value_vanishes(program: str, seeds: range, tmp_path: Path) -> None:
    """Whatever a field has, false, 0 and null included: the written file or the reasons for a refusal name it."""
    way, fields = PROGRAMS[program], names(program)
    for seed in seeds:
        source = random.Random(f"{program}{seed}")
        drawn = {
            name: source.choice(values_for(fields[name]))
            for name in source.sample(sorted(fields), min(25, len(fields)))
        }
        given = {**way.base, **drawn, "unheard_of": source.choice([False, 0, 1])}
        if program == "torchtitan":
            given = {name: value for name, value in given.items() if value is not None}  # TOML has no null
        given = {name: value for name, value in given.items() if "." not in name or not isinstance(value, dict)}
        assert unmentioned(given, way.translate(given, tmp_path)) == [], seed
