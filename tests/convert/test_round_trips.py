"""Hugging Face -> checkpoint -> Hugging Face, judged by transformers and by megatron-core."""

import filecmp
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
import yaml

from mtrain.arch.layout import Layout
from mtrain.checkpoint.store.directory import load_entry, verify_files
from mtrain.config import Config
from mtrain.config.load import save_config
from mtrain.convert.exporting import export_hf
from mtrain.convert.importing import import_hf
from mtrain.convert.verifying import random_tokens, verify_hf
from mtrain.hf.configuration import load_config
from mtrain.hf.io.folder import HfFolder
from mtrain.hf.io.training import transformers_logits
from mtrain.runs.folder import RunFolder
from tests.core.state import checkpoint_ranks
from tests.hf import hf_ranks
from tests.hf.folders import CONFIGS, TOWERS, class_of, save
from tests.pool import Pool


def names(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*")}


LIKE_OTHERS = (
    "mistral",
    "qwen3-moe-unnormalised",
    "olmo2-grouped",
    "glm4-moe-lite",
    "smollm3",
    "smollm3-windowed",
    *TOWERS,
)
"""Models whose tensors have the names and shapes of llama, qwen3-moe, olmo2 and deepseek; their fields:
tests/hf/schema. Those around a text tower come back, and compute the same, by day in test_towers.py."""


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.nightly] if name in LIKE_OTHERS else []) for name in [*CONFIGS, *TOWERS]],
)
def test_a_model_comes_back_byte_for_byte_and_computes_the_same(pool: Pool, tmp_path: Path, name: str) -> None:
    theirs, ours, back = tmp_path / "theirs", tmp_path / "ours", tmp_path / "back"
    model = save(name, theirs)
    (theirs / "tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}')
    (theirs / "modeling_evil.py").write_text("raise SystemExit")
    import_hf(theirs, ours, None, num_workers=2)
    proof = export_hf(ours, back, None, None, num_workers=2)

    assert proof.num_tensors == len(HfFolder(theirs).names())
    assert names(back) == names(theirs) - {"modeling_evil.py"}
    assert [file for file in names(back) if not filecmp.cmp(theirs / file, back / file, shallow=False)] == []
    auto = class_of(model.config)
    again = auto.from_pretrained(back, dtype="auto", attn_implementation="eager").eval()
    for key, value in model.state_dict().items():
        assert torch.equal(value, again.state_dict()[key]), key
    tokens = random_tokens(model.config.get_text_config().vocab_size)
    with torch.no_grad():
        assert torch.equal(model(tokens).logits, again(tokens).logits)
    expected = transformers_logits(back, tokens).numpy()
    np.testing.assert_allclose(
        pool.run(hf_ranks.logits, Layout(), ours)[0], expected, rtol=0, atol=2e-5 * np.abs(expected).max()
    )


def test_an_alias_is_the_model_that_its_bytes_are_under_the_other_name(pool: Pool, tmp_path: Path) -> None:
    """Kimi-K2 has DeepSeek-V3's layers and brings Python code, which transformers would need to read its name."""
    theirs, ours, back = tmp_path / "theirs", tmp_path / "ours", tmp_path / "back"
    named = save("deepseek", theirs)
    said = json.loads((theirs / "config.json").read_text())
    code = {"AutoConfig": "configuration_deepseek.DeepseekV3Config", "AutoModelForCausalLM": "modeling_deepseek.Model"}
    (theirs / "config.json").write_text(json.dumps(said | {"model_type": "kimi_k2", "auto_map": code}))
    for name in ("tiktoken.model", "tekken.json", "params.json", "tokenizer.model.v3"):
        (theirs / name).write_text("IQ== 0")
    for name in ("configuration_deepseek.py", "modeling_deepseek.py"):
        (theirs / name).write_text("raise SystemExit")
    import_hf(theirs, ours, None, num_workers=1)
    export_hf(ours, back, None, None, num_workers=1)
    assert names(back) == names(theirs) - {"configuration_deepseek.py", "modeling_deepseek.py"}
    assert [file for file in names(back) if not filecmp.cmp(theirs / file, back / file, shallow=False)] == []
    verify_hf(ours, theirs, num_workers=1)
    assert "data" not in yaml.safe_load((ours / "model.yaml").read_text()), "a tokenizer that nothing here reads"

    tokens = random_tokens(57)
    with torch.no_grad():
        named.set_experts_implementation("eager")
        expected = named.float()(tokens).logits
    assert torch.equal(transformers_logits(theirs, tokens), expected)
    np.testing.assert_allclose(
        pool.run(hf_ranks.logits, Layout(), ours)[0], expected, rtol=0, atol=2e-5 * float(expected.abs().max())
    )


def test_an_import_loads_on_uneven_stages_and_tensor_parallel_ranks(pool: Pool, tmp_path: Path) -> None:
    save("qwen3", tmp_path / "theirs")
    import_hf(tmp_path / "theirs", tmp_path / "ours", None, num_workers=1)
    verify_files(load_entry(tmp_path / "ours"), load_entry(tmp_path / "ours").manifest.files)
    path = tmp_path / "run.yaml"
    path.write_text(
        "run: {dir: unused}\ntrain: {global_batch_size: 2, num_steps: 1, precision: bf16}\noptimizer: {lr: 1}\n"
        "data: {kind: mock, seq_length: 8}\nlayout: {tp: 2, pp: 2, stage_layers: [1, 2]}\n"
    )
    config = load_config([path, tmp_path / "ours" / "model.yaml"], [])
    assert config.checkpoint.initialize_from == str(tmp_path / "ours")
    split = pool.run(hf_ranks.weights, Layout.from_config(config, 4), tmp_path / "ours", config)[0]
    alone = Config.model_validate({**config.model_dump(), "layout": {}})
    whole = pool.run(hf_ranks.weights, Layout(), tmp_path / "ours", alone)[0]
    assert split.keys() == whole.keys()
    for key, value in whole.items():
        rows = 57 if value.shape[0] > 57 and "layers" not in key else value.shape[0]
        np.testing.assert_array_equal(split[key][:rows], value[:rows], err_msg=key)


@pytest.mark.parametrize("metadata", ["absent", None, [], "x", {}, {"total_size": 1, "by": "hand"}], ids=repr)
def test_an_export_has_the_index_that_transformers_needs(tmp_path: Path, metadata: Any) -> None:
    """transformers looks for an object under `metadata`, which other programs leave out."""
    save("llama", tmp_path / "theirs")
    index = tmp_path / "theirs" / "model.safetensors.index.json"
    said = {"metadata": metadata, "weight_map": json.loads(index.read_text())["weight_map"]}
    index.write_text(json.dumps({name: value for name, value in said.items() if value != "absent"}))
    import_hf(tmp_path / "theirs", tmp_path / "ours", None, num_workers=1)
    export_hf(tmp_path / "ours", tmp_path / "back", None, None, num_workers=1)
    found = json.loads((tmp_path / "back" / index.name).read_text())
    size = sum(
        file.entries[name].stop - file.entries[name].start
        for file in HfFolder(tmp_path / "back").files.values()
        for name in file.entries
    )
    assert found["metadata"] == (metadata if isinstance(metadata, dict) else {}) | {"total_size": size}
    assert found["weight_map"] == said["weight_map"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_casts_are_those_that_were_asked_for(tmp_path: Path, dtype: torch.dtype) -> None:
    model = save("llama", tmp_path / "theirs")
    import_hf(tmp_path / "theirs", tmp_path / "ours", dtype, num_workers=1)
    export_hf(tmp_path / "ours", tmp_path / "back", None, None, num_workers=1)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back", dtype="auto")
    assert again.dtype == dtype
    for key, value in model.state_dict().items():
        assert torch.equal(value.to(dtype), again.state_dict()[key]), key


def test_a_trained_model_is_exported_from_shards(pool: Pool, tmp_path: Path) -> None:
    """The run began with Megatron-LM's weights: bf16 weights as they compute, or float32 main weights."""
    (tmp_path / "megatron").mkdir()
    (tmp_path / "megatron" / ".metadata").touch()
    config = Config.model_validate(
        {
            "run": {"dir": str(tmp_path)},
            "model": {
                "num_layers": 3,
                "hidden_size": 32,
                "ffn_hidden_size": 48,
                "num_attention_heads": 4,
                "num_query_groups": 2,
                "vocab_size": 57,
                "vocab_multiple": 4,
                "qk_norm": True,
            },
            "train": {"global_batch_size": 2, "num_steps": 3, "precision": "bf16"},
            "optimizer": {"lr": 1e-2, "schedule": "constant"},
            "data": {"kind": "mock", "seq_length": 8},
            "layout": {"tp": 2, "pp": 2, "stage_layers": [2, 1]},
            "checkpoint": {"initialize_from": str(tmp_path / "megatron")},
        }
    )
    save_config(config, tmp_path / "config.yaml")
    layout, folder = Layout.from_config(config, 4), tmp_path / "checkpoints"
    pool.run(checkpoint_ranks.train, layout, config, folder, None, 2, 1)
    export_hf(tmp_path, tmp_path / "half", None, None, num_workers=1)
    export_hf(tmp_path, tmp_path / "full", None, torch.float32, num_workers=2)

    half, full = (
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype="auto") for name in ("half", "full")
    )
    assert (half.config.model_type, half.dtype, full.dtype) == ("qwen3", torch.bfloat16, torch.float32)
    wider = [key for key, value in full.state_dict().items() if not torch.equal(value, value.bfloat16().float())]
    assert "model.layers.1.mlp.down_proj.weight" in wider
    for key, value in half.state_dict().items():
        assert torch.equal(value, full.state_dict()[key].bfloat16()), key
    verify_hf(tmp_path, tmp_path / "half", num_workers=1)
    verify_hf(tmp_path, tmp_path / "full", num_workers=1)
    for exported, is_main in ((half.float(), False), (full, True)):
        with torch.no_grad():
            expected = exported(random_tokens(57)).logits.numpy()
        ours = pool.run(hf_ranks.logits, Layout(), folder / "step_00000001", is_main)[0]
        np.testing.assert_allclose(ours, expected, rtol=0, atol=2e-5)


def test_an_export_carries_the_chat_template_that_was_trained(tmp_path: Path) -> None:
    theirs, run = tmp_path / "theirs", tmp_path / "run"
    save("llama", theirs)
    (theirs / "tokenizer_config.json").write_text('{"chat_template": "theirs"}')
    checkpoint = run / "checkpoints" / "step_00000000"
    checkpoint.parent.mkdir(parents=True)
    import_hf(theirs, checkpoint, None, num_workers=1)
    RunFolder(run).write_chat_templates({"chat_template.jinja": "ours"})
    export_hf(checkpoint, tmp_path / "back", None, None, num_workers=1)
    assert (tmp_path / "back" / "chat_template.jinja").read_text() == "ours"
    assert (tmp_path / "back" / "tokenizer_config.json").read_text() == "{}\n"
    RunFolder(run).write_chat_templates({})
    export_hf(checkpoint, tmp_path / "untouched", None, None, num_workers=1)
    assert filecmp.cmp(
        theirs / "tokenizer_config.json", tmp_path / "untouched" / "tokenizer_config.json", shallow=False
    )
