"""Published configurations of other programs become configurations that load, or are refused for a reason."""

import re
from pathlib import Path

import pytest

from mtrain.config.foreign.keys import NAMES
from tests.cli.command_line import call
from tests.config.foreign.programs import head
from tests.config.foreign.public_files import COMMAND, PAGE, PublicFile, completed, lines, public_files
from tests.config.foreign.test_programs import unmentioned
from tests.config.samples import content
from tests.config.yaml_files import write

_ALL = pytest.mark.parametrize("file", public_files(), ids=lambda file: file.name)


@_ALL
def test_a_public_file_loads(file: PublicFile, tmp_path: Path) -> None:
    found = file.translated(tmp_path)
    config = completed(found)
    assert config.optimizer.lr > 0
    assert found.carried()
    given = file.settings if file.verb not in ("torchtitan", "megatron-bridge") else {}
    assert unmentioned(given, found) == [], head(found)


@_ALL
def test_a_public_file_is_recognised(file: PublicFile, tmp_path: Path) -> None:
    """`check` and the verbs of other programs name the file's own program."""
    path = file.write(tmp_path)
    other = "trl" if file.verb == "axolotl" else "axolotl"
    for words in (("check", path, "--world-size", "1"), ("from", other, path)):
        code, text = call(*words)
        assert code == 2
        assert re.search(f"this is an? {NAMES[file.verb]} file", text)
        assert f"mtrain from {file.verb} {path}" in text


@pytest.mark.parametrize("typo", ["modle", "trian", "optim"])
def test_a_configuration_of_ours_with_a_typo_is_no_foreign_file(typo: str, tmp_path: Path) -> None:
    """Keys that several programs share are no evidence for one of them."""
    train = {"global_batch_size": 8, "micro_batch_size": 1, "num_steps": 4, "seed": 1}
    optimizer = {"lr": 1e-3, "min_lr": 0.0, "weight_decay": 0.1, "clip_grad": 1.0}
    mine = content(train=train, optimizer=optimizer, checkpoint__async_save=False, **{f"{typo}__x": 1})
    code, text = call("check", write(tmp_path / "mine.yaml", mine), "--world-size", "1")
    assert code == 2
    assert f"{typo}: there is no such key" in text
    for verb in ("axolotl", "torchtitan"):
        code, text = call("from", verb, write(tmp_path / "mine.yaml", content(train=train, optimizer=optimizer)))
        assert code == 2
        assert "this is a configuration of mtrain" in text


def test_the_page_on_public_files_is_current() -> None:
    assert PAGE.read_text() == "\n".join(lines()) + "\n", f"run {COMMAND}"
