"""The planned number of parameters on each rank is that of the model that megatron-core builds."""

from typing import Any

import pytest

from mtrain import arch
from mtrain.arch.layout import Layout
from mtrain.config import Config
from mtrain.core.engine.muon import is_matrix
from mtrain.core.engine.rank_model import build_model
from mtrain.core.layers.build import unwrap
from mtrain.core.layers.sharded_parameters import sharded_parameters
from mtrain.core.ranks.groups import Groups
from tests.config.samples import config
from tests.pool import Pool

MLA = {"q_lora_rank": 24, "kv_lora_rank": 12, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 10}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama_tied": {"tied_embeddings": True},
    "qwen2.5": {"qkv_bias": True},
    "qwen3": {"qk_norm": True, "head_dim": 16},
    "gpt": {"norm": "layernorm", "activation": "gelu", "linear_bias": True, "qk_norm": True},
    "gemma": {"sandwich_norm": True, "tied_embeddings": True, "activation": "geglu_tanh", "qk_norm": True},
    "gemma4": {
        "sandwich_norm": True,
        "layer_scalar": True,
        "value_norm": True,
        "qk_norm": True,
        "sliding_window": 8,
        "global_attention_every": 2,
        "global_attention": {"head_dim": 12, "num_query_groups": 2},
        "rope": {"local_base": 100.0},
    },
    "olmo2": {"post_norm": True, "qk_norm": True, "qk_norm_width": "full", "head_dim": 6},
    "gpt_oss": {"attention_sinks": True, "linear_bias": True, "activation": "swiglu_clamped"},
    "mla": {"mla": MLA, "num_query_groups": None},
    "mla_without_query_rank": {"mla": {**MLA, "q_lora_rank": None}, "num_query_groups": None},
    "mtp": {"mtp_depths": 2},
    "mtp_tied": {"mtp_depths": 1, "tied_embeddings": True},
}
EXPERTS: dict[str, Any] = {
    "num_experts": 8,
    "top_k": 2,
    "ffn_hidden_size": 24,
    "first_dense_layers": 1,
}
MIXTURES: dict[str, dict[str, Any]] = {
    "experts": {"experts": {**EXPERTS, "shared_ffn_hidden_size": 40, "shared_gate": True}},
    "deepseek": {
        "experts": {**EXPERTS, "shared_ffn_hidden_size": 8},
        "mla": MLA,
        "mtp_depths": 1,
        "num_query_groups": None,
    },
    "gemma4": {**MODELS["gemma4"], "experts": {**EXPERTS, "shared_ffn_hidden_size": 40, "branch_norms": True}},
    "gpt_oss": {**MODELS["gpt_oss"], "experts": {**EXPERTS, "router_bias": True, "every": 2}},
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp1": {},
    "tp2sp-pp2": {"tp": 2, "sp": True, "pp": 2},
    "pp2vpp2-uneven": {"pp": 2, "vpp": 2, "stage_layers": [3, 1, 2, 2]},
}


EXPERT_LAYOUTS: dict[str, dict[str, Any]] = {
    "ep2-pp2": {"ep": 2, "pp": 2},
    "tp2sp-ep2": {"tp": 2, "sp": True, "ep": 2},
    "tp2sp-etp2-ep2": {"tp": 2, "sp": True, "ep": 2, "etp": 2},
}
CASES = [
    *[(layout, MODELS, LAYOUTS[layout]) for layout in LAYOUTS],
    *[(layout, MIXTURES, EXPERT_LAYOUTS[layout]) for layout in EXPERT_LAYOUTS],
]


def num_built_parameters(groups: Groups, given: list[Config]) -> list[tuple[int, int]]:
    """Counts the parameters of each model: all of them, and those in matrices under Muon."""
    return [_num_built(groups, each) for each in given]


def _num_built(groups: Groups, given: Config) -> tuple[int, int]:
    chunks = build_model(given, groups).chunks
    places = sharded_parameters([unwrap(chunk) for chunk in chunks], groups)
    num_parameters = sum(parameter.numel() for chunk in chunks for parameter in chunk.parameters())
    return num_parameters, sum(place.data.numel() for place in places if is_matrix(place))


@pytest.mark.parametrize(("models", "section"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_every_rank_holds_as_many_parameters_as_planned(
    pool: Pool, models: dict[str, dict[str, Any]], section: dict[str, Any]
) -> None:
    base = config().model.model_dump()
    given = {
        name: config(model={**base, **knobs}, layout=section, train__precision="fp32")
        for name, knobs in models.items()
        if not (knobs.get("linear_bias") and section.get("etp"))
    }
    experts = section.get("ep", 1) * section.get("etp", 1)
    ranks = section.get("pp", 1) * max(section.get("tp", 1), experts)
    layouts = {name: Layout.from_config(each, ranks) for name, each in given.items()}
    (layout,) = set(layouts.values())
    stages = [layout.coordinate(rank).pp for rank in range(layout.world_size)]
    planned = [
        {
            name: (
                arch.parameters_on_rank(each.model, layout, pp_rank).total,
                arch.matrices_on_rank(each.model, layout, pp_rank).total,
            )
            for name, each in given.items()
        }
        for pp_rank in stages
    ]
    built = pool.run(num_built_parameters, layout, list(given.values()))
    assert [dict(zip(given, each, strict=True)) for each in built] == planned
