"""Small models with experts, as sections of a configuration."""

from typing import Any

from tests.parity.batches import GlobalBatch, three_steps

MIXTRAL: dict[str, Any] = {"model__experts": {"num_experts": 8, "top_k": 2, "ffn_hidden_size": 24}}
"""Mixtral's kind: experts in every layer, softmax over the chosen ones."""

DEEPSEEK: dict[str, Any] = {
    "model__experts": {
        "num_experts": 8,
        "top_k": 4,
        "ffn_hidden_size": 16,
        "shared_ffn_hidden_size": 24,
        "first_dense_layers": 1,
        "score": "sigmoid",
        "num_groups": 4,
        "group_top_k": 2,
        "scaling_factor": 2.5,
        "expert_bias": True,
    }
}
"""DeepSeek's kind: a dense layer first, shared experts, sigmoid scores, groups, a bias for the choice."""

BIASED: dict[str, Any] = {
    "model__linear_bias": True,
    "model__activation": "swiglu_clamped",
    "model__experts": {"num_experts": 4, "top_k": 2, "ffn_hidden_size": 32, "router_bias": True, "every": 2},
}
"""Model with biases everywhere, and experts in every other layer."""

QWEN: dict[str, Any] = {
    "model__tied_embeddings": True,
    "model__experts": {"num_experts": 8, "top_k": 3, "ffn_hidden_size": 24, "pre_softmax": True},
}
"""Qwen's kind: softmax over all experts, not renormalised; tied embeddings."""


def with_experts(model: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """Returns a model whose `model.experts` is changed."""
    return model | {"model__experts": model["model__experts"] | changes}


_SEEDS = [(MIXTRAL, 20), (DEEPSEEK, 20), (BIASED, 20), (QWEN, 54)]
MARGIN = 1e-4
"""Distance that each token keeps from another choice, in standard deviations of the ranked scores."""


def steps_of(changes: dict[str, Any]) -> list[GlobalBatch]:
    """Returns batches on which every token of one of these models stays MARGIN away from another choice, in three
    updates.

    Of 6144 choices the nearest one is about that near; the seeds are the first of several that were tried. Float32 is
    wrong by some 1e-6 of a standard deviation, so it chooses as float64 does.
    """
    section = changes["model__experts"].items()
    (seed,) = (seed for model, seed in _SEEDS if model["model__experts"].items() <= section)
    return three_steps(seed)
