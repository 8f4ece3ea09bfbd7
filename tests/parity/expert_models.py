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
