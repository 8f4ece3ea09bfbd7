"""The torch and megatron-core of a run: those that an import would take, read without importing them."""

from __future__ import annotations

import importlib
import importlib.machinery
import os
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from mtrain.base import ground
from mtrain.base.environment import program_versions
from mtrain.base.errors import MachineError
from mtrain.base.ground import found_megatron, require_ground
from tests.config.yaml_files import write
from tests.fault_table import Notice
from tests.paths import ROOT

RUNS = "raise SystemExit('imported')"
"""Source of a package that must not be imported."""
SMALL = {
    "model": {"num_layers": 1, "hidden_size": 16, "ffn_hidden_size": 16, "num_attention_heads": 2, "vocab_size": 64}
}
OF_THIS_PYTHON = "0.16.1" if sys.version_info < (3, 12) else "0.19.2"
"""Version of megatron-core that pip brings here."""
Put = Callable[[dict[str, str]], Path]


def package_info(version: str) -> str:
    """Returns the source of package_info.py as megatron-core writes it since 0.19."""
    major, minor, patch = version.split(".", 2)
    digits = patch[: len(patch) - len(patch.lstrip("0123456789"))]
    return (
        f'MAJOR = {major}\nMINOR = {minor}\nPATCH = {digits}\nPRE_RELEASE = "{patch.removeprefix(digits)}"\n'
        f"VERSION = (MAJOR, MINOR, PATCH, PRE_RELEASE)\n{RUNS}\n"
    )


def megatron(version: str) -> dict[str, str]:
    """Returns the files of a megatron-core, which is a part of a namespace."""
    return {"megatron/core/__init__.py": RUNS, "megatron/core/package_info.py": package_info(version)}


def torch(version: str) -> dict[str, str]:
    """Returns the files of a torch."""
    return {"torch/__init__.py": RUNS, "torch/version.py": f"from typing import Optional\n__version__ = '{version}'\n"}


def put_files(folder: Path, files: dict[str, str]) -> Path:
    """Writes files below a folder."""
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def loaded() -> list[str]:
    """Lists the modules of torch and megatron-core that have been imported."""
    return [name for name in sys.modules if name.partition(".")[0] in ("torch", "megatron")]


@pytest.fixture
def put(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Put]:
    """Writes files into a folder that is first on the path; nothing has been imported yet, as at the start of a
    verb."""
    for name in loaded():
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)

    def written(files: dict[str, str]) -> Path:
        put_files(tmp_path, files)
        importlib.invalidate_caches()
        return tmp_path

    yield written
    for name in loaded():  # what the test imported
        del sys.modules[name]


def refusal(is_another_machine: bool = False) -> str:
    """Returns the message of a refusal, which is one line."""
    with pytest.raises(MachineError) as caught:
        require_ground(is_another_machine)
    assert caught.value.exit_code == 7
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_what_is_installed_here_is_proven() -> None:
    require_ground()
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    oldest, too_new = (".".join(map(str, each)) for each in (ground.OLDEST_TORCH, ground.TOO_NEW_TORCH))
    assert wanted[:3] == [
        f"torch>={oldest},<{too_new}",
        f"megatron-core=={ground.MEGATRON_CORES[0]}; python_version < '3.12'",
        f"megatron-core=={ground.MEGATRON_CORES[1]}; python_version >= '3.12'",
    ]


@given(version=st.from_regex(r"[01]\.(1[4-9]|[0-9])\.[0-3](rc[01]|\.dev0)?", fullmatch=True))
@example("0.16.0")
@example("0.16.1")
@example("0.16.1rc0")
@example("0.17.1")
@example("0.18.2")
@example("0.19.1")
@example("0.19.2")
@example("0.19.20")
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=25)
def test_another_megatron_is_refused_by_the_version_that_would_be_imported(put: Put, version: str) -> None:
    folder = put(megatron(version))
    if version in ("0.16.1", "0.19.2"):
        require_ground()
        return
    text = refusal()
    assert f"megatron-core {version} would be imported from {folder / 'megatron' / 'core'}" in text
    assert "tested only with 0.16.1 or 0.19.2" in text
    assert f"pip install megatron-core=={OF_THIS_PYTHON}`" in text
    assert refusal(is_another_machine=True) == text


def test_the_source_decides_and_not_the_name_of_a_distribution(put: Put) -> None:
    put({"megatron_core-0.16.1.dist-info/METADATA": "Name: megatron-core\nVersion: 0.16.1\n", **megatron("0.17.1")})
    assert "megatron-core 0.17.1" in refusal()
    put({"megatron_core-0.18.2.dist-info/METADATA": "Name: megatron-core\nVersion: 0.18.2\n", **megatron("0.19.2")})
    require_ground()


def test_a_wheel_on_the_path_is_read_in_its_archive(put: Put, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = put({}) / "megatron_core-0.18.2.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, text in {"megatron/": "", "megatron/core/": "", **megatron("0.18.2")}.items():
            archive.writestr(name, text)
    monkeypatch.syspath_prepend(wheel)
    assert f"megatron-core 0.18.2 would be imported from {wheel}" in refusal()


def test_an_editable_installation_is_asked_as_an_import_asks_it(put: Put, monkeypatch: pytest.MonkeyPatch) -> None:
    source = put_files(put({}) / "checkout", megatron("0.17.0"))
    finder = importlib.machinery.PathFinder

    class Editable:
        """Finder such as setuptools puts into `sys.meta_path`."""

        @staticmethod
        def find_spec(name: str, path: object = None, target: object = None) -> importlib.machinery.ModuleSpec | None:
            folder = source if name == "megatron" else source / "megatron"
            return finder.find_spec(name, [str(folder)]) if name in ("megatron", "megatron.core") else None

    monkeypatch.setattr(sys, "meta_path", [Editable, *sys.meta_path])
    assert f"megatron-core 0.17.0 would be imported from {source}" in refusal()


def test_a_megatron_that_was_imported_before_is_the_one_that_counts(put: Put) -> None:
    put({"megatron/core/__init__.py": "__version__ = '0.18.0+1234567'", "megatron/core/package_info.py": ""})
    importlib.import_module("megatron.core")
    assert "megatron-core 0.18.0 would be" in refusal()


@pytest.mark.parametrize("version", ground.MEGATRON_CORES)
def test_the_commit_of_the_checkout_around_an_installed_megatron_says_nothing(put: Put, version: str) -> None:
    put({"megatron/core/__init__.py": f"__version__ = '{version}+1234567'", "megatron/core/package_info.py": ""})
    importlib.import_module("megatron.core")
    assert found_megatron() == (str(Path(importlib.import_module("megatron.core").__file__ or "").parent), version)
    require_ground()


@pytest.mark.parametrize(
    "files",
    [
        {"megatron/bridge/__init__.py": RUNS},
        {"megatron/core/__pycache__/x.pyc": ""},
        {"megatron/core/models/a.py": RUNS},
    ],
    ids=["part of the namespace", "left by an uninstallation", "without __init__.py"],
)
def test_folders_of_the_same_name_without_megatron_core_hide_nothing(put: Put, files: dict[str, str]) -> None:
    installed = found_megatron()
    put(files)
    assert found_megatron() == installed
    require_ground()


def test_what_is_missing_is_named_and_may_be_missing_for_another_machine(
    put: Put, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = put({})
    monkeypatch.setattr(sys, "path", [str(folder)])
    assert refusal() == (
        "torch is not installed, but torch>=2.9,<2.16 is needed; install it; megatron-core is not installed, but "
        f"0.16.1 or 0.19.2 is needed; install it with `pip install megatron-core=={OF_THIS_PYTHON}`"
    )
    require_ground(is_another_machine=True)
    put({"megatron/__init__.py": RUNS, **torch("2.13.0")})
    assert f"megatron-core is not installed ({folder}/megatron/__init__.py comes first and has no core)" in refusal()


@pytest.mark.parametrize("source", ["", "MAJOR, MINOR = 0, 16", "def (", "MAJOR = MINOR = PATCH = read()"])
def test_a_megatron_that_does_not_say_its_version_is_not_proven(put: Put, source: str) -> None:
    put({**megatron("0.16.1"), "megatron/core/package_info.py": source})
    assert "megatron-core of unknown version" in refusal()


@pytest.mark.parametrize(
    ("version", "is_proven"),
    [
        ("2.8.1", False),
        ("1.13.0", False),
        ("2.9.0", True),
        ("2.13.0+cpu", True),
        ("2.14.0a0+f3eba03d.nv26.11", True),
        ("2.15.0+cu132", True),
        ("2.16.0a0+12ab", False),
        ("2.16.0", False),
        ("3.0.0", False),
        ("", False),
    ],
)
def test_torch_is_refused_outside_of_its_range(put: Put, version: str, is_proven: bool) -> None:
    folder = put(torch(version) | megatron("0.16.1"))
    if is_proven:
        require_ground()
        return
    text = refusal()
    assert f"torch {version or 'of unknown version'} would be imported from {folder / 'torch'}, but" in text
    assert "torch>=2.9,<2.16" in text


def test_a_run_records_the_megatron_that_it_imports(put: Put, monkeypatch: pytest.MonkeyPatch) -> None:
    put({"megatron_core-0.19.2.dist-info/METADATA": "Name: megatron-core\nVersion: 0.19.2\n", **megatron("0.16.1")})
    monkeypatch.setattr("mtrain.base.environment._versions", program_versions.__globals__["_versions"].__wrapped__)
    assert program_versions()["megatron-core"] == "0.16.1"


def started(folder: Path, *arguments: object, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs a command in an interpreter of its own, since the test is about what is imported there."""
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "LOCAL_RANK")}
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        env=environment | {"PYTHONPATH": f"{folder}:{ROOT}", "OMP_NUM_THREADS": "1"} | variables,
        capture_output=True,
        text=True,
        timeout=600,
    )


@pytest.mark.fault(
    "input",
    "a megatron-core or torch on the path that nothing has been proven on, or none",
    happens="every verb that needs it ends before it imports it; the message names version and folder",
    exit_code=7,
)
@pytest.mark.parametrize(
    "verb",
    [
        "check {} --world-size 1",
        "train {}",
        "launch local -n 2 {}",
        "generate . --prompt x",
        "verify parity {}",
        "convert import --hf . --out new",
        "convert export --checkpoint . --out new",
        "convert verify --hf . --checkpoint .",
    ],
)
def test_every_verb_that_needs_it_says_so_in_one_line(tmp_path: Path, notice: Notice, verb: str) -> None:
    folder = put_files(tmp_path, megatron("0.17.1"))
    file = write(tmp_path / "run.yaml", {"run": {"dir": str(tmp_path / "run")}, "data": {"kind": "mock"}, **SMALL})
    with notice:
        done = started(folder, "-m", "mtrain", *verb.format(file).split())
    assert (done.returncode, done.stdout) == (notice.exit_code, "")
    assert done.stderr.startswith(f"error: megatron-core 0.17.1 would be imported from {folder}/megatron/core, but")
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_one_rank_of_each_machine_speaks(tmp_path: Path) -> None:
    folder = put_files(tmp_path, megatron("0.17.1"))
    for rank, local, words in (("1", "1", ""), ("8", "0", "error: [rank 8] megatron-core 0.17.1")):
        ranks = {"RANK": rank, "LOCAL_RANK": local, "WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"}
        done = started(folder, "-m", "mtrain", "train", "run.yaml", **ranks)
        assert done.returncode == 7
        assert done.stderr.count("\n") == (words != "")
        assert done.stderr.startswith(words)


def test_the_engine_of_a_program_is_refused_before_megatron_is_imported(tmp_path: Path) -> None:
    program = "import mtrain\ntry:\n  mtrain.Engine\nexcept mtrain.MachineError as error:\n  print(error)"
    done = started(put_files(tmp_path, megatron("0.18.2")), "-c", program)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("megatron-core 0.18.2 would be imported from")
