"""A run of adapters from start to finish by its commands: trained, exported merged and separately, prompted."""

from __future__ import annotations

import json
from pathlib import Path

import peft
import pytest
import torch
import transformers

from mtrain.arch.layout import Layout
from mtrain.convert.adapters import export_adapter
from mtrain.hf.configuration import load_config
from mtrain.hf.tokenizer.tokenizer import load_tokenizer
from tests.hf.folders import save
from tests.pool import Pool
from tests.training import engine_ranks
from tests.training.sampling.test_generate import TEMPLATE, WORDS, word_tokenizer
from tests.training.test_start_from_hf import command, configured

MESSAGES = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "a a"}]
IDS = [WORDS.index(word) for word in ("user", "a", "<end>", "assistant", "a", "a", "<end>")]
"""Token ids that the template of the run makes of the conversation, by hand."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Makes a finished run on two ranks, with another template than that of its model."""
    folder = tmp_path_factory.mktemp("adapters")
    save("llama", folder / "hf", torch.float32, num_key_value_heads=2)
    word_tokenizer(folder / "hf")
    (folder / "hf" / "chat_template.jinja").write_text("of the model")
    (folder / "hf" / "README.md").write_text("of the model")
    (folder / "own.jinja").write_text(TEMPLATE)
    (folder / "train.jsonl").write_text(4 * (json.dumps({"messages": MESSAGES}) + "\n"))
    configured(folder)
    data = {
        "kind": "sft",
        "seq_length": 16,
        "tokenizer": str(folder / "hf"),
        "chat_template": str(folder / "own.jinja"),
    }
    keys = {"adapter": {"rank": 2}, "data": data | {"train": [{"path": str(folder / "train.jsonl")}]}}
    settings = [f"{name}={json.dumps(value)}" for name, value in keys.items()]
    settings += ["optimizer.lr=0.1", "checkpoint.interval_steps=2", "checkpoint.export_hf_every_steps=2", "layout.tp=2"]
    result = command("launch", "local", "-n", 2, folder / "run.yaml", *settings)
    assert result.returncode == 0, result.stderr
    return folder


@torch.no_grad()
def logits_of(model: torch.nn.Module) -> torch.Tensor:
    found: torch.Tensor = model.eval()(torch.tensor([IDS])).logits
    return found


def test_both_exports_compute_the_same_and_write_conversations_as_they_were_trained(folder: Path) -> None:
    """The exports are one merged while training, and an adapter for a server."""
    merged = folder / "run" / "exports" / "step_00000002"
    export_adapter(folder / "run", folder / "adapter", None)
    first = transformers.AutoModelForCausalLM.from_pretrained(folder / "hf", dtype=torch.float32)
    plain = logits_of(first)
    apart = logits_of(peft.PeftModel.from_pretrained(first, folder / "adapter"))
    whole = logits_of(transformers.AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32))
    assert (apart - plain).abs().max() > 1e-2, "nothing was trained"
    assert (apart - whole).abs().max() < 1e-5 * whole.abs().max()
    for exported in (merged, folder / "adapter"):
        tokenizer = transformers.AutoTokenizer.from_pretrained(exported)
        assert tokenizer.apply_chat_template(MESSAGES, return_dict=False) == IDS
    assert not (folder / "adapter" / "README.md").exists()
    assert (folder / "hf" / "chat_template.jinja").read_text() == "of the model"


def test_a_run_of_adapters_is_asked_with_its_frozen_model(folder: Path) -> None:
    result = command("generate", folder / "run", "--prompt", "a", "--chat", "--max-new-tokens", 3)
    assert result.returncode == 0, result.stderr
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "run" / "exports" / "step_00000002")
    question = torch.tensor([[WORDS.index(word) for word in ("user", "a", "<end>", "assistant")]])
    stops = [WORDS.index("<end>"), WORDS.index("</s>")]
    found = model.generate(question, max_new_tokens=3, do_sample=False, eos_token_id=stops, pad_token_id=0)[0]
    answer = [int(each) for each in found[question.shape[1] :] if int(each) not in stops]
    assert load_tokenizer(folder / "hf").decode(answer) in result.stdout


@pytest.mark.nightly  # streamed merged by day in tests/core/adapters/test_peft.py
def test_an_engine_exports_adapters_merged(folder: Path, pool: Pool, tmp_path: Path) -> None:
    """The start is the folder of PEFT, which serves like any other start."""
    export_adapter(folder / "run", tmp_path / "adapter", None)
    adapter = {"rank": 2, "path": str(tmp_path / "adapter")}
    config = load_config([folder / "run.yaml"], [f"adapter={json.dumps(adapter)}", "layout.tp=2"])
    pool.run(engine_ranks.exported, Layout(tp=2), config, str(tmp_path / "out"))
    given = (tmp_path / "out", folder / "run" / "exports" / "step_00000002")
    own, merged = (logits_of(transformers.AutoModelForCausalLM.from_pretrained(each)) for each in given)
    assert torch.equal(own, merged)
