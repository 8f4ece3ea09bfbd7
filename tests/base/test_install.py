"""Installation in containers: pip leaves their torch alone, as docs/machines/containers.md says, and brings the
megatron-core that is proven.

pip resolves for real, against an environment that stands in for a container's and an index of empty wheels; nothing is
downloaded. Requirements are those of the container's Python, whatever Python this is.
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
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from tests.paths import ROOT

PAGE = (ROOT / "docs" / "machines" / "containers.md").read_text()
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


def needed(python: str) -> list[str]:
    """Returns what this program needs under a version of Python."""
    lines = [Requirement(line) for line in DEPENDENCIES]
    return [
        f"{line.name}{line.specifier}"
        for line in lines
        if line.marker is None or line.marker.evaluate({"python_version": python})
    ]


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Builds an index with this program for Python 3.12 and its dependencies, each in the oldest accepted version;
    several versions of torch."""
    folder = tmp_path_factory.mktemp("index")
    put_wheel(folder, "mtrain", "0.1.0", needed("3.12"))
    for version in OFFERED:
        put_wheel(folder, "torch", version)
    for line in DEPENDENCIES[1:]:
        name, version = re.match(r"([\w.-]+)[>=]=([\d.]+)", line).groups()  # type: ignore[union-attr]
        put_wheel(folder, name, version, ["torch"] if name == "megatron-core" else [])
    return folder


def resolved(index: Path, folder: Path, there: Mapping[str, str], *options: object) -> dict[str, str] | str:
    """Returns what pip would install, by name, in an environment that sees these packages of a container; its error
    message where it refuses."""
    environment, container = folder / "environment", folder / "container"
    container.mkdir()
    venv.create(environment, with_pip=False)
    packages = sysconfig.get_path("purelib", "venv", {"base": str(environment), "platbase": str(environment)})
    Path(packages, "container.pth").write_text(f"{container}\n")  # as an environment sees those of the system
    for name, version in there.items():
        put_wheel(folder, name, version)
        with zipfile.ZipFile(folder / f"{name.replace('-', '_')}-{version}-py3-none-any.whl") as archive:
            archive.extractall(container)
    line = [sys.executable, "-m", "pip", "--python", environment / "bin" / "python", "install", "mtrain"]
    line += ["--dry-run", "--no-index", "--find-links", index, "--report", folder / "report.json", *options]
    # a machine's own settings, such as constraints, do not count
    settings = {"PATH": "/usr/bin:/bin", "PIP_CONFIG_FILE": os.devnull}
    done = subprocess.run([*map(str, line)], capture_output=True, text=True, env=settings, timeout=600)
    if done.returncode:
        return done.stdout + done.stderr
    report = json.loads((folder / "report.json").read_text())
    return {each["metadata"]["name"]: each["metadata"]["version"] for each in report["install"]}


def by_day_the_first(*versions: str) -> list[Any]:
    """Makes rows of which one is tried by day: tests/base/test_ground.py compares the same range with each of them."""
    return [versions[0], *(pytest.param(each, marks=pytest.mark.nightly) for each in versions[1:])]


@pytest.mark.parametrize("there", by_day_the_first("2.14.0a0+f3eba03d.nv26.11", "2.15.0", "2.9.0+cu130", "2.15.1"))
def test_a_torch_that_is_there_stays(index: Path, tmp_path: Path, there: str) -> None:
    constraints = tmp_path / "torch.txt"
    constraints.write_text(f"torch=={there}\n")
    found = resolved(index, tmp_path, {"torch": there}, "--constraint", constraints)
    assert isinstance(found, dict), found
    assert "torch" not in found
    assert found.keys() >= {"mtrain", "megatron-core"}


@pytest.mark.parametrize("there", by_day_the_first("2.9.0a0+1.nv25.08", "2.16.0", "2.8.0"))
def test_a_torch_out_of_range_is_not_replaced_but_named(index: Path, tmp_path: Path, there: str) -> None:
    constraints = tmp_path / "torch.txt"
    constraints.write_text(f"torch=={there}\n")
    found = resolved(index, tmp_path, {"torch": there}, "--constraint", constraints)
    assert isinstance(found, str), found
    assert f"torch=={there}" in found
    assert "mtrain 0.1.0 depends on torch<2.16 and >=2.9" in found


def test_without_any_torch_the_newest_proven_one_is_chosen(index: Path, tmp_path: Path) -> None:
    found = resolved(index, tmp_path, {})
    assert isinstance(found, dict), found
    assert found["torch"] == "2.15.0"


def test_each_python_gets_the_megatron_that_pip_offers_to_it() -> None:
    assert "megatron-core==0.16.1" in needed("3.11")
    assert [line for line in needed("3.12") if "megatron" in line] == ["megatron-core==0.19.2"]
    assert [line for line in needed("3.13") if "megatron" in line] == ["megatron-core==0.19.2"]


PYTORCH = {
    "torch": "2.12.0a0+f3eba03d.nv26.6",
    "torchvision": "0.27.0a0+1.nv26.6",
    "numpy": "2.1.0",
    "transformer-engine": "2.16.0+8b6b1f3",
    "flash-attn": "2.8.3",
    "nvidia-modelopt": "0.45.0",
}
"""Packages of NVIDIA's container of PyTorch of June 2026."""


@pytest.mark.parametrize(
    "container",
    [
        pytest.param(PYTORCH, id="PyTorch", marks=pytest.mark.nightly),
        pytest.param({**PYTORCH, "megatron-core": "0.18.0"}, id="NeMo"),
    ],
)
def test_the_commands_of_the_page_leave_what_is_built_for_the_containers_torch(
    index: Path, tmp_path: Path, container: dict[str, str]
) -> None:
    listing = "".join(f"{name}=={version}\n" for name, version in container.items())
    filters = set(re.findall(r"pip list --format=freeze \| (grep .*) > pins.txt", PAGE))
    assert len(filters) == 1
    pins = tmp_path / "pins.txt"
    with pins.open("w") as file:
        subprocess.run(["sh", "-c", filters.pop()], input=listing, stdout=file, text=True, check=True)
    names = {line.partition("==")[0] for line in pins.read_text().splitlines()}
    assert names == PYTORCH.keys() - {"nvidia-modelopt"}
    found = resolved(index, tmp_path, container, "--constraint", pins)
    assert isinstance(found, dict), found
    assert found["megatron-core"] == "0.19.2", "beside the container's own, which is not proven"
    assert not names & found.keys()
