"""Old names of keys and losses: they mean the new ones, are noted, and are refused together with the new ones."""

from pathlib import Path

import pytest

from mtrain import __version__
from mtrain.base.errors import ConfigError
from mtrain.config.load import config_yaml
from mtrain.config.renamed import KEYS, LAST_VERSION, LOSS_FUNCTIONS, VALUES, RenamedKeyWarning, with_current_names
from mtrain.hf.configuration import load_config
from tests.config.samples import config
from tests.messages import refuses

OLD_MLA = {"q_rank": 8, "kv_rank": 8, "nope_head_dim": 4, "rope_head_dim": 2, "value_head_dim": 4}


def test_old_keys_mean_the_new_ones_and_are_noted() -> None:
    old = {"model": {"mla": OLD_MLA}, "checkpoint": {"rehearse": True}, "data": {"chat_format": "plain"}}
    with pytest.warns(RenamedKeyWarning) as caught:
        current = with_current_names(old, "a.yaml")
    new_mla = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 2, "v_head_dim": 4}
    new = {"model": {"mla": new_mla}, "checkpoint": {"self_test": True}, "data": {"chat_template": "plain"}}
    assert current == new
    assert "a.yaml: checkpoint.rehearse is called checkpoint.self_test now; version 0.2 is the last one" in str(
        caught[5].message
    )
    assert len(caught) == len(KEYS)


@pytest.mark.parametrize(("old", "new"), LOSS_FUNCTIONS.items())
def test_old_paths_of_losses_mean_their_names(tmp_path: Path, old: str, new: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(config_yaml(config(loss__function=new, loss__side_terms={"more": {"function": new}})))
    named = load_config([path], [])
    path.write_text(path.read_text().replace(f"function: {new}", f"function: {old}"))
    with pytest.warns(RenamedKeyWarning) as caught:  # without match=, which would raise other warnings again
        assert load_config([path], []) == named
    notes = " ".join(str(each.message) for each in caught)
    assert f"loss.function={old} is called {new} now" in notes
    assert f"loss.side_terms.more.function={old} is called {new} now" in notes
    with pytest.warns(RenamedKeyWarning) as caught:
        assert load_config([path], [f"loss.function={old}"]) == named
    assert any("loss.side_terms.more" in str(each.message) for each in caught)


@pytest.mark.parametrize(
    ("key", "old", "new"), [(key, *pair) for key, names in VALUES.items() for pair in names.items()]
)
def test_old_values_mean_the_new_ones_and_are_noted(key: str, old: str, new: str) -> None:
    section, name = key.split(".")
    with pytest.warns(RenamedKeyWarning) as caught:
        assert with_current_names({section: {name: old}}, "a.yaml")[section][name] == new
    assert f"a.yaml: {key}={old} is called {new} now; version 0.2" in str(caught[0].message)
    assert with_current_names({section: {name: [old]}}, "a.yaml") == {section: {name: [old]}}, "no text is no name"


def test_the_old_kind_of_finetuning_data_means_its_plain_form_of_chat() -> None:
    """The old kind used no template, and the new one applies that of the tokenizer's folder."""
    with pytest.warns(RenamedKeyWarning) as caught:
        current = with_current_names({"data": {"kind": "jsonl"}}, "a.yaml")
    assert current == {"data": {"kind": "sft", "chat_template": "plain"}}
    assert "data.kind=jsonl had no chat template, so data.chat_template=plain is set" in str(caught[-1].message)
    with pytest.warns(RenamedKeyWarning):
        current = with_current_names({"data": {"kind": "jsonl", "chat_template": "auto"}}, "a.yaml")
    assert current == {"data": {"kind": "sft", "chat_template": "auto"}}


def test_a_key_under_both_names_is_refused() -> None:
    with refuses(ConfigError, "checkpoint.rehearse"):
        with_current_names({"checkpoint": {"rehearse": True, "self_test": True}}, "a.yaml")


def test_the_last_version_that_understands_old_names_is_not_over() -> None:
    """Whoever raises the version removes the names, or promises them for longer."""
    current, last = (tuple(map(int, text.split(".")[:2])) for text in (__version__, LAST_VERSION))
    assert current <= last
