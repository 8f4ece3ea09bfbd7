"""Commands and configurations of the pages for starting are ones that the program takes."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from tests.cli.command_line import call, parsed
from tests.hf.folders import save
from tests.paths import DOCS, ROOT

PAGES = sorted([*(DOCS / "start").glob("*.md"), DOCS / "index.md", DOCS / "when-it-fails.md"])


def commands(page: Path) -> list[str]:
    """Returns the lines of a page's blocks of shell that call the program, without comments."""
    blocks = re.findall(r"```sh\n(.*?)```", page.read_text(), re.DOTALL)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    parts = [part.strip() for line in lines for part in re.split(r"\s&&\s", line.partition(" # ")[0])]
    return [part for part in parts if part.startswith("mtrain ")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_are_taken(page: Path) -> None:
    for line in commands(page):
        parsed(shlex.join(shlex.split(line)[1:]))


def test_commands_would_be_found() -> None:
    found = {page.stem: len(commands(page)) for page in PAGES}
    assert found["pretrain"] > 8
    assert found["finetune"] > 8


def test_the_run_of_the_tutorial_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (text,) = re.findall(r"```yaml\n(.*?)```", (DOCS / "start" / "finetune.md").read_text(), re.DOTALL)
    save("qwen3", tmp_path / "models" / "Qwen3-8B", num_attention_heads=4, num_key_value_heads=2)
    (tmp_path / "my-run.yaml").write_text(text)
    monkeypatch.chdir(tmp_path)
    code, said = call("check", "my-run.yaml", "--world-size", 8, "--without-files")
    assert code == 0, said
    assert "tp2sp-pp1-cp1-dp4 on 8 ranks" in said
    code, said = call("check", "my-run.yaml", "--world-size", 8, "--without-files", "adapter={rank: 16, alpha: 32}")
    assert "trained ones of adapters" in said, said


def test_what_can_be_tried_with_the_real_model_is_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = re.findall(
        r"^\| `(run\.dir=[^`]+)`(?:, with `-n (\d)`)? \|", (DOCS / "start" / "real-model.md").read_text(), re.M
    )
    assert len(rows) == 3
    sizes: dict[str, Any] = {
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "hidden_size": 36,
        "head_dim": 4,
        "vocab_size": 384,
    }
    save("llama", tmp_path / ".real_model" / "smollm2", intermediate_size=48, **sizes)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    for overrides, ranks in rows:
        words = ("examples/real_model/finetune.yaml", *overrides.split(), "--world-size", ranks or 2, "--without-files")
        code, said = call("check", *words)
        assert code == 0, said
