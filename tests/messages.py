"""The messages that tests expect, all in tests/messages.yaml, so that a better sentence costs one command.

A test names the class of the error and the facts that its message has to give; the file has the sentence:

    with refuses(DataError, "corpus.idx"):
        read(folder)

`make update-messages` runs the tests that expect messages and writes the file anew: its diff shows what users will read
from now on. `make update-messages TESTS=tests/data` runs those of one folder. A message without an entry, another
message than in the entry, and an entry that its test does not use up are failures.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TypeVar

import pytest
import yaml

from tests.paths import ROOT

FILE = ROOT / "tests" / "messages.yaml"
COMMAND = "make update-messages"
UPDATE_VARIABLE = "MTRAIN_MESSAGES"
"""Environment variable with the file to which tests append their messages; only this program sets it."""

E = TypeVar("E", bound=BaseException)


@contextmanager
def refuses(kind: type[E], *facts: str) -> Iterator[pytest.ExceptionInfo[E]]:
    """Expects an error with the message that the file has for the running test.

    Args:
        kind: Class of the error.
        facts: What the message has to contain however it is worded, such as the key or the file at fault.
    """
    with pytest.raises(kind) as caught:
        yield caught
    check_message(str(caught.value), *facts)


def check_message(text: str, *facts: str) -> None:
    """Compares a text with the next message that the file has for the running test.

    Args:
        text: What the user reads.
        facts: What it has to contain however it is worded.
    """
    assert _running is not None, "messages are checked in the process of the test; on a rank use pytest.raises"
    missing = [fact for fact in facts if fact not in text]
    assert not missing, f"{missing} not in the message: {text}"
    text = _portable(text, _running.item)
    if UPDATE_VARIABLE not in os.environ:
        assert len(_running.checked) < len(_running.expected), f"no entry for this message, run `{COMMAND}`: {text}"
        assert text == _running.expected[len(_running.checked)], f"another message; if it is meant, run `{COMMAND}`"
    _running.checked.append(text)


_OF_A_RUN = re.compile(
    r"(?<=-)[0-9a-f]{8}\b|(?<=[-[ ])(?=\d*[a-f])[0-9a-f]{16}\b|(?<=\bbackend-)[0-9a-f]{16}\b"
    r"|\b[0-9a-f]{32}(?:[0-9a-f]{32})?\b|(?<=/)tmp[a-z0-9_]{8}\b|\b0x[0-9a-f]{12}\b"
    r"|(?<=\bprocess )\d+ on [\w.-]+|(?<=at byte )\d+"
)
"""Random names, digests, addresses of objects, processes and places in pickles, which differ with the run or torch."""
_OF_PYDANTIC = re.compile(r" \[type=.*\](\n +For further information visit .*)?")
"""What pydantic adds to the message of a rule."""


def _portable(text: str, item: pytest.Function) -> str:
    """Replaces what differs between runs, machines and versions of libraries."""
    text = _OF_PYDANTIC.sub("", _OF_A_RUN.sub("<id>", text))
    if isinstance(factory := item.funcargs.get("tmp_path_factory"), pytest.TempPathFactory):
        text = re.sub(re.escape(str(factory.getbasetemp())) + r"/[\w-]+", "<tmp>", text)
    return text.replace(os.environ["XDG_CACHE_HOME"], "<cache>").replace(str(ROOT), "<project>")


@dataclass
class _Test:
    """The test that runs."""

    item: pytest.Function
    expected: list[str]
    checked: list[str] = field(default_factory=list)


_running: _Test | None = None


class Messages:
    """Plugin that tells `check_message` which test runs, and holds each test to all messages of its entry."""

    def __init__(self, file: Path = FILE) -> None:
        self.file = file
        self.collected: set[str] = set()
        """Tests of the chosen files, those that -k and -m leave out as well."""
        self.checked: dict[str, list[str]] = {}
        """Messages of each test that has passed during an update."""

    @cached_property
    def entries(self) -> dict[str, list[str]]:
        """Messages of each test by its node id."""
        return {
            f"{file}::{test}": messages if isinstance(messages, list) else [messages]
            for file, tests in yaml.load(self.file.read_text(), yaml.CSafeLoader).items()
            for test, messages in tests.items()
        }

    def write(self, entries: Mapping[str, list[str]]) -> None:
        """Writes the file, sorted; messages stand there as users read them."""
        files: dict[str, dict[str, str | list[str]]] = {}
        for node_id, messages in entries.items():
            file, _, test = node_id.partition("::")
            texts = [_Text(message) for message in messages]
            files.setdefault(file, {})[test] = texts[0] if len(texts) == 1 else list[str](texts)
        heading = f"# What users read, by test. `{COMMAND}` writes this file (tests/messages.py): read the diff.\n"
        self.file.write_text(heading + yaml.dump(files, Dumper=_Dumper, width=sys.maxsize, allow_unicode=True))

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Notes the tests before -k and -m leave some out; an update runs those alone that expect messages."""
        self.collected.update(item.nodeid for item in items)
        if UPDATE_VARIABLE in os.environ:
            items[:] = [item for item in items if item.nodeid in self.entries or _expects_messages(item)]

    @pytest.hookimpl(wrapper=True)
    def pytest_pyfunc_call(self, pyfuncitem: pytest.Function) -> Generator[None, object, object]:
        """Runs a test; one that passes has used up its entry."""
        global _running
        outer, _running = _running, _Test(pyfuncitem, self.entries.get(pyfuncitem.nodeid, []))
        try:
            result = yield
        finally:
            test, _running = _running, outer
        if UPDATE_VARIABLE in os.environ:
            self.checked[pyfuncitem.nodeid] = test.checked
        else:
            assert test.checked == test.expected, f"not all messages of the entry were seen; run `{COMMAND}`"
        return result

    def pytest_sessionfinish(self) -> None:
        """Writes what the tests of this process have checked; a test itself may lack the disk for it."""
        if file := os.environ.get(UPDATE_VARIABLE):
            with Path(file).open("a") as lines:
                lines.write(json.dumps({"collected": sorted(self.collected), "checked": self.checked}) + "\n")


def _expects_messages(item: pytest.Item) -> bool:
    names = item.function.__code__.co_names if isinstance(item, pytest.Function) else ()
    return refuses.__name__ in names or check_message.__name__ in names


class _Text(str):
    """A message, which YAML writes without quotes."""


class _Dumper(yaml.SafeDumper):
    """Writes messages as they are."""


_Dumper.add_representer(_Text, lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|"))


def main(chosen: list[str]) -> int:
    """Runs the chosen tests, or those of the chosen files or folders that expect messages, and writes their messages.

    A test that fails, or that this machine cannot run, keeps its entry; one that is gone loses it.
    """
    places = "|".join(re.escape(each.rstrip("/")) for each in chosen or ["tests"])
    within = re.compile(rf"(?:{places})(?:/|::|\[|$)")
    using = [
        file
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        if within.match(file := str(path.relative_to(ROOT))) and "from tests.messages import" in path.read_text()
    ]
    using += [each for each in chosen if "::" in each]
    with tempfile.TemporaryDirectory() as folder:
        notes = Path(folder, "notes.jsonl")
        workers = [] if chosen else ["-n", "2", "--dist", "worksteal"]
        command = [sys.executable, "-m", "pytest", "-m", "not nightly and not slurm", *workers, *using]
        code = subprocess.run(command, cwd=ROOT, env={**os.environ, UPDATE_VARIABLE: str(notes)}).returncode
        rows = [json.loads(line) for line in notes.read_text().splitlines()]
    collected = {test for row in rows for test in row["collected"]}
    checked = {test: entry for row in rows for test, entry in row["checked"].items()}
    messages = Messages()
    kept = {test: entry for test, entry in messages.entries.items() if test in collected or not within.match(test)}
    messages.write({test: entry for test, entry in {**kept, **checked}.items() if entry})
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
