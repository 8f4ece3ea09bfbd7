"""Published configurations of other programs become configurations that load, or are refused for a reason."""

from pathlib import Path

import pytest

from mtrain.config.foreign.recognition import NAMES
from tests.cli.command_line import call
from tests.config.foreign.programs import head
from tests.config.foreign.public_files import COMMAND, PAGE, PublicFile, completed, lines, public_files
from tests.config.foreign.test_programs import unmentioned

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
    """Given to `check`, or to another program's verb, it is named as what it is."""
    path = file.write(tmp_path)
    other = "trl" if file.verb == "axolotl" else "axolotl"
    for words in (("check", path, "--world-size", "1"), ("from", other, path)):
        code, text = call(*words)
        assert code == 2
        assert f"this is a {NAMES[file.verb]} file" in text
        assert f"mtrain from {file.verb} {path}" in text


def test_the_page_on_public_files_is_current() -> None:
    assert PAGE.read_text() == "\n".join(lines()) + "\n", f"run {COMMAND}"
