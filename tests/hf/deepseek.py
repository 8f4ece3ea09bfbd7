"""DeepSeek-V3 as it is published: FP8 blocks with scales, and a layer that predicts further ahead."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.hf.folders import save

BLOCK = 16
_SHARED = "model.layers.3.shared_head."


def save_published(folder: Path) -> dict[str, Tensor]:
    """Saves three layers and a depth, its projections in FP8; returns the tensors as plain numbers."""
    save("deepseek", folder, max_shard_size="1GB")
    tensors = load_file(folder / "model.safetensors")
    for name, value in tensors.items():
        if name.endswith("mlp.gate.weight"):
            tensors[name] = value.bfloat16()  # as it is published; transformers saves it in float32 since 5.24
    like = {name: value for name, value in tensors.items() if name.startswith("model.layers.2.")}
    for name, value in like.items():
        tensors[name.replace(".2.", ".3.", 1)] = (torch.randn(value.shape) * 0.3).to(value.dtype)
    hidden = tensors["model.norm.weight"].shape[0]
    for name in ("enorm", "hnorm", "shared_head.norm"):
        tensors[f"model.layers.3.{name}.weight"] = torch.randn(hidden).bfloat16()
    tensors["model.layers.3.eh_proj.weight"] = torch.randn(hidden, 2 * hidden).bfloat16()
    tensors["model.layers.3.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors[f"{_SHARED}head.weight"] = tensors["lm_head.weight"].clone()
    for name in tensors:
        if name.endswith("e_score_correction_bias"):
            tensors[name] = torch.randn(tensors[name].shape)  # float32, among bfloat16
    stored, meant = dict(tensors), dict(tensors)
    for name, value in tensors.items():
        if name.endswith("_proj.weight") and "eh_proj" not in name:
            stored[name], stored[f"{name}_scale_inv"], meant[name] = quantised(value)
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    quantisation = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [BLOCK, BLOCK]}
    config |= {"num_nextn_predict_layers": 1, "quantization_config": quantisation}
    (folder / "config.json").write_text(json.dumps(config))
    return meant


def quantised(value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns FP8 numbers, scales by block, and bfloat16 of their products, by plain loops."""
    rows, columns = value.shape
    scales = torch.empty(-(-rows // BLOCK), -(-columns // BLOCK))
    stored, meant = torch.empty(value.shape, dtype=torch.float8_e4m3fn), torch.empty_like(value)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            block = slice(i * BLOCK, (i + 1) * BLOCK), slice(j * BLOCK, (j + 1) * BLOCK)
            scales[i, j] = value[block].float().abs().max() / 448
            stored[block] = (value[block].float() / scales[i, j]).to(torch.float8_e4m3fn)
            meant[block] = (stored[block].float() * scales[i, j]).bfloat16()
    return stored, scales, meant
