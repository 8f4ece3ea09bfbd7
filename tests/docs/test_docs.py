"""Statements of the documentation about the repository are true. Links inside the site are checked by `make docs`."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

import mtrain
from mtrain.cli.arguments import loaded_config
from mtrain.config import renamed
from tests.docs.pictures import FOLDER, PICTURES, packages, write
from tests.paths import ROOT
from tests.test_architecture import PACKAGES

ADRS = sorted((ROOT / "docs" / "adr").glob("0*.md"))
AT_ROOT = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")]
WITH_A_TEST_OF_ITS_OWN = ROOT / "docs" / "proof" / "faults.md"
"""Page that names tests by their path from their folder on."""
PAGES = [*AT_ROOT, *sorted({*(ROOT / "docs").glob("**/*.md")} - {WITH_A_TEST_OF_ITS_OWN})]
PATH = re.compile(
    r"(?<![\w/.<-])(?:mtrain|tests|tools|launch|configs|docs|examples)(?:/[\w.-]+)+\.(?:py|md|sh|sbatch|yaml|json|svg|png|txt)\b"
)
"""Pattern of a file of this repository in a text."""
LINK = re.compile(r"\]\((?!https?:|#|mailto:)([^)#]+)(?:#[^)]*)?\)")


def test_decisions_are_numbered_and_listed() -> None:
    assert [int(path.name[:4]) for path in ADRS] == list(range(1, len(ADRS) + 1))
    rows = re.findall(r"^\| (\d+) \| \[(.+)\]\((.+)\) \|", (ROOT / "docs/adr/index.md").read_text(), re.MULTILINE)
    titles = [path.read_text().partition("\n")[0].removeprefix(f"# {int(path.name[:4])}. ") for path in ADRS]
    # by theme on the page, each once
    assert sorted(rows, key=lambda row: int(row[0])) == [
        (str(n), title, path.name) for n, (title, path) in enumerate(zip(titles, ADRS), start=1)
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_that_a_page_names_are_there(page: Path) -> None:
    assert [name for name in PATH.findall(page.read_text()) if not (ROOT / name).exists()] == []


@pytest.mark.parametrize("page", AT_ROOT, ids=lambda page: page.name)
def test_links_of_pages_outside_the_site_lead_somewhere(page: Path) -> None:
    assert [target for target in LINK.findall(page.read_text()) if not (ROOT / target).exists()] == []


def test_the_fast_tests_are_there() -> None:
    listed = (ROOT / "tests" / "fast.txt").read_text().splitlines()
    assert listed
    assert [line for line in listed if not (ROOT / line.partition("::")[0]).exists()] == []


def test_a_missing_file_and_a_dead_link_would_be_found() -> None:
    assert PATH.findall("see `mtrain/no_such/file.py` and docs/none.md.") == ["mtrain/no_such/file.py", "docs/none.md"]
    assert LINK.findall("[a](docs/a.md#b) [c](https://c.d) [e](#f)") == ["docs/a.md"]


def test_every_section_of_the_configuration_is_on_its_page() -> None:
    sources = [path.read_text() for path in (ROOT / "mtrain" / "config" / "schema").glob("*.py")]
    classes = {name for source in sources for name in re.findall(r"^class (\w+)\(\w+\):", source, re.MULTILINE)}
    sections = {name for name in classes if name.endswith(("Section", "Constants"))} - {"Section"}
    assert len(sections) > 20
    page = (ROOT / "docs" / "api" / "config.md").read_text()
    assert {
        name for name in sections if not re.search(rf"^::: mtrain\.config\..*\.{name}$", page, re.MULTILINE)
    } == set()


def words(picture: Path) -> list[str]:
    """Returns the texts of an SVG, in the order in which they are drawn."""
    return re.findall(r"<text[^>]*>([^<]+)</text>", picture.read_text())


@pytest.mark.parametrize("name", PICTURES)
def test_pictures_say_what_the_code_says(name: str, tmp_path: Path) -> None:
    write(tmp_path)
    assert words(FOLDER / name) == words(tmp_path / name), "write them again: python -m tests.docs.pictures"


def test_the_picture_of_layers_has_every_package() -> None:
    drawn = set(words(FOLDER / "layers.svg"))
    folders = {path.parent.name for path in ROOT.glob("mtrain/*/__init__.py")} - {"loss"}
    assert folders <= drawn
    assert {name for layer in packages(PACKAGES) for name in layer} <= drawn


def test_the_changelog_begins_with_this_version() -> None:
    headings = re.findall(r"^## (\S+)(?: - (\S+))?$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert all(name == "Unreleased" or re.fullmatch(r"\d{4}-\d\d-\d\d", date) for name, date in headings)
    assert next(name for name, _ in headings if name != "Unreleased") == mtrain.__version__


def test_the_page_on_upgrading_has_every_old_name_and_no_other_page_tells_history() -> None:
    page = (ROOT / "docs" / "upgrading.md").read_text()
    values = {f"{key}: {old}" for key, names in renamed.VALUES.items() for old in names}
    assert [name for name in (*renamed.KEYS, *values, *renamed.LOSS_FUNCTIONS) if f"| `{name}` |" not in page] == []
    others = {
        path for path in (ROOT / "docs").rglob("*.md") if path.parent.name != "adr" and path.name != "upgrading.md"
    }
    assert [path.name for path in sorted(others) if re.search(r"\b0\.1\.0\b|version 0\.1\b", path.read_text())] == []


def test_pre_commit_formats_as_the_check_does() -> None:
    """Both use one version of ruff: another minor version formats differently."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (pin,) = [line for line in extras["test"] if line.startswith("ruff")]
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    pins = {hook["id"]: hook["additional_dependencies"] for hook in hooks if hook["language"] == "python"}
    assert pins == {"format": [pin], "lint": [pin]}
    minor = re.fullmatch(r"ruff==(\d+\.\d+)\.\*", pin)
    assert minor is not None, "one minor version"
    installed = subprocess.run([sys.executable, "-m", "ruff", "--version"], capture_output=True, text=True, check=True)
    assert installed.stdout.startswith(f"ruff {minor[1]}.")


COMMAND = re.compile(r"mtrain (?:check|train|launch \w+|verify \w+|serve) ([^`#\n]*)")
KEY_VALUE = re.compile(r"[a-z]+\.\w+=")


def complete_commands(page: Path) -> list[list[str]]:
    """Returns files and values of a page's commands that name shipped configurations and no weights."""
    found = []
    for given in COMMAND.findall(page.read_text().replace("\\\n", " ")):
        words = [each for each in given.split() if each.endswith(".yaml") or "..." in each or KEY_VALUE.match(each)]
        files = [each for each in words if not KEY_VALUE.match(each)]
        is_shipped = files and all(each.startswith("configs/") for each in files)
        if is_shipped and not re.search("model.hf|--hf|quickstart_finetune", given):
            found.append(words)
    return found


def test_commands_of_pages_have_whole_configurations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    commands = [words for page in pages for words in complete_commands(page)]
    assert len(commands) > 25
    for words in commands:
        loaded_config(words)
