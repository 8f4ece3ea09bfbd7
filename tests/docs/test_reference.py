"""Pages of docs/reference are those that the code writes, and say something of everything."""

import shlex
from typing import Any

import pytest
import yaml
from pydantic import ValidationError, create_model

from mtrain.base.yaml_text import read_yaml
from mtrain.cli.arguments import EXAMPLES as EXAMPLES_OF_VERBS
from mtrain.config.keys import Key, described_keys
from mtrain.hf.configuration import load_config
from tests.cli.command_line import parsed
from tests.docs.reference import COMMAND, EXAMPLES, FOLDER, PAGES, commands, examples
from tests.paths import CONFIGS

KEYS = {key.name: key for key in described_keys()}


@pytest.mark.parametrize("name", PAGES)
def test_a_page_says_what_the_code_says(name: str) -> None:
    assert (FOLDER / name).read_text() == PAGES[name](), f"write it again: {COMMAND}"


def test_every_key_has_a_meaning_and_a_type() -> None:
    assert len(KEYS) > 250
    assert [name for name, key in KEYS.items() if not key.text.endswith((".", ")"))] == []
    assert [name for name, key in KEYS.items() if "any value" in key.type] == []


def test_every_key_of_a_run_is_listed() -> None:
    """A run's config.yaml gives all keys of its kinds."""
    settings = ["run.dir=runs/first", "train.precision=fp32", "train.on_spike={action: stop}", "data.packing={}"]
    config = load_config([CONFIGS / "model" / "tiny.yaml", CONFIGS / "run" / "finetune.yaml"], settings)
    found = []

    def collect(prefix: str, value: object) -> None:
        if isinstance(value, dict) and value and prefix not in ("model.megatron", "loss.options"):
            for name, each in value.items():
                collect(f"{prefix}.{name}" if prefix else name, each)
        else:
            found.append(prefix)

    collect("", config.model_dump())
    assert len(found) > 150
    assert [name for name in found if name not in KEYS] == []


def test_units_and_kinds_are_found() -> None:
    assert KEYS["train.process_group_timeout_s"].unit == "seconds"
    assert KEYS["data.seq_length"].unit == "tokens"
    assert KEYS["train.num_steps"].unit == "steps"
    assert KEYS["optimizer.momentum"].kinds == ("muon",)
    assert KEYS["optimizer.lr"].kinds == ()
    assert KEYS["train.global_batch_size"].is_required
    assert KEYS["layout.tp"].default == 1


def refused(key: Key, text: str) -> bool:
    """Says whether the schema refuses a value of a key."""
    value = read_yaml(f"value: {text}").content["value"]
    if key.name.endswith(".kind"):
        return value not in key.type.split(" | ")
    assert key.field is not None
    annotation: Any = key.field.annotation
    try:
        create_model("One", value=(annotation, key.field)).model_validate({"value": value})
    except ValidationError:
        return True
    return False


def test_an_example_is_a_value_of_its_key() -> None:
    shown = examples()
    assert list(shown) == [name for name, key in KEYS.items() if not key.is_section]
    assert [name for name, text in shown.items() if refused(KEYS[name], text)] == []
    assert refused(KEYS["layout.tp"], "0")


def test_no_example_is_left_over() -> None:
    assert [name for name in yaml.safe_load(EXAMPLES.read_text()) if name not in KEYS] == []


def test_every_verb_has_an_example_that_it_takes() -> None:
    assert {name for name, _ in commands()} == set(EXAMPLES_OF_VERBS)
    for name, line in EXAMPLES_OF_VERBS.items():
        program, *words = shlex.split(line)
        assert program == "mtrain"
        assert words[: len(name.split())] == name.split()
        parsed(shlex.join(words))
