"""The planned number of parameters on each rank is that of the model which megatron-core builds."""

from typing import Any

import pytest

from mtrain import planning
from mtrain.config import Config
from mtrain.layout import Layout
from mtrain.mcore.groups import Groups
from mtrain.mcore.model import build_model
from tests.config.samples import config
from tests.pool import Pool

MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama_tied": {"tied_embeddings": True},
    "qwen2.5": {"qkv_bias": True},
    "qwen3": {"qk_norm": True, "head_dim": 16},
    "gpt": {"norm": "layernorm", "activation": "gelu", "linear_bias": True, "qk_norm": True},
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp1": {},
    "tp2sp-pp2": {"tp": 2, "sp": True, "pp": 2},
    "pp2vpp2-uneven": {"pp": 2, "vpp": 2, "stage_layers": [3, 1, 2, 2]},
}


def num_built_parameters(groups: Groups, given: Config) -> int:
    return sum(parameter.numel() for chunk in build_model(given, groups) for parameter in chunk.parameters())


@pytest.mark.parametrize("section", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("knobs", MODELS.values(), ids=MODELS)
def test_every_rank_holds_as_many_parameters_as_planned(
    pool: Pool, knobs: dict[str, Any], section: dict[str, Any]
) -> None:
    base = config().model.model_dump()
    given = config(model={**base, **knobs}, layout=section, train__precision="fp32")
    layout = Layout.from_config(given, section.get("tp", 1) * section.get("pp", 1))
    planned = [
        planning.parameters_on_rank(given.model, layout, layout.coordinate(rank).pp).total
        for rank in range(layout.world_size)
    ]
    assert pool.run(num_built_parameters, layout, given) == planned
