"""Published DeepSeek-V3: scaled FP8 is read as the numbers that it means, depths ahead travel with the rest."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from mtrain.arch.layout import Layout
from mtrain.base.errors import DataError
from mtrain.checkpoint.format.reader import CheckpointTensors
from mtrain.convert.exporting import export_hf
from mtrain.convert.importing import import_hf
from mtrain.convert.verifying import random_tokens
from mtrain.hf.io.training import transformers_logits
from tests.hf import hf_ranks
from tests.hf.deepseek import save_published
from tests.hf.folders import save
from tests.messages import refuses
from tests.pool import Pool

SCALE = "model.layers.1.mlp.experts.2.up_proj.weight_scale_inv"


def test_scaled_weights_and_depths_come_back_as_what_they_mean(pool: Pool, tmp_path: Path) -> None:
    meant = save_published(tmp_path / "theirs")
    import_hf(tmp_path / "theirs", tmp_path / "ours", torch.bfloat16, num_workers=2)
    export_hf(tmp_path / "ours", tmp_path / "back", None, None, num_workers=1)
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert back.keys() == meant.keys()
    for name, value in meant.items():
        assert torch.equal(back[name], value), name
        assert back[name].dtype == value.dtype, name  # the bias of the choice stays float32
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    assert "quantization_config" not in config
    assert (config["num_nextn_predict_layers"], config["dtype"]) == (1, "bfloat16")
    tensors = CheckpointTensors(tmp_path / "ours").tensors
    assert tensors["mtp.layers.0.transformer_layer.mlp.experts.experts.linear_fc1.weight"].shape == (6, 48, 32)
    assert tensors["mtp.layers.0.eh_proj.weight"].shape == (32, 64)
    expected = transformers_logits(tmp_path / "back", random_tokens(57)).numpy()
    found = pool.run(hf_ranks.logits, Layout(), tmp_path / "ours")[0]
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-5 * np.abs(expected).max())


def test_a_tied_table_may_lie_there_twice(tmp_path: Path) -> None:
    save("llama-tied", tmp_path / "theirs", max_shard_size="1GB")
    path = tmp_path / "theirs" / "model.safetensors"
    tensors = load_file(path)
    save_file({**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, path, {"format": "pt"})
    import_hf(tmp_path / "theirs", tmp_path / "ours", None, num_workers=1)
    export_hf(tmp_path / "ours", tmp_path / "back", None, None, num_workers=1)
    assert (tmp_path / "back" / "model.safetensors").read_bytes() == path.read_bytes()


@pytest.mark.parametrize("fault", ["missing", "misshaped", "copy"])
def test_missing_scales_and_false_copies_are_refused(tmp_path: Path, fault: str) -> None:
    save_published(tmp_path / "theirs")
    path = tmp_path / "theirs" / "model.safetensors"
    tensors = load_file(path)
    if fault == "missing":
        del tensors[SCALE]
    elif fault == "misshaped":
        tensors[SCALE] = torch.ones(3, 3)
    else:
        tensors["model.layers.3.shared_head.head.weight"][5, 5] += 1
    save_file(tensors, path)
    with refuses(DataError, "shared_head.head.weight" if fault == "copy" else SCALE):
        import_hf(tmp_path / "theirs", tmp_path / "ours", None, num_workers=1)


def test_another_quantisation_is_refused(tmp_path: Path) -> None:
    save_published(tmp_path / "theirs")
    path = tmp_path / "theirs" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": {"quant_method": "awq"}}))
    with refuses(DataError, "'awq'"):
        import_hf(tmp_path / "theirs", tmp_path / "ours", None, num_workers=1)


@pytest.mark.parametrize(
    "said",
    ["fp8", 8, ["fp8"], {"quant_method": "fp8"}]
    + [{"quant_method": "fp8", "weight_block_size": block} for block in (128, [128], [0, 128], [128, "a"], [128, 1.5])]
    + [{"quant_method": "gptq", "weight_block_size": [128, 128]}]
    + [{"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {}}],
    ids=str,
)
def test_another_format_is_one_message(tmp_path: Path, said: Any) -> None:
    save_published(tmp_path / "theirs")
    path = tmp_path / "theirs" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": said}))
    with refuses(DataError) as caught:
        import_hf(tmp_path / "theirs", tmp_path / "ours", None, num_workers=1)
    assert caught.value.exit_code == 3
    assert "\n" not in str(caught.value)
