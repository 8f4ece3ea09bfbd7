"""Checks of the commit-msg hook: which messages it accepts, and that the set-up installs it into a clone."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.paths import ROOT

SUBJECT = "Divide router losses by tokens of text, not by positions"
BODY = "Padding was counted. test_padding_is_not_counted failed before by 31 %."


@pytest.mark.parametrize(
    "message",
    [
        f"{SUBJECT}\n\n{BODY}\n",
        f"{'x' * 72}\n\n{BODY}\n",
        f"\n{SUBJECT}\n\n{BODY}\n\nCo-authored-by: A <a@b.c>\n",
        f"fixup! {SUBJECT}\n",
        f"{SUBJECT}\n\n{BODY}\n# ------------------------ >8 ------------------------\ndiff --git a/x b/x\n",
    ],
)
def test_a_message_in_form_is_taken(message: str, tmp_path: Path) -> None:
    assert check(message, tmp_path) == (0, "")


@pytest.mark.parametrize(
    ("message", "fault"),
    [
        ("", "the commit message is empty"),
        ("# a comment of git's\n", "the commit message is empty"),
        (f"{'x' * 73}\n\n{BODY}\n", "the subject has 73 characters and at most 72 are allowed"),
        (f"{SUBJECT}\n", "the message has no body"),
        (f"{SUBJECT}\n\n# comments say nothing\n\n", "the message has no body"),
        (f"{SUBJECT}\n\nSigned-off-by: A <a@b.c>\n", "the message has no body"),
        (f"{SUBJECT}\n# ------------------------ >8 ------------------------\nthe diff\n", "the message has no body"),
        (f"{SUBJECT}\n{BODY}\n", "the second line belongs to no paragraph"),
    ],
)
def test_another_is_refused_with_the_reason(message: str, fault: str, tmp_path: Path) -> None:
    code, text = check(message, tmp_path)
    assert code == 1
    assert fault in text
    assert text.count("\n") == 1


def check(message: str, folder: Path) -> tuple[int, str]:
    """Runs the hook on a message; returns its exit code and what it wrote."""
    file = folder / "COMMIT_EDITMSG"
    file.write_text(message)
    result = subprocess.run([ROOT / "tests" / "commit_message.sh", file], capture_output=True, text=True)
    return result.returncode, result.stdout + result.stderr


@pytest.mark.parametrize("own", [False, True], ids=["none", "own"])
def test_the_setup_installs_it_where_there_is_no_other(own: bool, tmp_path: Path) -> None:
    clone = tmp_path / "clone"
    (clone / "tests").mkdir(parents=True)
    subprocess.run(["git", "init", "-q", clone], check=True)
    shutil.copy(ROOT / "tests" / "commit_message.sh", clone / "tests")
    hook = clone / ".git" / "hooks" / "commit-msg"
    if own:
        hook.write_text("#!/bin/sh\nexit 0\n")
        hook.chmod(0o755)
    # the function alone: the rest of the set-up makes an environment
    script = f"set -euo pipefail; source <(sed -n '/^install_commit_hook()/,/^}}/p' {ROOT}/launch/setup.sh)"
    subprocess.run(["bash", "-c", f"{script}; install_commit_hook; install_commit_hook"], cwd=clone, check=True)
    person = {f"GIT_{who}_{what}": "a@b.c" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    commit = ["git", "commit", "-q", "--allow-empty", "-m", SUBJECT]
    refused = subprocess.run(commit, cwd=clone, env=os.environ | person, capture_output=True, text=True)
    assert (refused.returncode == 0) == own
    assert ("the message has no body" in refused.stderr) != own
