"""Small copies and their layouts are legal for any keys of a configuration, or the configuration is refused."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from mtrain.arch.layout import Layout
from mtrain.base.errors import ConfigError
from mtrain.config import Config
from mtrain.config.derived import layout_dependent_keys
from mtrain.config.schema.section import Section
from mtrain.verify.core.layouts import DerivedTrials, Trial, prepared
from mtrain.verify.core.shrink import reads_files, shrink
from mtrain.verify.parity import Request
from mtrain.verify.preempt import small_run
from mtrain.verify.resume.run import planned
from tests.config.samples import content
from tests.config.test_vision import GEMMA3, MISTRAL3, VISION
from tests.recipes import NAMES, shipped
from tests.verify.core.user_data import write_data_of

LAYOUTS: list[dict[str, Any]] = [
    {},
    {"tp": 2, "sp": True, "cp": 2},
    {"pp": 2, "vpp": 2},
    {"pp": 2, "cp": 4, "cp_comm": "ulysses"},
    {"cp": 2, "cp_comm": "ring"},
    {"tp": 2, "sp": True, "ep": 2, "pp": 2},
]
EXPERTS = {"num_experts": 8, "top_k": 2, "ffn_hidden_size": 64}
SPIKE = {"action": "skip"}
SPECIAL: dict[str, list[Any]] = {
    "eval.prompts": [["a question"]],
    "eval.prompts_file": ["prompts.txt"],
    "metrics.trackers": [["wandb", "mlflow", "trackio"]],
    "metrics.profile_steps": [[2, 3]],
    "metrics.profile_ranks": [[0, 1]],
    "run.tags": [["one"]],
    "checkpoint.allow_changed": [["optimizer.lr"]],
    "data.packing": [{}, {"batch": "rows"}, {"batch": "rows", "window": 64, "later": [{"from_step": 5, "window": 8}]}],
    "data.train": [[{"path": "a"}, {"path": "b", "weight": 0.5}]],
    "data.valid": [[{"path": "c"}], {"one": [{"path": "c"}], "two": [{"path": "d"}]}],
    "data.test": [[{"path": "c"}]],
    "data.split": [[0.9, 0.1, 0.0]],
    "data.curriculum": [[{"from_step": 4, "sources": [{"path": "b"}]}]],
    "data.images": [{"min_pixels": 64, "max_pixels": 4096}],
    "data.extras": [["advantages", "old_logprobs"]],
    "data.ignore_keys": [["id"]],
    "data.chat_date": ["2025-01-31"],
    "train.on_spike": [SPIKE],
    "train.recompute_modules": [["core_attn"], ["core_attn", "mlp"]],
    "layout.stage_layers": [[1, 7], [2, 2, 3, 1]],
    "model.rope": [{"scaling": "llama3", "factor": 8.0}, {"scaling": "yarn", "factor": 4.0}],
    "model.experts": [EXPERTS, EXPERTS | {"shared_ffn_hidden_size": 32, "first_dense_layers": 1}],
    "model.delta_net": [
        {"num_key_heads": 2, "num_value_heads": 4, "key_head_dim": 8, "value_head_dim": 8, "full_attention_every": 2}
    ],
    "model.vision": [VISION, VISION | {"freeze_tower": False}, GEMMA3, MISTRAL3],
    "model.global_attention": [{"head_dim": 16, "num_query_groups": 2}],
    "model.megatron": [{"no_rope_freq": 4}, {"deterministic_mode": True}],
    "model.mtp_depths": [1],
    "loss.side_terms": [{"z": {"function": "z_loss", "coefficient": 0.01}}],
    "loss.router": [{"z_coefficient": 0.01}],
    "loss.function": ["next_token", "dft"],
    "adapter": [{"kind": "lora", "rank": 8}, {"kind": "dora", "rank": 4, "path": "adapter"}],
}
"""Values of keys whose annotation gives none."""
NOT_DRAWN = re.compile(r"run\.dir|\w+\.kind|loss\.(teacher|reference|options)|model\.(mla|mamba|layer_\w+|num_labels)")
"""Keys that are not drawn: paths, kinds of sections, other models, and structures with tests of their own."""


def values_of(name: str, annotation: Any) -> Iterator[Any]:
    """Yields some values that a key could have; a value that a rule refuses is drawn again."""
    if name in SPECIAL:
        yield from SPECIAL[name]
        return
    for each in get_args(annotation) or (annotation,):
        if get_origin(annotation) is Literal:
            yield each
        elif each is bool:
            yield from (True, False)
        elif each is int:
            yield from (1, 2, 3, 8, 64)
        elif each is float:
            yield from (0.0, 0.3, 2.0)
        elif each is str:
            yield "x"
        elif each is not type(None) and each is not annotation:
            yield from values_of(name, each)


def keys() -> dict[str, list[Any]]:
    """Lists the keys of every section of a configuration: dotted key -> values."""
    found: dict[str, list[Any]] = {"adapter": SPECIAL["adapter"]}
    for section, field in Config.model_fields.items():
        kinds = [each for each in _sections(field.annotation) if section != "adapter"]
        for kind in kinds:
            for name, own in kind.model_fields.items():
                key = f"{section}.{name}"
                if not NOT_DRAWN.fullmatch(key):
                    found[key] = list(values_of(key, own.annotation))
    return found


def _sections(annotation: Any) -> Iterator[type[Section]]:
    if isinstance(annotation, type) and issubclass(annotation, Section):
        yield annotation
    for each in get_args(annotation):
        yield from _sections(each)


KEYS = keys()
SFT = {"kind": "sft", "seq_length": 64, "train": [{"path": "a"}], "tokenizer": "folder"}
BASES: list[dict[str, Any]] = [
    {},
    {"data": SFT, "eval": {"prompts": ["a question"], "interval_steps": 2}},
    {"data": {"kind": "indexed", "seq_length": 64, "train": [{"path": "a"}]}, "optimizer": {"kind": "muon", "lr": 1.0}},
]


def test_every_key_has_values() -> None:
    assert [key for key, values in KEYS.items() if not values] == []
    assert len(KEYS) > 150


def with_keys(base: dict[str, Any], layout: dict[str, Any], drawn: dict[str, Any]) -> Config | None:
    """Builds a user's configuration; None where a rule refuses it."""
    sections = content()
    for name, section in base.items():
        sections[name] = dict(section)
    sections["layout"] = dict(layout)
    for key, value in drawn.items():
        section, _, name = key.partition(".")
        if name:
            sections.setdefault(section, {})[name] = value
        else:
            sections[section] = value
    try:
        return Config.model_validate(sections)
    except ValidationError:
        return None


LEAST_COPIES = 9
"""Number of small copies of a run on one process: five layouts, three runs that are resumed, one that is stopped."""


def small_copies(user: Config) -> int:
    """Makes the small copies that the verbs make of a configuration, checks each by all rules, and counts them."""
    trials = DerivedTrials(user, 8).derived()
    if user.dropout_keys or layout_dependent_keys(user.model, user.loss):
        with pytest.raises(ConfigError, match=r"draws other numbers|changes with the layout by definition"):
            shrink(user, trials)
    else:
        small = shrink(user, trials).config
        for trial in trials:
            assert_legal(prepared(trial, small).config, trial)
    plan = planned(user, Request(None, 6, 8, None, "mtrain verify resume", 3), 8)
    resumed = (plan.base, plan.comparable, plan.one, *plan.other_layouts)
    for each in resumed:
        assert_legal(each.config, None)
    assert_legal(small_run(user, Request(None, 6, 8, None, "mtrain verify preempt"), 8)[1].config, None)
    return len(trials) + len(resumed) + 1


def assert_legal(config: Config, trial: Trial | None) -> None:
    """Validates the configuration by all rules that `mtrain train` applies."""
    again = Config.model_validate(config.model_dump())
    assert again == config
    if trial is not None:
        assert Layout.from_config(again, trial.world_size)
    assert not again.metrics.trackers, "nobody else hears of a check"
    assert not again.eval.has_prompts


@st.composite
def configurations(draw: st.DrawFn) -> Config:
    """Draws a user's configuration, with some keys that the samples of the tests do not have."""
    base, layout = draw(st.sampled_from(BASES)), draw(st.sampled_from(LAYOUTS))
    names = draw(st.lists(st.sampled_from(sorted(KEYS)), unique=True, min_size=1, max_size=3))
    user = with_keys(base, layout, {name: draw(st.sampled_from(KEYS[name])) for name in names})
    if user is None:
        reject()
    return user


@settings(max_examples=12)
@given(user=configurations())
def test_no_key_breaks_a_check(user: Config) -> None:
    assert small_copies(user) >= LEAST_COPIES


@pytest.mark.nightly
@settings(max_examples=300)
@given(user=configurations())
def test_no_key_of_many_breaks_a_check(user: Config) -> None:
    assert small_copies(user) >= LEAST_COPIES


@pytest.mark.parametrize("name", NAMES)
def test_layouts_of_what_is_shipped_are_legal(name: str, tmp_path: Path) -> None:
    assert small_copies(shipped(name, tmp_path)) >= LEAST_COPIES


RUN_NAMES = [name for name in NAMES if not name.startswith("model ")]


@pytest.mark.parametrize(
    "name", [*RUN_NAMES, "model tiny", *(pytest.param(name, marks=pytest.mark.nightly) for name in NAMES[-5:])]
)
def test_layouts_of_what_is_shipped_are_legal_where_its_data_are(name: str, tmp_path: Path) -> None:
    user = shipped(name, tmp_path)
    write_data_of(user, Path.cwd())
    assert reads_files(user.data)
    request = Request(None, 6, 8, None, "mtrain verify preempt")
    small_copies(user)
    assert small_run(user, request, 8)[1].config.data.kind == user.data.kind
