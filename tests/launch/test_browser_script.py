"""launch/browser.sh: quiet where there is a browser, one clear message where there is none."""

import os
import subprocess
from pathlib import Path

from tests.paths import ROOT

SCRIPT = ROOT / "launch" / "browser.sh"


def run(**environment: str) -> subprocess.CompletedProcess[str]:
    ours = ("MTRAIN_BROWSER", "MTRAIN_REQUIRE_ALL_TESTS")
    clean = {name: value for name, value in os.environ.items() if name not in ours}
    return subprocess.run(
        ["/bin/bash", SCRIPT], env=clean | environment, capture_output=True, text=True, timeout=600, check=False
    )


def program(folder: Path, name: str, text: str = "exit 0") -> None:
    (folder / name).write_text(f"#!/bin/bash\n{text}\n")
    (folder / name).chmod(0o755)


def test_a_browser_on_path_is_enough(tmp_path: Path) -> None:
    program(tmp_path, "google-chrome")
    done = run(PATH=str(tmp_path))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_named_browser_is_taken_or_refused(tmp_path: Path) -> None:
    program(tmp_path, "mine")
    assert run(PATH=str(tmp_path), MTRAIN_BROWSER=str(tmp_path / "mine")).returncode == 0
    done = run(MTRAIN_BROWSER=str(tmp_path / "none"))
    assert done.returncode == 7
    assert "is no program; name a chromium or unset it" in done.stderr


def test_an_ordinary_user_without_a_browser_is_shown_what_to_do_and_goes_on(tmp_path: Path) -> None:
    program(tmp_path, "id", "echo 1000")
    done = run(PATH=str(tmp_path))
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr.startswith("note: no chromium is on PATH and none could be installed here; install one")
    assert done.stderr.count("\n") == 1


def test_where_no_test_may_be_left_out_a_missing_browser_is_an_error(tmp_path: Path) -> None:
    program(tmp_path, "id", "echo 1000")
    done = run(PATH=str(tmp_path), MTRAIN_REQUIRE_ALL_TESTS="1")
    assert done.returncode == 7
    assert done.stderr.startswith("error: no chromium is on PATH")


def test_root_installs_it_and_hears_why_where_that_fails(tmp_path: Path) -> None:
    for name in ("mktemp", "tail", "rm", "cat"):
        (tmp_path / name).symlink_to(f"/usr/bin/{name}")
    program(tmp_path, "id", "echo 0")
    program(tmp_path, "apt-get", "echo no network >&2; exit 100")
    done = run(PATH=str(tmp_path), MTRAIN_REQUIRE_ALL_TESTS="1")
    assert done.returncode == 7
    assert done.stderr.startswith("no network\nerror: no chromium is on PATH")
    installs = (
        f"[[ $1 == update ]] || printf '#!/bin/bash\\n' > {tmp_path}/chromium; {tmp_path}/mode {tmp_path}/chromium"
    )
    program(tmp_path, "apt-get", installs)
    program(tmp_path, "mode", '[[ ! -e $1 ]] || /bin/chmod 755 "$1"')
    assert run(PATH=str(tmp_path)).returncode == 0
