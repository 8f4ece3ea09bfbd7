"""Installation next to an existing torch: pip leaves it alone, as README says, whatever else pip would install.

pip resolves for real, against an environment that has a torch and an index of empty wheels; nothing is downloaded.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.paths import ROOT

OFFERED = ("2.8.0", "2.13.0", "2.14.1", "2.15.0", "2.16.0")
"""Versions of torch in the index."""
DEPENDENCIES: list[str] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]


def put_wheel(folder: Path, name: str, version: str, needs: Sequence[str] = ()) -> None:
    """Writes an empty package with these dependencies."""
    stem = f"{name.replace('-', '_')}-{version}"
    texts = {
        "METADATA": "".join([f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"])
        + "".join(f"Requires-Dist: {each}\n" for each in needs),
        "WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        "RECORD": "",
    }
    with zipfile.ZipFile(folder / f"{stem}-py3-none-any.whl", "w") as archive:
        for part, text in texts.items():
            archive.writestr(f"{stem}.dist-info/{part}", text)


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Builds an index with this program and its dependencies, each in the oldest accepted version; several versions of
    torch."""
    folder = tmp_path_factory.mktemp("index")
    put_wheel(folder, "mtrain", "0.1.0", DEPENDENCIES)
    for version in OFFERED:
        put_wheel(folder, "torch", version)
    for line in DEPENDENCIES[1:]:
        name, version = re.match(r"([\w.-]+)[>=]=([\d.]+)", line).groups()  # type: ignore[union-attr]
        put_wheel(folder, name, version, ["torch"] if name == "megatron-core" else [])
    return folder


def resolved(index: Path, folder: Path, there: str | None, *options: object) -> dict[str, str] | str:
    """Returns what pip would install, by name, in an environment that has this torch; its error message where it
    refuses."""
    environment = folder / "container"
    if not environment.exists():
        venv.create(environment, with_pip=False)
    packages = sysconfig.get_path("purelib", "venv", {"base": str(environment), "platbase": str(environment)})
    if there is not None:
        put_wheel(folder, "torch", there)
        with zipfile.ZipFile(folder / f"torch-{there}-py3-none-any.whl") as archive:
            archive.extractall(packages)
    line = [sys.executable, "-m", "pip", "--python", environment / "bin" / "python", "install", "mtrain"]
    line += ["--dry-run", "--no-index", "--find-links", index, "--report", folder / "report.json", *options]
    # a machine's own settings, such as constraints, do not count
    settings = {"PATH": "/usr/bin:/bin", "PIP_CONFIG_FILE": os.devnull}
    done = subprocess.run([*map(str, line)], capture_output=True, text=True, env=settings, timeout=600)
    if done.returncode:
        return done.stdout + done.stderr
    report = json.loads((folder / "report.json").read_text())
    return {each["metadata"]["name"]: each["metadata"]["version"] for each in report["install"]}


@pytest.mark.parametrize("there", ["2.14.0a0+f3eba03d.nv26.11", "2.15.0", "2.9.0+cu130", "2.15.1"])
def test_a_torch_that_is_there_stays(index: Path, tmp_path: Path, there: str) -> None:
    constraints = tmp_path / "torch.txt"
    constraints.write_text(f"torch=={there}\n")
    found = resolved(index, tmp_path, there, "--constraint", constraints)
    assert isinstance(found, dict), found
    assert "torch" not in found
    assert found.keys() >= {"mtrain", "megatron-core"}


@pytest.mark.parametrize("there", ["2.8.0", "2.16.0", "2.9.0a0+1.nv25.08"])
def test_a_torch_out_of_range_is_not_replaced_but_named(index: Path, tmp_path: Path, there: str) -> None:
    constraints = tmp_path / "torch.txt"
    constraints.write_text(f"torch=={there}\n")
    found = resolved(index, tmp_path, there, "--constraint", constraints)
    assert isinstance(found, str), found
    assert f"torch=={there}" in found
    assert "mtrain 0.1.0 depends on torch<2.16 and >=2.9" in found


def test_without_any_torch_the_newest_proven_one_is_chosen(index: Path, tmp_path: Path) -> None:
    found = resolved(index, tmp_path, None)
    assert isinstance(found, dict), found
    assert found["torch"] == "2.15.0"
