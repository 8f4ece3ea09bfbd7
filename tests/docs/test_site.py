"""The documentation in a real browser: it needs no network, its search finds things, nothing is cut."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.browser import Browser
from tests.paths import ROOT

pytestmark = (
    pytest.mark.nightly
)  # by day `make check` builds the site and follows its links, other tests read its pages
SHOWN = (
    "index",
    "start/install",
    "start/finetune",
    "reference/configuration",
    "reference/cli",
    "proof/faults",
    "recipes/index",
    "training/images",
    "training/lora",
)
"""Pages that are looked at: prose, code, wide tables."""
SOUGHT = {
    "flash attention": "how-do-i",
    "gradient accumulation": "how-do-i",
    "epochs": "how-do-i",
    "wandb": "how-do-i",
    "qlora": "training/lora",
    "early stopping": "how-do-i",
    "multi-node": "machines/slurm",
    "out of memory": "how-do-i",
    "oom": "how-do-i",
    "train.num_steps": "configuration",
}
"""Words that people look for -> page that has to be among the answers."""
TOO_WIDE = """
[...document.querySelectorAll('.md-content h1, .md-content h3')]
  .filter(each => each.scrollWidth > each.clientWidth + 1).map(each => each.textContent.slice(0, 60))
"""
BROKEN = """
[...document.querySelectorAll('.md-content code')].filter(code => !code.closest('.language-text')).flatMap(code => {
  const found = [], range = document.createRange(), nodes = document.createTreeWalker(code, NodeFilter.SHOW_TEXT);
  for (let node; node = nodes.nextNode();) for (const word of node.data.matchAll(/\\S+/g)) {
    range.setStart(node, word.index), range.setEnd(node, word.index + word[0].length);
    const parts = [...range.getClientRects()], tops = parts.map(each => each.top);
    const room = code.closest('table') ? Infinity : code.closest('p, li, pre, h2, h3, h4').clientWidth;
    const isLonger = parts.reduce((sum, each) => sum + each.width, 0) > room - 10;
    if (Math.max(...tops) - Math.min(...tops) > 5 && !isLonger) found.push(word[0]);
  }
  return found })
"""
"""Words of code that are on two lines and would fit on one, in blocks and in texts."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Builds the site once."""
    folder = tmp_path_factory.mktemp("site")
    line = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(line, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return folder


def answers(chromium: Browser, page: Path, words: str) -> str:
    """Types into the search box of a page; returns the addresses of what it finds."""
    chromium.open(page)
    box = "document.querySelector('.md-search__input')"
    assert chromium.evaluate(f"{box}.getBoundingClientRect().width > 100"), "the search box is not visible"
    chromium.evaluate(f"{box}.focus(), {box}.value = '{words}', {box}.dispatchEvent(new Event('input')), 1")
    found = "[...document.querySelectorAll('.md-search-result__link')].map(each => each.href).join(' ')"
    deadline = time.monotonic() + 300  # the index is read by the first search
    while not (links := str(chromium.evaluate(found))):
        assert time.monotonic() < deadline, f"nothing is found for {words}"
        time.sleep(0.1)
    return links


def test_pages_open_from_files_on_a_desk_and_a_phone(site: Path, chromium: Browser) -> None:
    for name in SHOWN:
        for width in (1280, 390):
            visit = chromium.open(site / f"{name}.html", width)
            assert visit.complaints == []
            assert [url for url in visit.requests if not url.startswith(("file:", "data:", "blob:"))] == []
            assert chromium.evaluate(TOO_WIDE) == [], (name, width)
            assert chromium.evaluate(BROKEN) == [], (name, width)
            assert chromium.evaluate("document.documentElement.scrollWidth") <= width, (name, width)


@pytest.mark.waits
@pytest.mark.parametrize("words", SOUGHT)
def test_the_search_finds(site: Path, chromium: Browser, words: str) -> None:
    assert f"/{SOUGHT[words]}.html" in answers(chromium, site / "index.html", words)


def test_how_tos_come_before_decisions(site: Path) -> None:
    index = json.loads((site / "search" / "search_index.json").read_text())
    boosts = {each["location"].partition("#")[0]: each.get("boost", 1.0) for each in index["docs"]}
    decisions = {name: boost for name, boost in boosts.items() if name.startswith("adr/")}
    assert len(decisions) > 60
    assert max(decisions.values()) < min(boost for name, boost in boosts.items() if name not in decisions)
