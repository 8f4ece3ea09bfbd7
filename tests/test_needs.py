"""Tests of a machine that lacks something: it runs the rest of the suite, which ends with the tests it did not run."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from tests.browser import browser
from tests.needs import leave_out
from tests.paths import ROOT

FILES = (
    "tests/launch/test_browser_script.py",
    "tests/verify/report/test_page.py",
    "tests/training/faults/test_full_disks.py",
)
BROWSER = "tests/verify/report/test_page.py::test_the_pictures_are_painted"
MOUNT = "tests/training/faults/test_full_disks.py::"


def suite(*options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs a few tests where PATH has no program."""
    ours = ("MTRAIN_BROWSER", "MTRAIN_REQUIRE_ALL_TESTS")
    clean = {name: value for name, value in os.environ.items() if name not in ours and not name.startswith("PYTEST_")}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *options]
    return subprocess.run(
        command, cwd=ROOT, env={**clean, "PATH": "", **environment}, capture_output=True, text=True, check=False
    )


# with workers, which pass on what they left out, at night: the suite itself runs with them
@pytest.mark.parametrize("workers", [(), pytest.param(("-n", "1"), marks=pytest.mark.nightly)], ids=["alone", "xdist"])
@pytest.mark.nightly  # a suite within the suite; by day what it leaves out, below
def test_what_a_machine_cannot_run_is_named_at_the_end(workers: tuple[str, ...]) -> None:
    done = suite(*workers, *FILES, "-k", "test_where_no_test_may or pictures_are_painted or leave_good_checkpoints")
    assert done.returncode == 0, done.stdout
    end = done.stdout[done.stdout.index("not run: ") :]
    assert "This machine lacks a chromium on PATH or in MTRAIN_BROWSER" in end
    assert f"  {BROWSER}\n" in end
    assert "This machine lacks the right to mount" in end
    assert f"  {MOUNT}test_a_full_disk_and_one_that_cannot_be_written_leave_good_checkpoints\n" in end
    assert "1 passed" in end
    assert "launch/test_browser_script" not in end
    assert "test_the_legend" not in end, "what -k leaves out is not missing"


class Wanting(NamedTuple):
    """What is read of a test."""

    nodeid: str
    fixturenames: tuple[str, ...]


@pytest.mark.parametrize(("required", "left"), [("1", 2), ("", 1)])
def test_where_none_may_be_left_out_none_is_and_its_fixture_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, required: str, left: int
) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("MTRAIN_REQUIRE_ALL_TESTS", required)
    monkeypatch.delenv("MTRAIN_BROWSER", raising=False)
    deselected: list[Any] = []
    hook = SimpleNamespace(pytest_deselected=lambda items: deselected.extend(items))
    config: Any = SimpleNamespace(stash=pytest.Stash(), hook=hook)
    tests: Any = [Wanting(BROWSER, ("chromium",)), Wanting("another", ("tmp_path",))]
    leave_out(config, tests)
    assert len(tests) == left
    assert [each.nodeid for each in deselected] == [BROWSER] * (2 - left)
    with (
        pytest.raises(AssertionError, match=r"no chromium is on PATH; install one \(launch/browser"),
        browser(tmp_path),
    ):
        pass


@pytest.mark.nightly  # the same without another session: the test above
def test_where_none_may_be_left_out_they_fail() -> None:
    done = suite(FILES[1], "-k", "pictures_are_painted", MTRAIN_REQUIRE_ALL_TESTS="1")
    assert done.returncode == 1
    assert "no chromium is on PATH; install one (launch/browser.sh) or name it in MTRAIN_BROWSER" in done.stdout
    assert "not run: " not in done.stdout


def test_ci_lets_none_be_left_out() -> None:
    assert "\nexport MTRAIN_REQUIRE_ALL_TESTS=1\n" in (ROOT / ".ci/run").read_text()
