"""Tests of the programs in examples/ as a newcomer runs them: they learn the same on two ranks as on one.

tests/check.sh checks their types."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.paths import ROOT
from tests.warm import completed, program_environment

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


def run(folder: Path, *command: str) -> str:
    """Returns what a program prints, started from another working folder."""
    done = completed([sys.executable, *command], folder)
    assert done.returncode == 0, done.stderr
    return done.stdout


def run_on_two_ranks(folder: Path, *command: str) -> str:
    """Runs the same under torchrun, in new interpreters."""
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    line, environment = [sys.executable, *launcher, *command], program_environment()
    done = subprocess.run(line, cwd=folder, env=environment, capture_output=True, text=True, timeout=600)
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


def test_a_loop_of_ones_own_learns(tmp_path: Path) -> None:
    alone = losses(run(tmp_path, example("own_training_loop.py")))
    assert len(alone) == 7
    assert alone[5] < alone[0] - 1


@pytest.mark.nightly  # two new interpreters; tests/training/test_engine.py has such loops on every layout
def test_a_loop_of_ones_own_learns_the_same_on_any_layout(tmp_path: Path) -> None:
    alone = losses(run(tmp_path, example("own_training_loop.py")))
    # one other layout: more of them are in tests/training/test_engine.py, without a launch
    assert losses(run_on_two_ranks(tmp_path, example("own_training_loop.py"), "layout.pp=2")) == pytest.approx(
        alone, rel=1e-5
    )


def test_a_loss_of_ones_own_is_minimised(tmp_path: Path) -> None:
    output = run(tmp_path, example("custom_loss.py"))
    focal = losses(output)
    usual = [float(number) for number in re.findall(r"cross entropy (\d+\.\d+)", output)]
    assert len(focal) == len(usual) == 4
    assert focal[-1] < focal[0]
    assert usual[-1] < usual[0]


def test_a_trainer_of_another_programs_rollouts_raises_their_reward(tmp_path: Path) -> None:
    output = run(tmp_path, example("rl_trainer.py"), "train.num_steps=10")
    rewards = [float(number) for number in re.findall(r"reward (\d\.\d+)", output)]
    assert len(rewards) == 5
    assert rewards[-1] > 2 * rewards[0]


def test_a_checkpoint_is_read_by_its_names(tmp_path: Path) -> None:
    program = (
        "import sys; from mtrain import Engine, load_config\n"
        "with Engine(load_config([sys.argv[1]], sys.argv[2:])) as engine: print(engine.save())"
    )
    settings = ["run.dir=saved", "train.global_batch_size=1", "train.num_steps=1", "optimizer.lr=1", "data.kind=mock"]
    tiny = str(ROOT / "configs" / "model" / "tiny.yaml")
    (tmp_path / "save.py").write_text(program)
    run(tmp_path, str(tmp_path / "save.py"), tiny, *settings, "data.seq_length=8", "train.precision=bf16")
    output = run(tmp_path, example("read_checkpoint.py"), "saved")
    assert re.search(r"embedding\.word_embeddings\.weight +2048x128  rms 0\.0200", output), output
    assert re.search(r"decoder\.layers\.mlp\.linear_fc2\.weight +4x128x352", output), output
    assert re.search(r"nearest to token 0: \[\d+, \d+, \d+\]", output)
