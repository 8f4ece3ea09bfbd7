"""examples/charts: what the charts show, a short form of the run on several layouts, and the whole of it at night."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.cli.command_line import parsed
from tests.cli.test_init import STAND_IN
from tests.paths import ROOT
from tests.warm import completed, program_environment

EXAMPLE = ROOT / "examples" / "charts"
COLOURS = {
    "red": (0xD6, 0x27, 0x28),
    "green": (0x2C, 0xA0, 0x2C),
    "blue": (0x1F, 0x77, 0xB4),
    "orange": (0xFF, 0x7F, 0x0E),
}
PIXELS_PER_UNIT = 6


def run(folder: Path, *arguments: object) -> str:
    """Runs a program; returns what it prints."""
    done = completed([sys.executable, *arguments], folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder with few charts, and the untrained model."""
    folder = tmp_path_factory.mktemp("charts")
    (folder / "examples").symlink_to(ROOT / "examples")
    run(folder, EXAMPLE / "make.py", ".charts", 128, 32)
    return folder


def records(made: Path, name: str) -> list[list[dict[str, Any]]]:
    return [json.loads(line)["messages"] for line in (made / ".charts" / f"{name}.jsonl").read_text().splitlines()]


def shown(path: Path) -> dict[str, int]:
    """Measures each bar in the picture, from left to right."""
    pixels = np.asarray(Image.open(path).convert("RGB"))
    found = []
    for colour, value in COLOURS.items():
        is_bar = (pixels == value).all(axis=-1)
        left = int(is_bar.any(axis=0).argmax())
        found.append((left, colour, round(int(is_bar.sum(axis=0).max()) / PIXELS_PER_UNIT)))
    return {colour: height for _, colour, height in sorted(found)}


def test_each_answer_is_in_the_picture(made: Path) -> None:
    for messages in [*records(made, "train"), *records(made, "held_out")]:
        image, *_ = messages[0]["content"]
        heights = shown(made / ".charts" / image["path"])
        asked = [re.findall(r"the (\w+) bar", message["content"][-1]["text"])[0] for message in messages[::2]]
        assert sorted(asked) == sorted(COLOURS)
        assert [message["content"] for message in messages[1::2]] == [str(heights[colour]) for colour in asked]


def test_no_held_out_chart_is_one_to_train_on(made: Path) -> None:
    pictures = [path.read_bytes() for path in sorted((made / ".charts" / "charts").glob("*.png"))]
    assert len(set(pictures)) == len(pictures) == 128 + 32
    numbers = {
        name: {tuple(shown(made / ".charts" / each[0]["content"][0]["path"]).values()) for each in records(made, name)}
        for name in ("train", "held_out")
    }
    assert {name: len(found) for name, found in numbers.items()} == {"train": 128, "held_out": 32}
    assert not numbers["train"] & numbers["held_out"]


SHORT = ("train.num_steps=20", "train.global_batch_size=16", "optimizer.warmup_steps=2", "valid.max_samples=32")


def metrics(run_folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()]


def test_a_short_form_learns_the_same_on_any_layout(made: Path) -> None:
    train = ("-m", "mtrain", "launch", "local")
    said = run(made, *train, "-n", 1, "examples/charts/train.yaml", *SHORT)
    before, after = (float(number) for number in re.findall(r"valid_loss (\S+)", said))
    assert after < before / 2
    alone = metrics(made / ".charts" / "run")
    layout = ("run.dir=.charts/other", "layout.cp=2", "layout.tp=2", "layout.sp=true", "train.num_steps=5")
    run(made, *train, "-n", 4, "examples/charts/train.yaml", *SHORT, *layout)
    steps = [(each["loss"], each["grad_norm"]) for each in metrics(made / ".charts" / "other") if "loss" in each]
    assert len(steps) == 5
    for one, other in zip(steps, [(each["loss"], each["grad_norm"]) for each in alone if "loss" in each]):
        assert one == pytest.approx(other, rel=1e-4)


def test_the_script_calls_verbs_that_are_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(EXAMPLE, tmp_path / "examples" / "charts")
    stand_in = tmp_path / "python"
    stand_in.write_text(STAND_IN)
    stand_in.chmod(0o755)
    environment = {"PATH": os.environ["PATH"], "PYTHON": str(stand_in)}
    script = ["bash", str(tmp_path / "examples" / "charts" / "run.sh")]
    done = subprocess.run(script, env=environment, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    monkeypatch.chdir(tmp_path)
    called = [words.removeprefix("-W ignore ") for words in Path("calls").read_text().splitlines()]
    programs = [words.split()[0] for words in called if not words.startswith("-m mtrain ")]
    assert programs == [f"examples/charts/{name}" for name in ("make.py", "answers.py", "answers.py")]
    lines = [words.removeprefix("-m mtrain ") for words in called if words.startswith("-m mtrain ")]
    assert [line.split()[0] for line in lines] == ["train", "convert", "launch", "compare", "launch", "compare"]
    for line in lines:
        parsed(line)


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_script_teaches_the_model_to_read_charts_that_it_has_not_seen(tmp_path: Path) -> None:
    shutil.copytree(EXAMPLE, tmp_path / "examples" / "charts")
    environment = {**program_environment(), "PYTHON": sys.executable}
    line = ["bash", str(tmp_path / "examples" / "charts" / "run.sh")]
    done = subprocess.run(line, env=environment, capture_output=True, text=True, timeout=3500)
    assert done.returncode == 0, done.stdout + done.stderr
    own, other = (
        [float(number) for number in re.findall(rf"^{title}: .* ([\d.]+)%$", done.stdout, re.MULTILINE)]
        for title in ("with their own chart", "with another chart")
    )
    assert own[0] == other[0] == 0
    assert own[1] > 85
    assert other[1] < 25
