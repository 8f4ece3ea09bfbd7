"""Small models with experts, in our words."""

from typing import Any

MIXTRAL: dict[str, Any] = {"model__experts": {"num_experts": 8, "top_k": 2, "ffn_hidden_size": 24}}
"""Experts in every layer, softmax over the chosen ones."""

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
"""A dense layer first, shared experts, sigmoid scores, groups, a bias for the choice."""

BIASED: dict[str, Any] = {
    "model__linear_bias": True,
    "model__activation": "swiglu_clamped",
    "model__experts": {"num_experts": 4, "top_k": 2, "ffn_hidden_size": 32, "router_bias": True, "every": 2},
}
"""Biases everywhere, experts in every other layer."""

QWEN: dict[str, Any] = {
    "model__tied_embeddings": True,
    "model__experts": {"num_experts": 8, "top_k": 3, "ffn_hidden_size": 24, "pre_softmax": True},
}
"""Softmax over all experts, not renormalised; tied embeddings."""


def with_experts(model: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """A model whose `model.experts` is changed."""
    return model | {"model__experts": model["model__experts"] | changes}
