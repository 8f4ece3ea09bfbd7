"""Result of `pip install`: a wheel in an environment of its own, far from the checkout, that can do everything.

The environment has the dependencies of the one that runs the tests, so nothing is downloaded, and no other mtrain.
"""

import os
import re
import runpy
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

from mtrain.base.errors import SITE
from tests.hf.folders import save
from tests.paths import ROOT

SOURCES = ("pyproject.toml", "setup.py", "README.md", "LICENSE", "mtrain", "configs", "launch", "examples")
"""Sources of a wheel."""
RUN = """
run: {dir: runs/first}
train: {global_batch_size: 4, micro_batch_size: 2, num_steps: 2, precision: fp32, device: cpu}
optimizer: {lr: 1.0e-3}
model: {num_layers: 2, hidden_size: 32, ffn_hidden_size: 64, num_attention_heads: 4, vocab_size: 300}
"""
DATA = {
    "text.yaml": "data: {kind: indexed, seq_length: 16, train: [{path: corpus}], tokenizer: words.model}",
    "mock.yaml": "data: {kind: mock, seq_length: 16}",
}


pytestmark = pytest.mark.timeout(
    1800
)  # a dozen fresh interpreters that import torch: half a minute, or ten on a busy machine
_PATIENCE_S = 600


@dataclass(frozen=True)
class Installed:
    """An environment with the wheel, and a folder that `mtrain init` made."""

    wheel: Path
    environment: Path
    project: Path

    def run(self, program: str, *arguments: object) -> subprocess.CompletedProcess[str]:
        """Runs a program of the environment in the project, as a user would: nothing points to the checkout."""
        kept = {name: value for name, value in os.environ.items() if name in ("HOME", "LANG", "TMPDIR")}
        return subprocess.run(
            [str(self.environment / "bin" / program), *map(str, arguments)],
            cwd=self.project,
            env=kept | {"PATH": f"{self.environment / 'bin'}:/usr/bin:/bin", "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=_PATIENCE_S,
        )

    def mtrain(self, line: str) -> str:
        """Runs a command line that has to succeed; returns its output."""
        done = self.run("mtrain", *line.split())
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Builds the wheel by `python -m build` from a copy of the sources, so that nothing of an earlier build is in
    it."""
    folder = tmp_path_factory.mktemp("build")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, folder)
    environment = os.environ | {"PIP_NO_INDEX": "1", SITE: "https://example.org/mtrain/"}
    line = [sys.executable, "-m", "build", "--no-isolation", "--outdir", "dist", "."]
    done = subprocess.run(line, cwd=folder, env=environment, capture_output=True, text=True, timeout=_PATIENCE_S)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "absent from the `packages` configuration" not in done.stdout + done.stderr
    (found,) = (folder / "dist").glob("*.whl")
    return found


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """Installs the wheel in an empty environment, and creates a folder by `mtrain init` with two small texts."""
    folder = tmp_path_factory.mktemp("user")
    environment = folder / "env"
    venv.create(environment, with_pip=False)
    python = environment / "bin" / "python"
    paths = {"base": str(environment), "platbase": str(environment)}
    packages = Path(sysconfig.get_path("purelib", vars=paths))
    # A line of a .pth file adds a folder without reading its own .pth files, where an editable mtrain would be named.
    others = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    (packages / "dependencies.pth").write_text("".join(f"{path}\n" for path in sorted(others)))
    line = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-index", "--no-deps"]
    done = subprocess.run(
        [*line, "--ignore-installed", "--no-compile", str(wheel)], capture_output=True, text=True, timeout=_PATIENCE_S
    )
    assert done.returncode == 0, done.stdout + done.stderr
    project = folder / "project"
    user = Installed(wheel, environment, folder)
    assert "which you may change" in user.mtrain(f"init {project}")
    (project / "a.txt").write_text("".join(f"the {number} quick brown foxes jump\n" for number in range(400)))
    for name, text in {"run.yaml": RUN, **DATA}.items():
        (project / name).write_text(text)
    return Installed(wheel, environment, project)


def test_the_wheel_holds_all_that_the_package_has(wheel: Path) -> None:
    held = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("mtrain/")}
    package = {
        f"{folder.relative_to(ROOT)}/{name}"
        for top, _, names in os.walk(ROOT / "mtrain", followlinks=True)
        if (folder := Path(top)).name != "__pycache__"
        for name in names
    }
    assert held == package
    assert any("/templates/" in name for name in held), "pages are made of them"
    assert {"mtrain/py.typed", "mtrain/_share/configs/model/tiny.yaml", "mtrain/_share/launch/slurm.sbatch"} <= held


def test_links_of_the_package_on_an_index_lead_to_the_site(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as content:
        (metadata,) = (name for name in content.namelist() if name.endswith(".dist-info/METADATA"))
        text = content.read(metadata).decode()
    assert "Description-Content-Type: text/markdown" in text
    links = re.findall(r"\]\(([^)]*)\)", text)
    assert len(links) > 20
    assert [link for link in links if not link.startswith("https://")] == []
    for link in (link for link in links if "example.org" in link):
        page = link.removeprefix("https://example.org/mtrain/").partition("#")[0]
        file = ROOT / "docs" / page
        assert file.with_suffix(".md").exists() if page.endswith(".html") else file.exists(), link


def test_a_package_without_a_site_has_no_relative_links(monkeypatch: pytest.MonkeyPatch) -> None:
    built: dict[str, str] = {}
    monkeypatch.setattr("setuptools.setup", lambda **given: built.update(given))
    monkeypatch.delenv(SITE, raising=False)
    runpy.run_path(str(ROOT / "setup.py"))
    text = built["long_description"]
    links = re.findall(r"\]\(([^)]*)\)", text)
    assert links
    assert [link for link in links if not link.startswith("https://")] == []
    assert "One run under three sequence-parallel sizes." in text
    assert "by family and axis" in text.lower()


def test_the_program_is_the_one_of_the_wheel(installed: Installed) -> None:
    program = "import mtrain, mtrain.verify; print(mtrain.__file__, mtrain.verify.__file__)"
    done = installed.run("python", "-c", program)
    assert done.returncode == 0, done.stderr
    assert all(Path(name).is_relative_to(installed.environment) for name in done.stdout.split())


@pytest.mark.nightly  # the programs themselves have tests in their packages
def test_it_takes_text_to_a_trained_model(installed: Installed) -> None:
    installed.mtrain("train-tokenizer a.txt --output words.model --vocab-size 300")
    assert "1 document, " in installed.mtrain("tokenize a.txt --tokenizer words.model --output-prefix corpus")
    assert "on 1 rank" in installed.mtrain("check run.yaml text.yaml configs/layout/single.yaml --world-size 1")
    installed.mtrain("train run.yaml text.yaml configs/layout/single.yaml")
    records = (installed.project / "runs" / "first" / "metrics.jsonl").read_text()
    assert records.count('"loss"') >= 2
    assert "step_00000002" in installed.mtrain("inspect runs/first")
    assert "> the" in installed.mtrain("generate runs/first --max-new-tokens 2 --prompt the")


@pytest.mark.nightly  # also tested by tests/verify/parity
def test_it_verifies_a_layout_and_writes_the_page(installed: Installed) -> None:
    installed.mtrain("verify parity run.yaml mock.yaml --layouts tp2 --steps 1 --max-ranks 2 --output report")
    assert "</html>" in (installed.project / "report" / "parity.html").read_text()


@pytest.mark.nightly  # also tested by tests/convert
def test_it_converts_both_ways(installed: Installed) -> None:
    save("llama", installed.project / "hf")
    imported = installed.mtrain("convert import --hf hf --out ckpt")
    exported = installed.mtrain("convert export --checkpoint ckpt --out back")
    assert "proven: 30 tensors" in imported
    assert "proven: 30 tensors" in exported


def test_it_ends_with_the_exit_code_of_an_error(installed: Installed) -> None:
    done = installed.run("mtrain", "init", ".")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith("error: configs already exists")
