"""`mtrain init`: a folder to start from, for users without a checkout."""

import shutil
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from mtrain.base.errors import ConfigError
from mtrain.base.files import disk_faults
from mtrain.base.version import SHARED
from mtrain.cli.messages import one_message

PARTS = ("configs", "launch", "examples")


def init(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Created if it is missing.", show_default=False)],
) -> None:
    """Copies the shipped configurations, launch scripts and examples; overwrites nothing."""
    with one_message():
        if folder.exists() and not folder.is_dir():
            raise ConfigError(f"{folder} is a file; name a folder, which need not exist")
        for target in (folder / part for part in PARTS):
            if target.exists() or target.is_symlink():
                raise ConfigError(f"{target} already exists; name another folder or move it away")
        with disk_faults(f"write into {folder}"):
            _copy_into(folder)
    typer.echo(
        f"{folder} contains configs/, launch/ and examples/, which you may change. Go there and run:\n\n"
        "  mtrain check configs/model/tiny.yaml configs/layout/tp2sp.yaml configs/run/pretrain.yaml --world-size 2 "
        "--without-files\n"
        "                                           what a run would be; any of the files can be combined\n"
        "  bash launch/quickstart.sh                pretrains and finetunes a small model here, from nothing\n"
        "  bash examples/real_model/run.sh          teaches a real chat model; pip install 'mtrain[example]'\n"
        "  bash examples/charts/run.sh              teaches a small model to read charts; needs mtrain[vision]\n"
        "  bash launch/torchrun.sh CONFIG...        trains on the GPUs of this machine\n"
        "  sbatch launch/slurm.sbatch RUN_DIR CONFIG...   the same on a cluster"
    )


def _copy_into(folder: Path) -> None:
    """Copies all parts or none: a crash leaves a folder `.new-*`, and no part that the next call would refuse."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".new-", dir=folder) as staging:
        for part in PARTS:
            shutil.copytree(SHARED / part, Path(staging, part), ignore=shutil.ignore_patterns("__pycache__"))
        for part in PARTS:
            Path(staging, part).rename(folder / part)
