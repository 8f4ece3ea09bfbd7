"""Published GPT-OSS: MXFP4 is read as the numbers that transformers makes of it, bit for bit."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from mtrain.base.errors import DataError
from mtrain.base.tensor_slice import TensorSlice
from mtrain.checkpoint.format.reader import CheckpointTensors
from mtrain.convert.exporting import export_hf
from mtrain.convert.importing import import_hf
from mtrain.convert.verifying import random_tokens, verify_hf
from mtrain.hf.io.block_scaled import Mxfp4
from mtrain.hf.io.folder import HfFolder
from mtrain.hf.io.matching import same_bits
from mtrain.hf.io.source import FolderTensors, open_source
from mtrain.hf.io.training import transformers_logits
from mtrain.plan.layout import Layout
from tests.hf import hf_ranks
from tests.hf.folders import save
from tests.messages import refuses
from tests.pool import Pool

FORMAT = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}
FILE = "model.safetensors"
FIRST = "model.layers.0.mlp.experts.gate_up_proj"


def save_published(folder: Path) -> dict[str, Tensor]:
    """Saves a model with its experts in MXFP4, and returns its tensors as transformers reads them."""
    save("gpt-oss", folder, max_shard_size="1GB")
    stored = load_file(folder / FILE)
    meant = dict(stored)
    for name in [name for name in stored if name.endswith("_proj") and ".experts." in name]:
        num_experts, inputs, outputs = stored.pop(name).shape
        blocks = torch.randint(256, (num_experts, outputs, inputs // 32, 16), dtype=torch.uint8)
        scales = torch.randint(120, 126, blocks.shape[:-1], dtype=torch.uint8)
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        meant[name] = convert_moe_packed_tensors(blocks, scales)
    save_file(stored, folder / FILE, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": FORMAT}))
    return meant


def test_every_code_under_every_scale_is_that_of_transformers(tmp_path: Path) -> None:
    save_published(tmp_path)
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).repeat(1, 256, 1, 1)
    scales = torch.arange(256, dtype=torch.uint8).view(1, 256, 1).repeat(1, 1, 16)
    save_file({"w_blocks": blocks, "w_scales": scales}, tmp_path / FILE)
    weights = Mxfp4(HfFolder(tmp_path))
    assert (weights.names(), weights.facts("w")) == ({"w"}, (torch.bfloat16, (1, 512, 256)))
    for dtype in (torch.bfloat16, torch.float32):
        assert same_bits(weights.tensor("w").to(dtype), convert_moe_packed_tensors(blocks, scales, dtype=dtype))


def test_published_weights_come_back_as_what_they_mean(pool: Pool, tmp_path: Path) -> None:
    theirs, ours, back = tmp_path / "theirs", tmp_path / "ours", tmp_path / "back"
    meant = save_published(theirs)
    import_hf(theirs, ours, None, num_workers=2)
    export_hf(ours, back, None, None, num_workers=1)
    verify_hf(ours, theirs, num_workers=1)
    found = load_file(back / FILE)
    assert found.keys() == meant.keys()
    assert all(same_bits(found[name], value) for name, value in meant.items())
    said = json.loads((back / "config.json").read_text())
    assert "quantization_config" not in said
    assert said["dtype"] == "bfloat16"
    tokens = random_tokens(57)
    expected = transformers_logits(theirs, tokens)
    assert torch.equal(transformers_logits(back, tokens), expected)
    np.testing.assert_allclose(
        pool.run(hf_ranks.logits, Layout(), ours)[0], expected, rtol=0, atol=2e-5 * float(expected.abs().max())
    )


def test_a_run_starts_from_the_same_numbers_as_from_an_import(tmp_path: Path) -> None:
    save_published(tmp_path / "theirs")
    import_hf(tmp_path / "theirs", tmp_path / "ours", None, num_workers=1)
    started, imported = FolderTensors(open_source(tmp_path / "theirs")), CheckpointTensors(tmp_path / "ours")
    assert started.tensors.keys() == imported.tensors.keys()
    for key, (dtype, shape) in started.tensors.items():
        for part in TensorSlice.whole(shape).cut(1000):
            assert same_bits(started.read(key, part).contiguous(), imported.read(key, part).contiguous()), key
        assert dtype == torch.bfloat16


@pytest.mark.parametrize("fault", ["no scales", "no blocks", "scales of another shape", "scales as numbers", "twice"])
def test_blocks_and_scales_that_do_not_fit_are_refused(tmp_path: Path, fault: str) -> None:
    save_published(tmp_path / "theirs")
    stored = load_file(tmp_path / "theirs" / FILE)
    scales = stored[f"{FIRST}_scales"]
    match fault:
        case "no scales":
            del stored[f"{FIRST}_scales"]
        case "no blocks":
            del stored[f"{FIRST}_blocks"]
        case "scales of another shape":
            stored[f"{FIRST}_scales"] = scales[:, 1:].contiguous()
        case "scales as numbers":
            stored[f"{FIRST}_scales"] = scales.float()
        case "twice":
            stored[FIRST] = torch.zeros(3, 32, 64, dtype=torch.bfloat16)
    save_file(stored, tmp_path / "theirs" / FILE)
    with refuses(DataError, FIRST):
        import_hf(tmp_path / "theirs", tmp_path / "ours", None, num_workers=1)
