"""Round trip from a folder of Hugging Face to a model that answers in its chat template, and back into such a
folder."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from mtrain.arch.layout import Layout
from mtrain.config import Config
from mtrain.convert.exporting import export_hf
from mtrain.data.formats.documents import TextFiles
from mtrain.data.preparation.train_tokenizer import train_hf_tokenizer
from mtrain.hf.configuration import load_config
from mtrain.hf.tokenizer.tokenizer import load_tokenizer
from mtrain.training.sampling.prompts import questions_of
from tests.pool import Pool
from tests.training.one_process import train_fresh
from tests.warm import completed

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
QUESTIONS = ["what is a reader?", "and <|im_end|>?"]
NEW_TOKENS = 12
VOCABULARY = 280


def config_of(folder: Path) -> Config:
    data = {"kind": "sft", "seq_length": 64, "packing": {}, "tokenizer": str(folder / "hf")}
    data |= {"cache_dir": str(folder / "cache"), "train": [{"path": str(folder / "chat.jsonl")}]}
    content = {
        "run": {"dir": str(folder / "run")},
        "model": {"hf": str(folder / "hf")},
        "train": {"global_batch_size": 4, "micro_batch_size": 1, "num_steps": 30, "precision": "fp32"},
        "optimizer": {"lr": 1e-2, "schedule": "constant"},
        "data": data,
        "metrics": {"tensorboard": False},
    }
    (folder / "run.yaml").write_text(json.dumps(content))
    return load_config([folder / "run.yaml"])


@pytest.fixture(scope="module")
def folder(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Exports a run on dialogues that began with a new model and a trained tokenizer in such a folder."""
    folder = tmp_path_factory.mktemp("chat")
    words = ["reader", "writer", "index", "value"]
    answers = [f"a {word} is a {other}." for word in words for other in words]
    (folder / "text.txt").write_text("\n".join(answers * 4))
    train_hf_tokenizer(TextFiles([folder / "text.txt"]), folder / "hf", VOCABULARY, chat_template="chatml")
    torch.manual_seed(3)
    settings = LlamaConfig(**SIZES, vocab_size=VOCABULARY, eos_token_id=0, bos_token_id=None, tie_word_embeddings=True)
    AutoModelForCausalLM.from_config(settings).save_pretrained(folder / "hf")
    lines = [
        {"messages": [{"role": "user", "content": "what?"}, {"role": "assistant", "content": answer}]}
        for answer in answers
    ]
    (folder / "chat.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    config = config_of(folder)
    pool.run(
        train_fresh, Layout(cp=2), config.model_copy(update={"layout": config.layout.model_copy(update={"cp": 2})})
    )
    export_hf(folder / "run", folder / "out", None, None, num_workers=1)
    return folder


@pytest.mark.nightly  # test_endings.py and test_answers_end.py have ends and answers by day
def test_an_export_answers_as_the_run_does(folder: Path) -> None:
    """Transformers reads the exported folder: it has the same ids of a question, and the same greedy continuation."""
    arguments = [value for question in QUESTIONS for value in ("--prompt", question)]
    done = completed(
        [
            sys.executable,
            "-m",
            "mtrain",
            "generate",
            folder / "run",
            "--chat",
            "--max-new-tokens",
            NEW_TOKENS,
            *arguments,
        ]
    )
    assert done.returncode == 0, done.stderr
    run, tokenizer = load_config([folder / "run" / "config.yaml"]), load_tokenizer(folder / "hf")
    theirs = AutoTokenizer.from_pretrained(str(folder / "out"))
    model = AutoModelForCausalLM.from_pretrained(str(folder / "out"), dtype=torch.float32)
    expected = ""
    for question in QUESTIONS:
        messages = [{"role": "user", "content": question}]
        ids = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        ours = questions_of(run, tokenizer, [question], as_chat=True)[0]
        assert ours.stop_ids == set(theirs.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"]))
        if "<|" not in question:  # there they differ: the text of a special token in a question stays text here
            assert ids == ours.ids
        assert theirs.decode(ours.ids) == theirs.decode(ids)
        found = model.generate(
            torch.tensor([ours.ids]),
            attention_mask=torch.ones(1, len(ours.ids), dtype=torch.int64),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            pad_token_id=0,
        )[0, len(ours.ids) :]
        answer = theirs.decode(found, skip_special_tokens=True)
        expected += f"\n> {question}\n{answer}\n"
    assert done.stdout == expected
    assert " is " in expected, "it has learned something"


def test_the_export_has_the_template_and_tokenizer_of_the_run(folder: Path) -> None:
    for name in ("tokenizer.json", "chat_template.jinja"):
        assert (folder / "out" / name).read_bytes() == (folder / "hf" / name).read_bytes()
    settings = json.loads((folder / "hf" / "tokenizer_config.json").read_text())
    assert json.loads((folder / "out" / "tokenizer_config.json").read_text()) == {**settings, "eos_token": "<|im_end|>"}


def test_a_run_that_drew_its_weights_exports_its_tokenizer_too(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(folder / "run", tmp_path / "run")
    path = tmp_path / "run" / "config.yaml"
    path.write_text(re.sub(r"^  hf: .*$", "  hf: null", path.read_text(), flags=re.MULTILINE))
    export_hf(tmp_path / "run", tmp_path / "out", None, None, num_workers=1)
    names = ("tokenizer.json", "chat_template.jinja")
    assert all((tmp_path / "out" / name).read_bytes() == (folder / "hf" / name).read_bytes() for name in names)
    assert AutoTokenizer.from_pretrained(str(tmp_path / "out")).eos_token == "<|im_end|>"
    path.write_text(path.read_text().replace(str(folder / "hf"), str(tmp_path / "gone")))
    shutil.rmtree(tmp_path / "run" / "chat_templates")
    export_hf(tmp_path / "run", tmp_path / "without", None, None, num_workers=1)
    assert f"no tokenizer.json at {tmp_path / 'gone'}, so" in capsys.readouterr().out
    assert not (tmp_path / "without" / "tokenizer.json").exists()


def test_a_run_with_another_tokenizer_exports_that_one(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "run", tmp_path / "run")
    shutil.copytree(folder / "hf", tmp_path / "other", ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    content = json.loads((tmp_path / "other" / "tokenizer.json").read_text())
    content["added_tokens"][0]["lstrip"] = True
    (tmp_path / "other" / "tokenizer.json").write_text(json.dumps(content))
    path = tmp_path / "run" / "config.yaml"
    text = path.read_text().replace("allow_other_tokenizer: false", "allow_other_tokenizer: true")
    path.write_text(re.sub(r"^  tokenizer: .*$", f"  tokenizer: {tmp_path / 'other'}", text, flags=re.MULTILINE))
    export_hf(tmp_path / "run", tmp_path / "out", None, None, num_workers=1)
    assert json.loads((tmp_path / "out" / "tokenizer.json").read_text()) == content
    assert AutoTokenizer.from_pretrained(str(tmp_path / "out")).eos_token == "<|im_end|>"
