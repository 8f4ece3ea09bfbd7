"""A tokenizer other than the one that came with the weights is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mtrain.base.errors import DataError
from mtrain.data.sources import check_own_tokenizer
from mtrain.hf.tokenizer.tokenizer import load_tokenizer
from tests.config.samples import config
from tests.fault_table import Notice
from tests.hf.tokenizer.folders import trained, written
from tests.messages import refuses

SETTINGS = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"}


def folder(path: Path, kind: str = "byte_level", num_known: int = 4, **settings: Any) -> Path:
    content = json.loads(trained(kind, num_known))
    return written({"tokenizer.json": content, "tokenizer_config.json": SETTINGS | settings}, path)


def check(tokenizer: Path, run: Path, hf: Path | None = None, start: Path | None = None, **data: Any) -> None:
    given = {"kind": "sft", "seq_length": 8, "train": [{"path": "x"}], "tokenizer": str(tokenizer), **data}
    found = config(data=given, run__dir=str(run), checkpoint__initialize_from=None if start is None else str(start))
    if hf is not None:
        found = found.model_copy(update={"model": found.model.model_copy(update={"hf": str(hf)})})
    check_own_tokenizer(found, load_tokenizer(tokenizer))


@pytest.mark.parametrize(
    "make",
    [
        lambda path: folder(path, num_known=5),
        lambda path: folder(path, "metaspace"),
        lambda path: folder(path, extra_special_tokens=["<tool>"]),
        lambda path: folder(path, tokenizer_class="Qwen2Tokenizer"),
    ],
)
@pytest.mark.fault(
    "folders",
    "`data.tokenizer` gives other ids than the tokenizer that came with the weights",
    happens="refused, both named; `data.allow_other_tokenizer` lets it be",
    exit_code=3,
)
def test_another_tokenizer_is_refused(make: Callable[[Path], Path], tmp_path: Path, notice: Notice) -> None:
    own, other = folder(tmp_path / "own"), make(tmp_path / "other")
    with (
        notice,
        refuses(DataError, "own/tokenizer.json", "allow_other") as raised,
    ):
        check(other, tmp_path / "run", hf=own)
    assert raised.value.exit_code == notice.exit_code
    shutil.copytree(own, tmp_path / "import" / "hf")
    with refuses(DataError, "allow_other_tokenizer=true"):
        check(other, tmp_path / "run", start=tmp_path / "import")
    check(other, tmp_path / "run", hf=own, allow_other_tokenizer=True)
    (tmp_path / "run" / "checkpoints" / "step_00000001").mkdir(parents=True)
    check(other, tmp_path / "run", hf=own)


def test_the_same_tokenizer_under_another_name_is_taken(tmp_path: Path) -> None:
    """The tokenizer may have a chat template, another end, another text of the file; or the weights came with none."""
    own = folder(tmp_path / "own")
    other = folder(tmp_path / "other", eos_token="<s>")
    (other / "chat_template.jinja").write_text("T")
    content = json.loads((other / "tokenizer.json").read_text())
    (other / "tokenizer.json").write_text(json.dumps(content, indent=2))
    check(other, tmp_path / "run", hf=own)
    (tmp_path / "none").mkdir()
    check(other, tmp_path / "run", hf=tmp_path / "none")
