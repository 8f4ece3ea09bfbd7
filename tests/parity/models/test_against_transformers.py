"""A second oracle: Hugging Face transformers with the same weights, on several layouts."""

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers

from mtrain.arch.layout import Layout
from mtrain.core.batch.order import slots
from mtrain.core.batch.zigzag import zigzag_index
from tests.hf.megatron_names import from_huggingface
from tests.parity import ranks
from tests.parity.batches import BATCH, SEQ, VOCAB, three_steps
from tests.parity.cases import Case, case
from tests.parity.compare import TOLERANCE, Deviation, at_night, relative, tensor_deviation, worst
from tests.parity.families import GEMMA, GEMMA4, GEMMA4_EXPERTS, MINIMAX, OLMO2, OLMO3
from tests.pool import Pool

CASES = [
    case(8),
    case(8, tp=2, sp=True, pp=2),
    case(4, tp=4, dp=2),
    case(4, cp=2, cp_comm="ulysses", dp=2),
    case(8, tp=2, cp=2),
    case(8, pp=2, vpp=2),
]


class Reference(NamedTuple):
    """Model of transformers and its results in float64 on the first batch."""

    knobs: dict[str, Any]
    """Changes of the configuration that describe the same architecture."""
    state: dict[str, Any]
    """Parameters by megatron-core's names."""
    logits: Any
    """Logits, [batch, seq, vocab_size]."""
    loss: float
    gradients: dict[str, Any]


def llama() -> tuple[dict[str, Any], Any]:
    rope = {"base": 500.0, "scaling": "llama3", "factor": 8.0, "original_max_positions": 32}
    theirs = {
        "rope_type": "llama3",
        "rope_theta": 500.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    return {"model__rope": rope}, transformers.LlamaConfig(**common(), rope_parameters=theirs)


def qwen2() -> tuple[dict[str, Any], Any]:
    knobs = {"model__qkv_bias": True, "model__tied_embeddings": True, "model__rope": {"base": 1e6}}
    theirs = {"rope_type": "default", "rope_theta": 1e6}
    return knobs, transformers.Qwen2Config(**common() | {"tie_word_embeddings": True}, rope_parameters=theirs)


def qwen3() -> tuple[dict[str, Any], Any]:
    knobs = {"model__qk_norm": True, "model__head_dim": 16, "model__rope": {"base": 1e6}}
    theirs = {"rope_type": "default", "rope_theta": 1e6}
    return knobs, transformers.Qwen3Config(**common(), head_dim=16, rope_parameters=theirs)


def gemma3() -> tuple[dict[str, Any], Any]:
    theirs = {
        "full_attention": {"rope_type": "linear", "rope_theta": 3000.0, "factor": 4.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    }
    return GEMMA, transformers.Gemma3TextConfig(
        **common() | {"tie_word_embeddings": True, "rms_norm_eps": 1e-6},
        head_dim=16,
        pad_token_id=None,  # the gradient of its row would be left out
        query_pre_attn_scalar=40,
        sliding_window=7,
        layer_types=[*["sliding_attention"] * 2, "full_attention", "sliding_attention"],
        rope_parameters=theirs,
    )


def gemma4(norm_epsilon: float = 1e-2, **fields: Any) -> tuple[dict[str, Any], Any]:
    theirs = {
        "full_attention": {"rope_type": "proportional", "rope_theta": 3000.0, "partial_rotary_factor": 0.34},
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    }
    # norms of small outputs amplify rounding, and scores are not divided
    return GEMMA4 | {"model__norm_epsilon": norm_epsilon, "model__query_scalar": 1.0}, transformers.Gemma4TextConfig(
        **common() | {"tie_word_embeddings": True, "rms_norm_eps": norm_epsilon},
        head_dim=8,
        global_head_dim=12,
        num_global_key_value_heads=2,
        attention_k_eq_v=True,
        hidden_size_per_layer_input=0,
        final_logit_softcapping=2.0,
        **fields,
        pad_token_id=None,
        sliding_window=7,
        layer_types=["sliding_attention", "full_attention"] * 2,
        rope_parameters=theirs,
    )


def gemma4_experts() -> tuple[dict[str, Any], Any]:
    experts = {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 3, "moe_intermediate_size": 24}
    dense, theirs = gemma4(norm_epsilon=0.1, **experts)
    # a layer of each kind: norms after the experts amplify rounding from layer to layer
    theirs.num_hidden_layers, theirs.layer_types = 2, theirs.layer_types[:2]
    return dense | {"model__experts": GEMMA4_EXPERTS["model__experts"], "model__num_layers": 2}, theirs


def olmo2() -> tuple[dict[str, Any], Any]:
    own = {"rms_norm_eps": 1e-6, "head_dim": 6, "pad_token_id": None}
    theirs = {"rope_type": "default", "rope_theta": 500.0}
    return OLMO2, transformers.Olmo2Config(**common() | own, rope_parameters=theirs)


def olmo3() -> tuple[dict[str, Any], Any]:
    own = {"rms_norm_eps": 1e-6, "head_dim": 6, "pad_token_id": None, "sliding_window": 7}
    yarn = {"rope_type": "yarn", "factor": 4.0, "beta_fast": 4.0, "beta_slow": 1.0}
    theirs = {
        "full_attention": {**yarn, "rope_theta": 500.0, "original_max_position_embeddings": 16},
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    }
    return OLMO3, transformers.Olmo3Config(**common() | own, rope_parameters=theirs)


def minimax() -> tuple[dict[str, Any], Any]:
    own = {"rms_norm_eps": 1e-6, "head_dim": 16, "intermediate_size": 24, "num_local_experts": 8}
    tokens = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
    theirs = {"rope_type": "default", "rope_theta": 300.0, "partial_rotary_factor": 0.375}
    return MINIMAX, transformers.MiniMaxM2Config(
        **common() | own | tokens, num_experts_per_tok=3, rope_parameters=theirs
    )


def common() -> dict[str, Any]:
    return {
        "num_hidden_layers": 4,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "vocab_size": VOCAB,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "attn_implementation": "eager",
        "experts_implementation": "eager",  # the grouped one does not support float64
    }


FAMILIES = [llama, qwen2, qwen3, gemma3, olmo2, olmo3]
"""Families, each on one process and under two other layouts, each layout with two or three families: the first oracle
tests how a layout divides a family (test_families.py, tests/parity/layouts/test_options.py)."""
RUNS = [
    (family, each) for i, family in enumerate(FAMILIES) for each in (CASES[0], CASES[1 + i % 5], CASES[1 + (i + 2) % 5])
]
RUNS += [(gemma4, each) for each in (CASES[0], CASES[1])]
RUNS += [(gemma4_experts, each) for each in (CASES[0], CASES[3])]
RUNS += [(minimax, each) for each in (CASES[0], CASES[1], CASES[3])]  # experts under tp need sp
IDS = [f"{family.__name__}-{each}" for family, each in RUNS]
ON_RANKS = (llama, CASES[1])
"""Family and layout on several ranks by day; the others are on one process, as the first oracle tests the layouts."""


@cache
def reference_of(family: Callable[[], tuple[dict[str, Any], Any]]) -> Reference:
    return computed(family)


def computed(family: Callable[[], tuple[dict[str, Any], Any]]) -> Reference:
    """Draws a model of transformers and computes its results on the first batch."""
    knobs, config = family()
    torch.manual_seed(11)
    theirs = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float64)
    for name, parameter in theirs.named_parameters():
        is_scale = "norm" in name and not knobs.get("model__zero_centered_norm", False)
        torch.nn.init.normal_(parameter, mean=1.0 if is_scale else 0.0, std=0.1)
    for name, buffer in theirs.named_buffers():
        if name.endswith("e_score_correction_bias"):
            torch.nn.init.normal_(buffer, std=0.1)
        elif name.endswith("layer_scalar"):
            torch.nn.init.normal_(buffer, mean=1.0, std=0.2)
    batch = three_steps()[0]
    tokens, labels = (torch.tensor(np.stack([getattr(s, kind) for s in batch])) for kind in ("tokens", "labels"))
    mask = torch.tensor(np.stack([sample.mask for sample in batch])) > 0
    logits = theirs(tokens).logits
    loss = F.cross_entropy(logits[mask], labels[mask])
    loss.backward()
    model = case(4).config(**knobs).model
    gradients = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    return Reference(
        knobs,
        {name: value.numpy() for name, value in from_huggingface(theirs.state_dict(), model).items()},
        logits.detach().numpy(),
        loss.item(),
        {name: value.numpy() for name, value in from_huggingface(gradients, model).items()},
    )


@pytest.mark.parametrize(
    ("family", "case"), [run if run[1] == CASES[0] or run == ON_RANKS else at_night(*run) for run in RUNS], ids=IDS
)
def test_loss_gradients_and_logits_are_those_of_transformers(
    pool: Pool, family: Callable[[], tuple[dict[str, Any], Any]], case: Case
) -> None:
    assert_like_the_reference(pool, reference_of(family), case)


def assert_like_the_reference(pool: Pool, reference: Reference, case: Case) -> None:
    """Compares within the tolerance of parity, in one launch of ranks."""
    config = case.config(**reference.knobs)
    layout = case.resolved(config)
    everyone = pool.run(ranks.logits_and_a_step, layout, config, reference.state, three_steps()[0])
    (step,) = everyone[0].outcome.steps
    norm = float(np.sqrt(sum((value**2).sum() for value in reference.gradients.values())))
    Deviation(
        relative(step.loss, reference.loss),
        relative(step.grad_norm, norm),
        worst(step.gradients, reference.gradients, config),
        weights=0.0,
    ).assert_below()
    found = assemble_logits([each.logits for each in everyone], layout, case.micro_batch_size)
    assert not np.isnan(found).any()
    assert tensor_deviation(found, reference.logits) <= TOLERANCE


def assemble_logits(parts: list[list[Any]], layout: Layout, micro_batch_size: int) -> Any:
    """Assembles [batch, seq, vocab_size] from the logits of each rank of the last stage."""
    whole = np.full((BATCH, SEQ, 100), np.nan)
    for rank, microbatches in enumerate(parts):
        place = layout.coordinate(rank)
        positions = zigzag_index(SEQ, layout.cp, place.cp).numpy() if layout.cp > 1 else np.arange(SEQ)
        for number, logits in enumerate(microbatches):
            rows = np.array(slots(number, place.dp, layout.dp, micro_batch_size))
            columns = np.arange(logits.shape[-1]) + place.tp * logits.shape[-1]
            whole[np.ix_(rows, positions, columns)] = logits.transpose(1, 0, 2)
    return whole[..., :VOCAB]
