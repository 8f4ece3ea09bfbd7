"""Lines of the library go through `logging`; the command line shows them on the standard streams."""

import logging
import subprocess
import sys
from pathlib import Path

import pytest

from mtrain.base.log import show_lines
from tests.paths import ROOT

PROGRAM = """
import logging, sys
from pathlib import Path
from mtrain.report.metrics.jsonl import rewind
{set_up}
Path(sys.argv[1]).write_text("")
rewind(Path(sys.argv[1]), 3)
logging.getLogger("mtrain.runs").info("loaded")
"""
WARNING = "warning: {path} lacks 3 of the 3 steps before this start\n"


@pytest.mark.parametrize(
    ("set_up", "output", "errors"),
    [
        ("", "", WARNING),
        ("logging.getLogger('mtrain').setLevel(logging.CRITICAL)", "", ""),
        ("logging.basicConfig(level=logging.INFO, stream=sys.stdout, format='%(message)s')", WARNING + "loaded\n", ""),
        ("from mtrain.base.log import show_lines; show_lines(); show_lines()", "loaded\n", WARNING),
        (
            "from mtrain.base.log import show_lines; show_lines(); logging.basicConfig(level=logging.INFO)",
            "loaded\n",
            WARNING,
        ),
    ],
    ids=["nothing set", "silenced", "redirected", "command line", "command line, and a library that logs"],
)
def test_a_host_program_decides_what_is_shown(set_up: str, output: str, errors: str, tmp_path: Path) -> None:
    path = f"{tmp_path}/metrics.jsonl"
    program = [sys.executable, "-c", PROGRAM.format(set_up=set_up), path]
    result = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, check=True)
    assert (result.stdout, result.stderr) == (output.format(path=path), errors.format(path=path))


def test_a_line_reaches_the_streams_of_its_moment(capsys: pytest.CaptureFixture[str]) -> None:
    show_lines()
    log = logging.getLogger("mtrain.tests")
    log.info("100% saved")
    log.warning("warning: %d left", 3)
    log.debug("not shown")
    assert capsys.readouterr() == ("100% saved\n", "warning: 3 left\n")


def test_what_a_stream_raises_reaches_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    class Closed:
        def write(self, text: str) -> None:
            raise BrokenPipeError

    show_lines()
    monkeypatch.setattr(sys, "stdout", Closed())
    with pytest.raises(BrokenPipeError):
        logging.getLogger("mtrain.tests").info("nobody reads it")
