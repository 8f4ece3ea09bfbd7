"""Pages that messages name: files of a checkout, or addresses of a site."""

import re

import pytest

from mtrain.base.errors import SITE, ConfigError, MtrainError, with_addresses
from tests.cli.command_line import call
from tests.paths import CONFIGS, ROOT

PAGES = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md"))
NAMED = sorted(
    {name for path in (ROOT / "mtrain").rglob("*.py") for name in re.findall(r"docs/[\w/-]+\.md", path.read_text())}
)


def test_a_message_names_pages_that_exist() -> None:
    assert len(NAMED) > 10
    assert [name for name in NAMED if name not in PAGES] == []


@pytest.mark.parametrize(
    "site", ["https://docs.example.org/mtrain", "https://docs.example.org/mtrain/", "file:///docs"]
)
def test_pages_become_addresses_of_the_site(site: str, monkeypatch: pytest.MonkeyPatch) -> None:
    error: MtrainError = ConfigError("; ".join(f"see {page}, or ({page}#part) for more" for page in PAGES))
    plain = str(error)
    monkeypatch.setenv(SITE, site)
    names = [page.removeprefix("docs/").removesuffix(".md") for page in PAGES]
    base = site.rstrip("/")
    assert str(error) == "; ".join(f"see {base}/{name}.html, or ({base}/{name}.html#part) for more" for name in names)
    assert with_addresses(str(error)) == str(error)
    monkeypatch.delenv(SITE)
    assert str(error) == plain


def test_a_fact_of_a_check_names_the_address(monkeypatch: pytest.MonkeyPatch) -> None:
    files = [CONFIGS / name for name in ("model/llama3_8b.yaml", "layout/tp2sp.yaml", "run/pretrain.yaml")]
    check = ("check", *files, "run.dir=runs/x", "--world-size=16", "--gpu=h100", "--without-files")
    assert "predicted (docs/machines/planning.md)" in call(*check)[1]
    monkeypatch.setenv(SITE, "https://docs.example.org")
    assert "predicted (https://docs.example.org/machines/planning.html)" in call(*check)[1]
