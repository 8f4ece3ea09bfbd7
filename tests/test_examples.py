"""The programs of examples/ run as a newcomer runs them, and learn the same on two ranks as on one."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.paths import ROOT

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


def run(folder: Path, *command: str) -> str:
    """What a program prints, from another working folder."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *command], cwd=folder, env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def losses(output: str) -> list[float]:
    return [float(number) for number in re.findall(r"loss (\d+\.\d+)", output)]


def example(name: str) -> str:
    return str(ROOT / "examples" / name)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_an_example_is_short(path: Path) -> None:
    assert len(path.read_text().splitlines()) < 60
    imported = re.findall(r"^(?:from|import) (mtrain\S*)", path.read_text(), flags=re.MULTILINE)
    assert imported == ["mtrain"], "nothing deeper"


def test_examples_are_typed() -> None:
    command = [sys.executable, "-m", "mypy", "--strict", *map(str, EXAMPLES)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout


def test_a_loop_of_ones_own_learns_the_same_on_any_layout(tmp_path: Path) -> None:
    alone = losses(run(tmp_path, example("own_training_loop.py")))
    assert len(alone) == 7
    assert alone[5] < alone[0] - 1
    for layout in ("layout.tp=2", "layout.pp=2"):
        launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
        assert losses(run(tmp_path, *launcher, example("own_training_loop.py"), layout)) == pytest.approx(
            alone, rel=1e-5
        )


def test_a_loss_of_ones_own_is_minimised(tmp_path: Path) -> None:
    output = run(tmp_path, example("custom_loss.py"))
    focal = losses(output)
    usual = [float(number) for number in re.findall(r"cross entropy (\d+\.\d+)", output)]
    assert len(focal) == len(usual) == 4
    assert focal[-1] < focal[0]
    assert usual[-1] < usual[0]


def test_a_checkpoint_is_read_by_its_names(tmp_path: Path) -> None:
    program = (
        "import sys; from mtrain import Engine, load_config\n"
        "with Engine(load_config([sys.argv[1]], sys.argv[2:])) as engine: print(engine.save())"
    )
    settings = ["run.dir=saved", "train.global_batch_size=1", "train.num_steps=1", "optimizer.lr=1", "data.kind=mock"]
    tiny = str(ROOT / "configs" / "model" / "tiny.yaml")
    run(tmp_path, "-c", program, tiny, *settings, "data.seq_length=8", "train.precision=bf16")
    output = run(tmp_path, example("read_checkpoint.py"), "saved")
    assert re.search(r"embedding\.word_embeddings\.weight +2048x128  rms 0\.0200", output), output
    assert re.search(r"decoder\.layers\.mlp\.linear_fc2\.weight +4x128x352", output), output
    assert re.search(r"nearest to token 0: \[\d+, \d+, \d+\]", output)
