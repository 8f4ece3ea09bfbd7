"""Keys that a resumed run may change with consent."""

from pathlib import Path

import pytest

from mtrain.base.errors import ConfigError
from mtrain.config.consent import NEUTRAL_KEYS, is_permitted
from mtrain.hf.configuration import load_config
from tests.config.samples import config, content
from tests.config.yaml_files import write
from tests.fault_table import Notice
from tests.messages import check_message


@pytest.mark.fault(
    "input",
    "checkpoint.allow_changed names an unknown key, or one that no run can change",
    happens="refused by the name of the key, with the reason",
    exit_code=2,
)
@pytest.mark.parametrize(
    "key",
    [
        "optimizer.lrr",
        "optimiser",
        "optimizer.lr.value.more",
        "data.train[0].weight",
        "",
        "model.num_layers",
        "model",
        "optimizer.kind",
        "train.precision",
        "train.global_batch_size",
        "train.seed",
        "layout.tp",
        "train.num_steps",
    ],
)
def test_what_cannot_be_allowed_is_refused_by_name(key: str, tmp_path: Path, notice: Notice) -> None:
    sections = content(checkpoint={"allow_changed": ["optimizer.lr", key]})
    with notice, pytest.raises(ConfigError) as caught:
        load_config([write(tmp_path / "config.yaml", sections)])
    (line,) = str(caught.value).splitlines()
    assert f"checkpoint.allow_changed names {key!r}" in line
    check_message(line)
    assert caught.value.exit_code == notice.exit_code


def test_what_can_be_allowed_is_taken() -> None:
    allowed = ["optimizer.lr", "optimizer.momentum", "data.train", "data", "loss.options.any", "loss.side_terms.z"]
    allowed += ["loss.side_terms.z.coefficient", "model.rope.base", "model.experts.bias_update_rate"]
    assert config(checkpoint__allow_changed=allowed).checkpoint.allow_changed == tuple(allowed)


def test_a_section_means_what_can_change_in_it() -> None:
    assert is_permitted("optimizer.lr", ["optimizer"])
    assert is_permitted("loss.options.gamma", ["loss"])
    assert not is_permitted("optimizer.kind", ["optimizer"])
    assert not is_permitted("train.seed", ["train"])
    assert not is_permitted("optimizer.lr_decay", ["optimizer.lr"]), "whole names"
    assert not is_permitted("model.num_layers", ["model.num_layers"]), "also where the configuration was not checked"


def test_nothing_is_neutral_and_forbidden_at_once() -> None:
    assert not any(is_permitted(key, ["optimizer", "loss"]) for key in NEUTRAL_KEYS)
