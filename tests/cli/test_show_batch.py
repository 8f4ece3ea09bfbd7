"""`mtrain show-batch` from the shell: without torch, in a file as on a terminal."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.test_main import config_path, mtrain
from tests.data.conftest import word_tokenizer
from tests.fault_table import Notice

__all__ = ["config_path", "word_tokenizer"]


def test_a_step_is_shown_without_torch(config_path: Path, tmp_path: Path, word_tokenizer: Path) -> None:
    path = tmp_path / "samples.jsonl"
    path.write_text("".join(json.dumps({"prompt": "a", "response": word}) + "\n" for word in "bcd"))
    data = ["data.kind=sft", f"data.tokenizer={word_tokenizer}", f"data.train=[{{path: {path}}}]"]
    done = mtrain("show-batch", config_path, *data, "--step", "2", "--html", tmp_path / "new" / "page.html")
    assert done.returncode == 0, done.stderr
    assert "Step 2: " in done.stdout
    assert "┃<s>a⟦" in done.stdout
    assert "samples.jsonl line " in done.stdout
    assert "<!DOCTYPE html>" in (tmp_path / "new" / "page.html").read_text()


@pytest.mark.fault(
    "disk", "mtrain show-batch writes its page where it may not", happens="refused with the path", exit_code=7
)
def test_a_page_that_cannot_be_written_is_named(
    config_path: Path, tmp_path: Path, word_tokenizer: Path, notice: Notice
) -> None:
    (tmp_path / "file").touch()
    with notice:
        done = mtrain("show-batch", config_path, "data.kind=mock", "--html", tmp_path / "file" / "page.html")
    assert done.returncode == notice.exit_code
    assert "could not write " in done.stderr
    assert "Traceback" not in done.stderr
