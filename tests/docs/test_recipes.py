"""Configurations to start from run on the GPUs that they name, and our own recipes are complete."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.cli.command_line import call
from tests.paths import CONFIGS, ROOT

PAGES = sorted((ROOT / "docs" / "recipes").glob("*.md"))
RECIPES = [page for page in PAGES if page.name != "index.md"]
STARTS = sorted((CONFIGS / "start").glob("*.yaml"))


@pytest.mark.parametrize("path", STARTS, ids=lambda path: path.stem)
def test_a_start_fits_the_gpus_that_it_names(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    text = path.read_text()
    command = re.search(r"mtrain launch slurm (.*) --nodes (\d+) --gpus-per-node (\d+)$", text, re.MULTILINE)
    assert command is not None
    assert text.startswith(f"# GPUs: {int(command[2]) * int(command[3])} x H100 80 GB\n")
    assert str(path.relative_to(ROOT)) in command[1].split()
    variants = re.findall(r"^#   \.\.\. ((?:\S+=\S+ )+)", text, re.MULTILINE)
    for overrides in (variant.split() for variant in variants or [""]):
        code, said = call("check", *command[1].split(), *overrides, "--without-files")
        assert (code, "GPU memory" in said) == (0, True), said


@pytest.mark.parametrize("page", RECIPES, ids=lambda page: page.stem)
def test_a_recipe_is_complete(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    text = page.read_text()
    (recipe,) = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    (tmp_path / "recipe.yaml").write_text(recipe)
    (command,) = re.findall(r"^mtrain (check .*)$", text, re.MULTILINE)
    words = command.replace("recipe.yaml", str(tmp_path / "recipe.yaml")).split()
    code, said = call(*words, "--without-files")
    assert code == 0, said
    assert "Memory of a rank" in said


KEYS = re.compile(r"`((?:run|model|adapter|layout|train|optimizer|loss|data|valid|checkpoint)\.[a-z_0-9.]+)[:`]")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_key_of_ours_exists(page: Path) -> None:
    """Keys stand in the second column of a table; the first has the other program's names."""
    rows = [line.split("|") for line in page.read_text().splitlines() if line.startswith("| ")]
    keys = {key for row in rows if len(row) > 3 for key in KEYS.findall(row[2])}
    assert keys or page.name == "index.md"
    docs = "\n".join(path.read_text() for path in (ROOT / "mtrain" / "config" / "schema").glob("*.py"))
    unknown = [key for key in keys if not re.search(rf"^    {key.split('.')[1]}\b", docs, re.MULTILINE)]
    assert unknown == []
    named = [name for page in PAGES for name in re.findall(r"configs/\w+/[\w.]+\.yaml", page.read_text())]
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_every_start_is_on_the_page() -> None:
    text = (ROOT / "docs" / "recipes" / "index.md").read_text()
    assert [path.name for path in STARTS if f"configs/start/{path.name}" not in text] == []
