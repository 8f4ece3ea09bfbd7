"""Fields that may pass through model.megatron."""

import dataclasses
from collections import Counter
from collections.abc import Collection
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import ValidationError

from mtrain.base.errors import ConfigError
from mtrain.base.ground import found_megatron
from mtrain.config import Config, known_issues, megatron_fields
from mtrain.config.megatron_fields import UNREADABLE, field_defaults
from mtrain.hf.configuration import load_config
from tests.config.samples import config, content
from tests.config.yaml_files import write
from tests.fault_table import Notice
from tests.messages import refuses


@pytest.fixture(scope="module")
def installed() -> dict[str, Any]:
    """Returns the defaults of the public fields of the installed class; a factory represents itself."""
    from megatron.core.transformer import TransformerConfig

    fields = dataclasses.fields(TransformerConfig)
    return {field.name: field.default for field in fields if not field.name.startswith("_")}


TABLES: dict[str, Collection[str]] = {
    "TYPED_KNOBS": megatron_fields.TYPED_KNOBS,
    "OURS": megatron_fields.OURS,
    "EXPERTS": megatron_fields.EXPERTS,
    "SILENT": megatron_fields.SILENT,
    "REFUSED": megatron_fields.REFUSED,
    "PROVEN": megatron_fields.PROVEN,
}


def test_the_parsed_fields_are_those_of_the_installed_class(installed: dict[str, Any]) -> None:
    parsed = field_defaults()
    assert parsed.keys() == installed.keys()
    assert {name: value for name, value in parsed.items() if value is not UNREADABLE and value != installed[name]} == {}
    assert sum(value is UNREADABLE for value in parsed.values()) < 12


NUM_OF_ANOTHER_VERSION = {"0.16.1": 67, "0.19.2": 3}
"""Version -> number of fields that the other one alone has."""


def test_every_field_of_the_installed_class_has_one_answer(installed: dict[str, Any]) -> None:
    answers = Counter(name for table in TABLES.values() for name in table)
    found = found_megatron()
    assert found is not None
    assert len(answers.keys() - installed.keys()) == NUM_OF_ANOTHER_VERSION[str(found.version)]
    assert installed.keys() - answers.keys() == set(), "fields without an answer"
    assert [name for name, count in answers.items() if count > 1] == []


def test_what_is_silently_wrong_is_refused_by_the_guards() -> None:
    refused = {name for refusal in known_issues.REFUSALS for name in refusal.fields}
    assert set(megatron_fields.SILENT) <= refused
    assert refused <= {*megatron_fields.SILENT, *megatron_fields.PROVEN}


@pytest.mark.parametrize("name", sorted(megatron_fields.REFUSED.keys() & field_defaults().keys()))
@pytest.mark.fault(
    "input",
    "a field of model.megatron that no parity test covers",
    happens="refused by name with the reason",
    exit_code=2,
)
def test_a_field_without_a_proof_is_refused(name: str, notice: Notice, tmp_path: Path) -> None:
    default = field_defaults()[name]
    other = (not default) if isinstance(default, bool) else 33
    with notice, pytest.raises(ConfigError) as error:
        load_config([write(tmp_path / "c.yaml", content(model__megatron={name: other}))], [])
    assert error.value.exit_code == notice.exit_code
    assert str(error.value) == f"model.megatron.{name} {megatron_fields.REFUSED[name]}; remove it"


def test_a_refused_field_at_its_default_changes_nothing_and_passes() -> None:
    at_defaults = {
        name: default
        for name, default in field_defaults().items()
        if name in megatron_fields.REFUSED and default is not UNREADABLE
    }
    assert len(at_defaults) > 80
    assert config(model__megatron=at_defaults).model.megatron == at_defaults


@pytest.mark.parametrize(
    ("name", "value"),
    [(name, 1.5) for name in megatron_fields.PROVEN]
    + [(name, None) for name in megatron_fields.PROVEN]
    + [
        ("deterministic_mode", 1),
        ("microbatch_group_size_per_vp_stage", True),
        ("microbatch_group_size_per_vp_stage", 2**63),
        ("no_rope_freq", [0, 2, 0, 1, 0, 0, 0, 0]),
        ("no_rope_freq", [[0], 0, 0, 0, 0, 0, 0, 0]),
        ("no_rope_freq", 0),
    ],
)
def test_a_field_that_passes_has_values_of_its_kind(name: str, value: object) -> None:
    with pytest.raises(ValidationError) as error:
        config(model__megatron={name: value})
    needed = megatron_fields.PROVEN[name].needed
    assert f"megatron.{name}: {needed} is needed, but {value!r} was given; change it" in str(error.value)


def test_every_typed_knob_exists() -> None:
    for key in megatron_fields.TYPED_KNOBS.values():
        *sections, name = key.split(".")
        kind: Any = Config
        for section in sections:
            kind = kind.model_fields[section].annotation
            kind = next((each for each in get_args(kind) if each is not type(None)), kind)
        assert name in kind.model_fields, key


def test_free_fields_pass() -> None:
    given = {"deterministic_mode": True, "apply_rope_fusion": False, "no_rope_freq": [0, 1] * 4}
    assert config(model__megatron=given).model.megatron == given


@pytest.mark.parametrize(
    "field",
    [
        "num_layers",
        "tensor_model_parallel_size",
        "sequence_parallel",
        "bf16",
        "calculate_per_token_loss",
        "grad_scale_func",
        "finalize_model_grads_func",
        "moe_router_topk",
        "moe_input_jitter_eps",
        "moe_layer_recompute",
        "mamba_num_heads",
        "deterministic_mod",
        "sequence_paralel",
        "zzzzzz",
        "_cpu_offloading_context",
    ],
)
def test_other_fields_are_refused(field: str) -> None:
    with refuses(ValidationError, f"megatron.{field}"):
        config(model__megatron={field: 1})
