"""Checks that no message passes unseen, and that tests/messages.yaml has no entry too many."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.messages import COMMAND, UPDATE_VARIABLE, Messages
from tests.paths import ROOT

pytest_plugins = ["pytester"]
CONFTEST = """
from pathlib import Path
from tests.messages import Messages

def pytest_configure(config):
    config.pluginmanager.register(Messages(Path("messages.yaml")), "messages of the inner tests")
"""
SUITE = """
from tests.messages import check_message, refuses

def test_same(tmp_path):
    with refuses(ValueError, "lr=0"):
        raise ValueError(f"{tmp_path}/a.yaml: lr=0 must be above 0")
    check_message("two\\nlines")

def test_another_message():
    check_message("new words")

def test_another_fact():
    check_message("lr=0", "lr=1")

def test_no_entry():
    check_message("new")

def test_no_entry_for_the_second():
    check_message("first")
    check_message("second")

def test_entry_left_over():
    pass

def test_no_error():
    with refuses(ValueError):
        pass
"""
ENTRIES = {
    "same": ["<tmp>/a.yaml: lr=0 must be above 0", "two\nlines"],
    "another_message": ["old words"],
    "another_fact": ["lr=0"],
    "no_entry_for_the_second": ["first"],
    "entry_left_over": ["old"],
    "no_error": ["old"],
}


@pytest.fixture
def suite(pytester: pytest.Pytester) -> pytest.Pytester:
    """Writes tests whose entries fit, and tests whose entries do not."""
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(test_inner=SUITE)
    Messages(pytester.path / "messages.yaml").write(
        {f"test_inner.py::test_{name}": text for name, text in ENTRIES.items()}
    )
    return pytester


def test_only_the_message_of_the_entry_passes(suite: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(UPDATE_VARIABLE, raising=False)
    result = suite.runpytest_inprocess("-rA", "-p", "no:cacheprovider")
    result.assert_outcomes(passed=1, failed=6)
    result.stdout.fnmatch_lines(["PASSED test_inner.py::test_same"])


def test_an_update_notes_the_messages_of_tests_that_pass(
    suite: pytest.Pytester, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(UPDATE_VARIABLE, str(tmp_path / "notes"))
    suite.runpytest_inprocess("-p", "no:cacheprovider").assert_outcomes(passed=5, failed=2)
    (line,) = (tmp_path / "notes").read_text().splitlines()
    checked = json.loads(line)["checked"]
    assert {test.removeprefix("test_inner.py::test_"): messages for test, messages in checked.items()} == {
        "same": ENTRIES["same"],
        "another_message": ["new words"],
        "no_entry": ["new"],
        "no_entry_for_the_second": ["first", "second"],
        "entry_left_over": [],
    }


def test_every_entry_is_of_a_test_that_exists(request: pytest.FixtureRequest) -> None:
    """Checks parameters of the files that this run collected: all of them where the whole suite runs."""
    messages = request.config.pluginmanager.get_plugin("messages")
    assert isinstance(messages, Messages)
    functions = {test.partition("[")[0] for test in messages.collected}
    gone = []
    for test in messages.entries:
        function = test.partition("[")[0]
        file, _, name = function.partition("::")
        exists = (ROOT / file).is_file() and f"def {name}(" in (ROOT / file).read_text()
        if not exists or (function in functions and test not in messages.collected):
            gone.append(test)
    assert gone == [], f"run `{COMMAND}`"
