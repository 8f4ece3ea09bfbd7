"""examples/real_model: the script, its conversations, its configuration and the folder that it makes.

A tiny model in the same kind of file stands for the real one; tests/real_model/test_smollm2.py runs the script."""

import os
import re
import runpy
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.cli.command_line import call, parsed
from tests.cli.test_init import STAND_IN
from tests.paths import ROOT
from tests.real_model.smollm2 import EXAMPLE, conversations, questions, write_tiny_gguf


def test_each_fact_is_asked_for_in_two_ways() -> None:
    answers: dict[str, set[str]] = {}
    for question, answer in conversations():
        answers.setdefault(answer, set()).add(question)
    assert [len(asked) for asked in answers.values()] == [2] * 20
    assert set(questions()) < {question for question, _ in conversations()}


def test_the_script_calls_verbs_that_are_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(EXAMPLE, tmp_path / "examples" / "real_model")
    stand_in = tmp_path / "python"
    stand_in.write_text(STAND_IN)
    stand_in.chmod(0o755)
    environment = {"PATH": os.environ["PATH"], "PYTHON": str(stand_in)}
    script = ["bash", str(tmp_path / "examples" / "real_model" / "run.sh")]
    done = subprocess.run(script, env=environment, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    monkeypatch.chdir(tmp_path)
    called = [words.removeprefix("-W ignore ") for words in Path("calls").read_text().splitlines()]
    programs = [words.split()[0] for words in called if not words.startswith("-m mtrain ")]
    assert programs == ["examples/real_model/fetch.py", "examples/real_model/answers.py"]
    lines = [words.removeprefix("-m mtrain ") for words in called if words.startswith("-m mtrain ")]
    assert [line.split()[0] for line in lines] == ["generate", "launch", "generate", "convert", "convert"]
    named = {name for line in lines for name in re.findall(r"examples/\S+", line)}
    assert named == {f"examples/real_model/{name}" for name in ("questions.txt", "finetune.yaml")}
    for line in lines:
        parsed(line)


def test_the_quickstart_ends_with_the_way_to_it() -> None:
    (offered,) = re.findall(r"in minutes: bash (\S+)\"", (ROOT / "launch" / "quickstart.sh").read_text())
    assert (ROOT / offered).exists()


def test_a_file_of_ggufs_kind_becomes_a_model_that_the_run_starts_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_hf_folder = runpy.run_path(str(EXAMPLE / "fetch.py"))["write_hf_folder"]
    stored = write_tiny_gguf(tmp_path / "tiny.gguf")
    write_hf_folder(tmp_path / "tiny.gguf", tmp_path / ".real_model" / "smollm2")
    tensors = load_file(tmp_path / ".real_model" / "smollm2" / "model.safetensors")
    assert len(tensors) == 2 + 2 * 9, "tied tables"
    for name, values in stored.items():
        assert torch.equal(tensors[name], torch.from_numpy(values).to(torch.bfloat16)), name
    shutil.copytree(EXAMPLE, tmp_path / "examples" / "real_model")
    monkeypatch.chdir(tmp_path)
    code, text = call("check", "examples/real_model/finetune.yaml", "--world-size", 2, "data.seq_length=512")
    assert code == 0, text
    assert "tp1-pp1-cp2-dp1 on 2 ranks" in text
    assert "1 packed row of 512" in text
    assert "fields that mtrain does not know" not in text, "GGUF's own names, _model_name_or_path and unk_token_id"
