"""The Python that launch/setup.sh takes for a new environment: the newest one that it can serve, and it says why."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.paths import ROOT

FUNCTIONS = "sed -n '/^cpu_torch=/p; /^python_facts()/,/^version_of_torch()/p' launch/setup.sh | sed '$d'"
CPU_TORCH = next(
    line.removeprefix("cpu_torch=").strip()
    for line in (ROOT / "launch" / "setup.sh").read_text().splitlines()
    if line.startswith("cpu_torch=")
)


def put_python(path: Path, version: str, torch: str = "-", offered: str = "2.15.0, 2.14.1, 2.13.0") -> Path:
    """Writes what looks like an interpreter.

    Args:
        path: File of the interpreter.
        version: Version that it says.
        torch: Version of the torch that it has.
        offered: Versions of torch that pip offers to it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    minor = int(version.split(".")[1])
    path.write_text(
        f"""#!{shutil.which("bash")}
case "$1 $2" in
-c*urllib*) exit 1 ;;
-c*) {f"echo {minor if minor <= 13 else 0} {version} {torch} {path}" if minor >= 11 else "exit 1"} ;;
-m*) echo "Available versions: {offered}" ;;
esac
"""
    )
    path.chmod(0o755)
    return path


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """Makes a machine without any Python: a folder of programs, and pyenv's empty one beside it."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "sort").symlink_to(str(shutil.which("sort")))
    return tmp_path


def chosen(machine: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Asks setup.sh which Python it takes."""
    script = f'set -euo pipefail; source <({FUNCTIONS}); PATH={machine}/bin; index=""; find_python'
    environment = {"PATH": os.environ["PATH"], "HOME": str(machine), "PYENV_ROOT": str(machine / "pyenv")} | variables
    return subprocess.run(
        ["bash", "-c", script], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )


def put_usual(machine: Path, **of_311: str) -> None:
    """Puts Python 3.11 on PATH, and 3.10, 3.12 and 3.13 into pyenv's folder."""
    put_python(machine / "bin" / "python3", "3.11.7", **of_311)
    for version in ("3.10.13", "3.12.1", "3.13.0"):
        put_python(machine / "pyenv" / "versions" / version / "bin" / "python3", version)


def test_the_newest_one_is_taken_from_pyenv_too(machine: Path) -> None:
    put_usual(machine)
    place = machine / "pyenv" / "versions" / "3.13.0" / "bin" / "python3"
    text = f"Python 3.13.0 ({place}), the newest one here; MTRAIN_PYTHON can name another one\n"
    assert chosen(machine).stdout == text


def test_without_a_gpu_a_python_that_has_torch_for_cpus_goes_before_a_newer_one(machine: Path) -> None:
    put_usual(machine, offered=f"2.14.1, {CPU_TORCH}+cpu, {CPU_TORCH}")
    text = f"the newest one that has a wheel of torch {CPU_TORCH} for CPUs, since there is no GPU"
    assert chosen(machine).stdout.startswith(f"Python 3.11.7 ({machine}/bin/python3), {text}")
    (machine / "bin" / "nvidia-smi").symlink_to(str(shutil.which("true")))
    assert chosen(machine).stdout.startswith("Python 3.13.0")


def test_a_torch_that_is_there_keeps_its_python(machine: Path) -> None:
    put_usual(machine, torch="2.12.0a0+1.nv26.06")
    text = f"Python 3.11.7 ({machine}/bin/python3), whose torch 2.12.0a0+1.nv26.06 stays"
    assert chosen(machine).stdout.startswith(text)


def test_a_python_can_be_named(machine: Path) -> None:
    put_usual(machine, torch="2.12.0")
    own = put_python(machine / "own" / "python", "3.12.4")
    assert chosen(machine, MTRAIN_PYTHON=str(own)).stdout == f"Python 3.12.4 ({own}), named by MTRAIN_PYTHON\n"


def test_the_newest_one_can_be_asked_for_whatever_torch_it_brings(machine: Path) -> None:
    put_usual(machine, torch="2.12.0", offered=f"{CPU_TORCH}+cpu")
    assert chosen(machine, MTRAIN_PYTHON="newest").stdout.startswith("Python 3.13.0")


def test_a_python_that_megatron_core_has_no_wheel_for_comes_last(machine: Path) -> None:
    put_python(machine / "bin" / "python3.14", "3.14.0")
    assert chosen(machine).stdout.startswith("Python 3.14.0")
    put_python(machine / "bin" / "python3.12", "3.12.1")
    assert chosen(machine).stdout.startswith("Python 3.12.1")


def test_without_a_python_that_can_be_used_it_says_what_is_needed(machine: Path) -> None:
    put_python(machine / "bin" / "python3", "3.10.13")
    done = chosen(machine)
    assert (done.returncode, done.stdout) == (7, "")
    assert done.stderr.startswith("error: no Python 3.11 or newer with the modules venv and ensurepip is on PATH")
    done = chosen(machine, MTRAIN_PYTHON="python3")
    assert (done.returncode, done.stdout) == (7, "")
    assert done.stderr.startswith("error: MTRAIN_PYTHON=python3 is no Python 3.11 or newer")


def test_facts_of_a_real_interpreter(machine: Path) -> None:
    (machine / "bin" / "python3").write_text(f'#!{shutil.which("bash")}\nexec {sys.executable} "$@"\n')
    (machine / "bin" / "python3").chmod(0o755)
    version = sys.version.split()[0]
    assert chosen(machine).stdout.startswith(f"Python {version} ({sys.executable}), whose torch ")
