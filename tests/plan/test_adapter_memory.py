"""The memory of finetuning by adapters, compared with what ranks allocate, and with 70B parameters on meta."""

from __future__ import annotations

from typing import Any

import peft
import pytest
import torch
import transformers

from mtrain import arch
from mtrain.arch.layout import Layout
from mtrain.hf.configuration import load_config
from tests.paths import CONFIGS
from tests.plan.memory_ranks import measured
from tests.plan.test_memory import long_rows
from tests.pool import Pool

NONE, FULL, LORA = "train.recompute=none", "train.recompute=full", "adapter.rank=16"
NARROW, CHUNKS = "adapter.base_dtype=bf16", "loss.chunk_tokens=100"
CASES: list[tuple[Layout, list[tuple[str, ...]]]] = [
    (
        Layout(),
        [
            (NONE, LORA, "train.precision=fp32"),
            (NONE, LORA, "train.precision=bf16", "adapter.targets=[qkv]"),
            (FULL, LORA, "train.precision=fp32", "adapter.targets=[qkv]"),
            (NONE, LORA, "train.precision=fp32", NARROW, CHUNKS),
            (NONE, LORA, "train.precision=fp32", "adapter.kind=dora"),
            (NONE, LORA, "train.precision=fp32", "adapter.targets=[embedding,output]", CHUNKS),
            (NONE, LORA, "train.precision=bf16", "adapter.modules_to_save=[embedding,output]"),
            (NONE, LORA, "train.precision=fp32", NARROW, "adapter.modules_to_save=[output]"),
            (NONE, LORA, "train.precision=fp32", NARROW, "adapter.modules_to_save=[norms]"),
            (NONE, LORA, "train.precision=bf16", "adapter.modules_to_save=[norms]"),
        ],
    ),
    (Layout(tp=2, sp=True), [(NONE, LORA, "train.precision=fp32", NARROW)]),
]


@pytest.mark.parametrize(
    ("layout", "changes"), CASES, ids=lambda value: str(value) if isinstance(value, Layout) else ""
)
def test_the_estimate_with_a_frozen_model_is_what_ranks_allocate(
    layout: Layout, changes: list[tuple[str, ...]], pool: Pool
) -> None:
    """Parts that a frozen weight does not need are not counted, those that adapters keep are: within 10 %."""
    small: tuple[str, ...] = ("data.seq_length=384", "model.vocab_size=1000", "model.num_layers=2", "layout.cp=1")
    small += (f"layout.tp={layout.tp}", f"layout.sp={str(layout.sp).lower()}")
    configs = [long_rows(*small, *each) for each in changes]
    ranks = pool.run(measured, layout, configs)
    for number, config in enumerate(configs):
        found, estimate = [rank[number] for rank in ranks], arch.memory_per_rank(config, layout, 0)
        states = (estimate.weights_bytes, estimate.gradients_bytes, estimate.optimizer_bytes)
        assert {(each.weights_bytes, each.gradients_bytes, each.optimizer_bytes) for each in found} == {states}
        worst = max(each.forward_backward_bytes for each in found)
        assert estimate.activations_bytes == pytest.approx(worst, rel=0.1)
        assert estimate.total_bytes == pytest.approx(sum(states) + worst, rel=0.1)


REPLICATED = (
    "norm.weight",
    "layernorm.weight",
    *(f"{name}_proj.lora_A" for name in ("q", "k", "v", "gate", "up")),
    *(f"{name}_proj.lora_B" for name in ("o", "down")),
)
"""Names of tensors that every TP rank holds whole: A of what is cut by rows, B of what is cut by columns."""


def on_meta() -> Any:
    """Builds Llama 3 70B in transformers with adapters of PEFT, without a single number."""
    sizes = {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64}
    architecture = transformers.LlamaConfig(
        **sizes, num_key_value_heads=8, vocab_size=128256, tie_word_embeddings=False
    )
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(architecture)
        return peft.get_peft_model(model, peft.LoraConfig(r=16, target_modules=targets), low_cpu_mem_usage=True)


@pytest.mark.nightly  # frozen and learned bytes are exact by day on the ranks above
def test_a_frozen_model_of_70b_is_counted_as_it_is_built() -> None:
    files = [CONFIGS / "model" / "llama3_8b.yaml", CONFIGS / "run" / "lora.yaml"]
    sizes = {"num_layers": 80, "hidden_size": 8192, "ffn_hidden_size": 28672, "num_attention_heads": 64}
    wider = [f"model.{name}={size}" for name, size in sizes.items()]
    user = load_config(files, [*wider, "layout.tp=8", "layout.sp=true", "layout.pp=2"])
    layout = Layout.from_config(user, 16)
    frozen = trained = 0
    for name, parameter in on_meta().named_parameters():
        is_late = ".layers." in name and int(name.split(".layers.")[1].split(".")[0]) >= 40
        if is_late or "lm_head" in name or ".norm." in name:
            continue  # on the second stage
        count = parameter.numel() // (1 if any(each in name for each in REPLICATED) else layout.tp)
        frozen, trained = frozen + count * (not parameter.requires_grad), trained + count * parameter.requires_grad
    found = arch.memory_per_rank(user, layout, 0)
    assert frozen > 4.2e9
    assert found.weights_bytes == pytest.approx(2 * (frozen + trained), rel=1e-3)
    assert found.gradients_bytes == 4 * trained
    assert found.optimizer_bytes == 12 * trained
