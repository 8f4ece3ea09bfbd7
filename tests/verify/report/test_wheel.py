"""The wheel has what pages are made from: without it an installed `mtrain verify` could write none."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from tests.paths import ROOT


def test_the_wheel_has_every_template(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "mtrain", tmp_path / "mtrain", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    build = "import setuptools.build_meta; print(setuptools.build_meta.build_wheel('.'))"
    done = subprocess.run([sys.executable, "-c", build], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    packed = zipfile.ZipFile(tmp_path / done.stdout.splitlines()[-1]).namelist()
    wanted = {path.relative_to(ROOT).as_posix() for path in ROOT.glob("mtrain/**/templates/*")}
    assert len(wanted) == 6
    assert wanted <= {*packed}
