"""What training exports runs in lm-eval, which this test installs in addition to the packages that are there."""

import json
import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

from tests.hf.folders import save
from tests.paths import ROOT
from tests.training.test_start_from_hf import command, configured

WORDS = {"<unk>": 0, "<s>": 1, "</s>": 2, "a": 3, "b": 4, "c": 5, "d": 6}


@pytest.fixture(scope="module")
def python_with_lm_eval(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Makes a Python that sees this one's packages, and lm-eval."""
    folder = tmp_path_factory.mktemp("lm-eval")
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    own = folder / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    (own / "base.pth").write_text(sysconfig.get_path("purelib") + "\n")
    # --no-compile: only a few of its thousands of modules are imported, and are compiled then
    line: list[str | Path] = [python, "-m", "pip", "install", "--quiet", "--no-compile", "lm-eval[hf]>=0.4.9,<0.5"]
    subprocess.run(line, check=True, capture_output=True)
    return python


@pytest.mark.nightly  # installs a program of many packages
@pytest.mark.timeout(1800)
def test_an_export_of_training_is_evaluated(python_with_lm_eval: Path, tmp_path: Path) -> None:
    save("llama", tmp_path / "hf")
    tokenizer = Tokenizer(models.WordLevel(WORDS, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "hf" / "tokenizer.json"))
    special = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **special}
    (tmp_path / "hf" / "tokenizer_config.json").write_text(json.dumps(settings))
    configured(tmp_path)
    trained = command(
        "train", tmp_path / "run.yaml", "checkpoint.interval_steps=2", "checkpoint.export_hf_every_steps=2"
    )
    assert trained.returncode == 0, trained.stderr
    export = tmp_path / "run" / "exports" / "step_00000002"
    questions = [("a b", 0), ("a b c", 1), ("c c a", 2), ("d a", 0), ("b d d", 1), ("c", 2)]
    choices = [" a", " b", " d"]
    lines = [json.dumps({"question": text, "choices": choices, "label": label}) for text, label in questions]
    (tmp_path / "questions.jsonl").write_text("\n".join(lines) + "\n")
    reported = subprocess.run(
        [
            python_with_lm_eval,
            ROOT / "tests" / "training" / "export" / "evaluate_folder.py",
            export,
            tmp_path / "questions.jsonl",
        ],
        capture_output=True,
        text=True,
        env={**os.environ, "HF_HOME": str(tmp_path / "cache"), "PYTHONPATH": ""},
    )
    assert reported.returncode == 0, reported.stderr
    model = transformers.AutoModelForCausalLM.from_pretrained(export, dtype="float32")
    right = [_choice(model, text, choices) == label for text, label in questions]
    assert float(reported.stdout.split()[-1]) == pytest.approx(sum(right) / len(right))


def _choice(model: torch.nn.Module, text: str, choices: list[str]) -> int:
    """Returns the index of the word that the model finds most likely."""
    tokens = torch.tensor([[WORDS[word] for word in text.split()]])
    logits = model(tokens).logits[0, -1]
    return int(torch.stack([logits[WORDS[choice.strip()]] for choice in choices]).argmax())
