"""Runs whose speed was published, with their sources; the cost model is held to them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mtrain.config import Config
from mtrain.plan.search.hardware import GIB, Cluster, Gpu

KORTHIKANTI = "Korthikanti et al. 2022, arXiv 2205.05198, table 5 (selective recomputation, sequence parallelism)"
LLAMA3 = "Grattafiori et al. 2024, arXiv 2407.21783, table 4"
TITAN_H100 = "torchtitan, benchmarks/llama3_h100_202412_torchtitan.md: 33 to 39 %, by 6,667 tokens a second and GPU"
TITAN_A100 = "torchtitan, performance.md of its documentation in 2024: Llama 3 on 64 A100"
MEGATRON = "Megatron-LM, README, Training Speed and Scalability: strong scaling of GPT-3 from 96 to 4608 H100"


@dataclass(frozen=True)
class Published:
    """One published run."""

    name: str
    source: str
    mfu: float
    gpu: str
    num_gpus: int
    config: Config


def _config(model: dict[str, Any], layout: dict[str, Any], batch: int, seq: int, **train: Any) -> Config:
    tp = layout.get("tp", 1)
    return Config.model_validate(
        {
            "run": {"dir": "unused"},
            "model": model,
            "layout": {"sp": tp > 1, **layout},
            "train": {
                "global_batch_size": batch,
                "num_steps": 10,
                "overlap_grad_reduce": True,
                "overlap_param_gather": True,
                **train,
            },
            "optimizer": {"lr": 1e-4},
            "data": {"kind": "mock", "seq_length": seq},
        }
    )


def gpt(layers: int, hidden: int, heads: int, vocab: int) -> dict[str, Any]:
    """Returns a model of GPT-3's kind."""
    sizes = {"num_layers": layers, "hidden_size": hidden, "ffn_hidden_size": 4 * hidden, "num_attention_heads": heads}
    return {**sizes, "vocab_size": vocab, "norm": "layernorm", "activation": "gelu", "linear_bias": True}


def llama(layers: int, hidden: int, ffn: int, heads: int) -> dict[str, Any]:
    """Returns a Llama 3 model."""
    sizes = {"num_layers": layers, "hidden_size": hidden, "ffn_hidden_size": ffn, "num_attention_heads": heads}
    return {**sizes, "num_query_groups": 8, "vocab_size": 128256}


_8B, _70B, _405B = llama(32, 4096, 14336, 32), llama(80, 8192, 28672, 64), llama(126, 16384, 53248, 128)
_405B_STAGES = {"tp": 8, "pp": 16, "vpp": 4, "first_stage_layers": 1, "last_stage_layers": 1}
"""Layout of eight layers per rank but for the first and the last, interleaved; the paper omits how finely."""
_SELECTIVE: dict[str, Any] = {"recompute": "selective"}

RUNS = (
    Published(
        "GPT 22B", KORTHIKANTI, 0.415, "a100", 8,
        _config(gpt(48, 6144, 64, 51200), {"tp": 8}, 4, 2048, micro_batch_size=4, **_SELECTIVE),
    ),
    Published(
        "GPT 175B", KORTHIKANTI, 0.514, "a100", 64,
        _config(gpt(96, 12288, 96, 51200), {"tp": 8, "pp": 8, "vpp": 3}, 64, 2048, **_SELECTIVE),
    ),
    Published(
        "GPT 530B", KORTHIKANTI, 0.560, "a100", 280,
        _config(gpt(105, 20480, 128, 51200), {"tp": 8, "pp": 35, "vpp": 3}, 280, 2048, **_SELECTIVE),
    ),
    Published(
        "GPT 1T", KORTHIKANTI, 0.563, "a100", 512,
        _config(gpt(128, 25600, 160, 51200), {"tp": 8, "pp": 64}, 512, 2048, **_SELECTIVE),
    ),
    Published(
        "GPT-3 175B", MEGATRON, 0.47, "h100", 96,
        _config(gpt(96, 12288, 96, 131072), {"tp": 4, "pp": 8, "vpp": 6}, 1152, 4096),
    ),
    Published(
        "GPT-3 175B", MEGATRON, 0.42, "h100", 4608,
        _config(gpt(96, 12288, 96, 131072), {"tp": 4, "pp": 8, "vpp": 6}, 1152, 4096),
    ),
    Published("Llama 3 405B", LLAMA3, 0.43, "h100", 8192, _config(_405B, _405B_STAGES, 2048, 8192)),
    Published("Llama 3 405B", LLAMA3, 0.41, "h100", 16384, _config(_405B, _405B_STAGES, 2048, 8192)),
    Published(
        "Llama 3 405B, 128k", LLAMA3, 0.38, "h100", 16384, _config(_405B, {**_405B_STAGES, "cp": 16}, 128, 131072)
    ),
    Published(
        "Llama 3.1 8B", TITAN_H100, 0.39, "h100", 8,
        _config(_8B, {}, 16, 8192, micro_batch_size=2, **_SELECTIVE, recompute_modules=["core_attn"]),
    ),
    Published("Llama 3 8B", TITAN_A100, 0.582, "a100", 64, _config(_8B, {}, 64, 8192, **_SELECTIVE)),
    Published("Llama 3 70B", TITAN_A100, 0.517, "a100", 64, _config(_70B, {}, 64, 8192, recompute="full")),
)  # fmt: skip

V6E = Cluster(Gpu("v6e", 918e12, 115e12, 32 * GIB, 1.64e12, 224e9, 25e9, 0.62, 0.42), gpus_per_node=256)
"""A pod of Google's Trillium by its data sheet, all chips on one interconnect; efficiencies are those of an h100."""
MAXTEXT_SOURCE = "MaxText v0.2.0, documentation, reference/models/tiering.html: Trillium, bf16, sequences of 8192"
MAXTEXT = (
    Published("Llama 3.1 8B", MAXTEXT_SOURCE, 0.4546, "v6e", 256, _config(_8B, {}, 768, 8192, **_SELECTIVE)),
    Published("Llama 3.1 70B", MAXTEXT_SOURCE, 0.5033, "v6e", 256, _config(_70B, {}, 512, 8192, **_SELECTIVE)),
    Published("Llama 3.1 405B", MAXTEXT_SOURCE, 0.3855, "v6e", 256, _config(_405B, {}, 256, 8192, recompute="full")),
)
"""Runs whose batches and recomputation are not published: core attention is assumed, and for 405B all layers, as 32 GiB
per chip leave no choice."""

GROWING = (
    *((_config(_8B, {}, 512, 8192, **_SELECTIVE), num) for num in (8, 64, 512)),
    *((_config(_70B, {"tp": 8, "pp": 4, "vpp": 5}, 5120, 8192), num) for num in (64, 512, 1024, 4096, 10240)),
)
"""Llama 3 8B and 70B from 8 to 10,240 GPUs with a fixed batch: (configuration, number of h100)."""
