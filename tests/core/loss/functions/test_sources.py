"""What the source of a user's own loss function is: all of their code that it runs, wherever it lies."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from mtrain.config.schema.loss import LossSection
from mtrain.core.loss.functions.load import load_loss_function
from mtrain.core.loss.functions.sources import source_fingerprints

LOSS = "from mtrain.core.loss.functions.likelihood import next_token_loss as loss\n"
FILES = {
    "own_losses.py": "import own_tools\nimport numpy\n" + LOSS,
    "own_tools.py": "from own_package import deep\n",
    "own_package/__init__.py": "",
    "own_package/deep.py": "def late():\n    from . import sibling\n",
    "own_package/sibling.py": "SCALE = 2.0\n",
    "own_namespace/part.py": "SCALE = 3.0\n",
    "own_namespace/inner/losses.py": "import own_namespace.part as part\nfrom own_losses import loss\n",
    "unused.py": "SCALE = 4.0\n",
}
NAMES = {_file.partition("/")[0].removesuffix(".py") for _file in FILES}


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Forgets the modules of this file's tests."""
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield
    _forget()


def _forget() -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] in NAMES]:
        del sys.modules[name]


def found(folder: Path, files: Mapping[str, str], function: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Returns the fingerprint of a loss in a folder with these files."""
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    section = LossSection(function=function)
    _forget()
    with monkeypatch.context() as patched:
        patched.syspath_prepend(folder)
        load_loss_function(function, {})
        (key, value) = next(iter(source_fingerprints(section).items()))
    assert key == "loss.function"
    return value


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("function", ["own_losses:loss", "own_namespace.inner.losses:loss"])
def test_every_own_module_that_a_loss_imports_counts_and_no_other(
    function: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = found(tmp_path / "first", FILES, function, monkeypatch)
    assert found(tmp_path / "moved" / "elsewhere", FILES, function, monkeypatch) == whole
    of_others = {"unused.py"} if "namespace" in function else {"unused.py", *(n for n in FILES if "namespace" in n)}
    for number, name in enumerate(FILES):
        changed = found(tmp_path / str(number), {**FILES, name: FILES[name] + "# other\n"}, function, monkeypatch)
        assert (changed == whole) == (name in of_others), name


def test_functions_of_this_package_have_no_source_of_their_own() -> None:
    section = LossSection.model_validate({"side_terms": {"z": {"function": "z_loss"}}})
    assert source_fingerprints(section) == {}


@pytest.mark.usefixtures("fresh")
def test_terms_have_their_own_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    terms = {"a": {"function": "own_losses:loss"}, "b": {"function": "own_namespace.inner.losses:loss"}}
    values = source_fingerprints(LossSection.model_validate({"side_terms": terms}))
    assert values.keys() == {"loss.side_terms.a.function", "loss.side_terms.b.function"}
    assert len(set(values.values())) == 2
