"""Packages that tests read and that the suite's environment does not have: unpacked in a folder that is kept.

python -m tests.tools.wheels    # prints an interpreter with the other proven version of megatron-core
"""

from __future__ import annotations

import os
import site
import subprocess
import sys
import sysconfig
import tempfile
import venv
from functools import cache
from pathlib import Path

from mtrain.base.ground import MEGATRON_CORES, found_megatron

FOLDER = "MTRAIN_TEST_WHEELS"
"""Environment variable: folder where they are kept from session to session."""
CACHE_OF_USER = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
"""Folder of the user's caches; tests have another one."""
os.environ.setdefault(FOLDER, str(CACHE_OF_USER / "mtrain-tests"))
_MEGATRON = found_megatron()
_IS_OLDER = _MEGATRON is not None and _MEGATRON.version == MEGATRON_CORES[0]
OTHER_MEGATRON = f"megatron-core=={MEGATRON_CORES[_IS_OLDER]}"
"""Other one of the two proven versions."""
TRANSFORMER_ENGINE = f"transformer-engine=={'2.12.0' if _IS_OLDER else '2.20.2'}"
"""Newest release that is accepted with the megatron-core that is installed; 1 MB of pure Python, whose compiled part is
another package."""
FLASH_LINEAR_ATTENTION = "fla-core==0.6.0"
"""Pure Python; its kernels need a GPU."""
TRANSFORMERS_4 = ("transformers==4.57.6", "huggingface-hub==0.36.2", "tokenizers==0.22.2")
"""Last release of version 4, and its requirements that are older than the suite's own packages."""


@cache
def unpacked(requirement: str, *for_another: str) -> Path | None:
    """Returns the folder of a wheel without its dependencies; pip downloads a missing one. None where pip cannot.

    Args:
        requirement: Name and version.
        for_another: Options of pip that name another Python than this one.
    """
    parent = Path(os.environ[FOLDER])
    folder = parent / requirement
    if folder.is_dir():
        return folder
    parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=parent) as own:
        target = Path(own) / "package"
        options = ["--no-deps", "--only-binary=:all:", "--no-compile", "--disable-pip-version-check", "--retries=1"]
        command = [sys.executable, "-m", "pip", "install", "--quiet", *options, *for_another]
        command += [f"--target={target}", requirement]
        if subprocess.run(command, capture_output=True, check=False).returncode != 0:
            return None
        _publish(target, folder)
    return folder


def _publish(made: Path, folder: Path) -> None:
    try:
        made.rename(folder)  # whole or not at all
    except OSError:  # another worker of this session was first
        assert folder.is_dir()


def transformers_4() -> list[Path] | None:
    """Returns folders to import transformers 4 from, before all others; None where pip cannot download them."""
    found = [unpacked(each) for each in TRANSFORMERS_4]
    return [each for each in found if each is not None] if all(found) else None


@cache
def other_python() -> Path | None:
    """Returns an interpreter that has the packages of this one, but OTHER_MEGATRON; None where pip cannot bring that.

    Its sources run under a Python that pip does not offer them to; what it compiles (indices of data sets) is not used.
    """
    of_another = f"--python-version={'3.12' if _IS_OLDER else '3.11'}", "--ignore-requires-python"
    wheel = unpacked(OTHER_MEGATRON, *of_another)
    if wheel is None:
        return None
    folder = Path(sys.prefix) / OTHER_MEGATRON
    if not folder.is_dir():
        with tempfile.TemporaryDirectory(dir=sys.prefix) as own:
            made = Path(own) / "environment"
            subprocess.run([sys.executable, "-m", "venv", "--without-pip", made], check=True)
            packages = sysconfig.get_path("purelib", "venv", {"base": str(made), "platbase": str(made)})
            # the wheel before the packages of this interpreter, whose own .pth files count, too
            lines = [str(wheel), *(f"import site; site.addsitedir({each!r})" for each in site.getsitepackages())]
            Path(packages, "other_megatron.pth").write_text("\n".join(lines))
            _publish(made, folder)
    return folder / "bin" / "python"


if __name__ == "__main__":
    found = other_python()
    if found is None:
        sys.exit(f"error: pip cannot bring {OTHER_MEGATRON}; give it a package index")
    print(found)


def python_with(folder: Path, *requirements: str) -> Path:
    """Makes a Python in a new folder that sees this one's packages and some more; returns its program."""
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    own = folder / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    # not the path alone: packages there may be named by .pth files as well
    (own / "base.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
    # --no-compile: only a few of their thousands of modules are imported, and are compiled then
    line = [str(python), "-m", "pip", "install", "--quiet", "--no-compile", *requirements]
    subprocess.run(line, check=True, capture_output=True)
    return python
