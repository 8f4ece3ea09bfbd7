"""Configurations to start from run on the GPUs that they name, and our own recipes are complete."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.cli.command_line import call, parsed
from tests.paths import CONFIGS, ROOT

PAGES = sorted((ROOT / "docs" / "recipes").glob("*.md"))
RECIPES = [page for page in PAGES if page.name != "index.md"]
INDEX = (ROOT / "docs" / "recipes" / "index.md").read_text()
STARTS = sorted((CONFIGS / "start").glob("*.yaml"))


@pytest.mark.parametrize("path", STARTS, ids=lambda path: path.stem)
def test_a_start_fits_the_gpus_that_it_names(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    text = path.read_text()
    command = re.search(r"mtrain launch slurm (.*) --nodes (\d+) --gpus-per-node (\d+)$", text, re.MULTILINE)
    assert command is not None
    assert text.startswith(f"# GPUs: {int(command[2]) * int(command[3])} x H100 80 GB\n")
    assert str(path.relative_to(ROOT)) in command[1].split()
    for folder, line in re.findall(r"initialize_from: (\S+)(?: +# mtrain (.*))?$", text, re.MULTILINE):
        found = parsed(line)
        assert (str(found["folder"]).startswith("models/"), str(found["target"])) == (True, folder)
    variants = re.findall(r"^#   \.\.\. ((?:\S+=\S+ )+)", text, re.MULTILINE)
    memory, hours = list[float](), list[float]()
    for overrides in (variant.split() for variant in variants or [""]):
        words = [*command[1].split(), *overrides, "--gpu", "h100", "--without-files"]
        code, said = call("check", *words)
        assert (code, "GPU memory" in said) == (0, True), said
        memory += map(float, re.findall(r"heaviest rank needs ([\d.]+) of", said))
        (tokens,) = re.findall(r"^tokens per step +(?:at most )?([\d,]+)$", said, re.MULTILINE)
        (seconds,) = re.findall(r" steps of ([\d.]+) s", said)
        hours.append(float(seconds) / 3600 * 1e9 / int(tokens.replace(",", "")))
    (row,) = re.findall(rf"^\| `configs/model/\S+ configs/start/{path.name}` .*$", INDEX, re.MULTILINE)
    *_, tokens, memory_shown, hours_shown, _ = (cell.strip() for cell in row.split("|"))
    assert memory_shown == f"{_span(memory, '.0f')} GiB"
    assert hours_shown == _span(hours, ".2g")


def _span(values: list[float], digits: str) -> str:
    """Writes the smallest and the largest value, or one of them if they look the same."""
    return " to ".join(dict.fromkeys(format(value, digits) for value in (min(values), max(values))))


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
    assert [path.name for path in STARTS if f"configs/start/{path.name}" not in INDEX] == []
