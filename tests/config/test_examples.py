"""The fragments under configs/: every legal combination loads, and known models have their known size."""

from itertools import product
from pathlib import Path

import pytest

from mtrain import arch
from mtrain.arch.layout import Layout
from mtrain.base.errors import ConfigError
from mtrain.config import Config
from mtrain.hf.configuration import load_config
from tests.messages import refuses
from tests.paths import CONFIGS

PARAMETERS = {
    "llama3_8b": 8_030_261_248,
    "llama3_70b": 70_553_706_496,
    "qwen3_32b": 32_762_123_264,
    "qwen2.5_7b": 7_615_616_512,
    "qwen3_8b": 8_190_735_360,
    "llama3.2_1b": 1_235_814_400,
    "mistral_7b": 7_248_023_552,
    "mistral_small_24b": 23_572_403_200,
    "qwen3.5_9b": 8_953_803_264,
    "qwen3.5_27b": 26_895_998_464,
    "ministral3_8b": 8_489_553_920,
    "gemma3_4b": 3_880_263_168,
    "gemma4_31b": 30_697_345_280,
    "olmo2_7b": 7_298_617_344,
    "olmo3_7b": 7_298_011_136,
    "phi4_14b": 14_659_507_200,
    "smollm3_3b": 3_075_098_624,
}
EXPERTS = {
    "mixtral_8x7b": (46_702_792_704, 12_879_925_248),
    "qwen2_57b_a14b": (57_408_658_944, 14_249_270_784),
    "qwen3_30b_a3b": (30_532_122_624, 3_353_032_704),
    "qwen3_coder_30b_a3b": (30_532_122_624, 3_353_032_704),
    "qwen3_next_80b_a3b": (79_674_391_296, 3_874_929_408),
    "qwen3.5_35b_a3b": (34_660_610_688, 3_454_988_928),
    "gemma4_26b_a4b": (25_233_141_760, 3_822_526_960),
    "nemotron3_nano_30b_a3b": (31_577_937_344, 3_580_073_408),
    "minimax_m2": (228_689_748_992, 11_030_537_216),
    "gpt_oss_20b": (20_914_757_184, 3_608_307_264 + 201_088 * 2880),
    "gpt_oss_120b": (116_829_156_672, 5_132_849_472 + 201_088 * 2880),
    "deepseek_v3": (671_026_419_200 - 58 * 256, 37_552_282_624),
    "glm4.5_air": (106_852_245_504, 13_424_123_904),
    "glm4.7_flash": (29_943_390_976, 3_896_763_136),
    "kimi_k2": (1_026_408_209_408, 32_861_477_888),
}
"""Number of all and of active parameters, without tokens predicted ahead. gpt-oss's card leaves the embeddings out of
the active ones; the total of DeepSeek-V3 counts the experts' biases, which are not trained by gradients."""
MODELS = ["tiny", *PARAMETERS]
LAYOUTS = {"single": 1, "tp2sp": 2, "cp2": 2, "tp2pp2": 4, "tp4cp2": 8, "tp8pp4": 32}
_GROUPS = ("model.num_query_groups", "layout.tp")
"""What the refusal of too few query groups for a number of tensor ranks names."""
ILLEGAL = {
    ("tiny", "tp4cp2"): _GROUPS,
    ("tiny", "tp8pp4"): _GROUPS,
    ("qwen2.5_7b", "tp8pp4"): _GROUPS,
    ("qwen3.5_9b", "tp8pp4"): _GROUPS,
    ("qwen3.5_27b", "tp8pp4"): _GROUPS,
    ("gemma3_4b", "tp8pp4"): _GROUPS,
    ("gemma4_31b", "tp8pp4"): ("model.global_attention.num_query_groups", "layout.tp"),
    ("phi4_14b", "tp4cp2"): _GROUPS,
    ("phi4_14b", "tp8pp4"): _GROUPS,
    ("smollm3_3b", "tp8pp4"): _GROUPS,
    ("ministral3_8b", "tp8pp4"): ("model.num_layers=34", "layout.pp=4"),
}
STAGES = {
    "deepseek_v3": None,
    "kimi_k2": None,
    "minimax_m2": 3,
    "glm4.5_air": 2,
    "qwen2_57b_a14b": 7,
    "qwen3_next_80b_a3b": 3,
    "qwen3.5_35b_a3b": 6,
    "gpt_oss_120b": 4,
}
"""Models that need more than eight GPUs -> layers of the first and of the last stage; None for those of the file."""
EXPERT_LAYOUTS = dict.fromkeys(EXPERTS, ("ep8", 8)) | dict.fromkeys(STAGES, ("pp16ep32", 512))


def fragments(model: str, layout: str, run: str) -> list[Path]:
    names = {"model": model, "layout": layout, "run": run}
    return [CONFIGS / axis / f"{name}.yaml" for axis, name in names.items()]


def load(model: str, layout: str = "single", run: str = "pretrain") -> Config:
    return load_config(fragments(model, layout, run), [])


def test_every_fragment_is_covered() -> None:
    assert {path.stem for path in (CONFIGS / "model").glob("*.yaml")} >= {*MODELS, *EXPERTS}
    assert {path.stem for path in (CONFIGS / "layout").glob("*.yaml")} >= {
        *LAYOUTS,
        *(layout for layout, _ in EXPERT_LAYOUTS.values()),
    }


@pytest.mark.parametrize("run", ["pretrain", "finetune"])
@pytest.mark.parametrize(("model", "layout"), sorted(set(product(MODELS, LAYOUTS)) - ILLEGAL.keys()))
def test_legal_combinations_run_on_two_copies_of_the_model(model: str, layout: str, run: str) -> None:
    assert Layout.from_config(load(model, layout, run), 2 * LAYOUTS[layout]).dp == 2


def test_a_reward_model_is_a_head_on_any_model() -> None:
    found = load("tiny", run="reward_model")
    assert (found.sequences_per_step, found.model.output.rows, found.model.output.is_tied) == (128, 1, False)
    whole = load("tiny", run="preference").model
    assert (
        arch.num_parameters(whole) - arch.num_parameters(found.model)
        == ((0 if whole.tied_embeddings else whole.vocab_size) - 1) * whole.hidden_size
    )


def test_preferences_are_pairs_of_sequences() -> None:
    found = load("tiny", run="preference")
    assert (found.sequences_per_step, found.loss.aggregation) == (128, "seq-mean-token-sum")
    assert Layout.from_config(found, 2).dp == 2


@pytest.mark.parametrize("model", EXPERTS)
def test_models_with_experts_run_and_fit_an_h200(model: str) -> None:
    name, num_ranks = EXPERT_LAYOUTS[model]
    ends = STAGES.get(model)
    stages = [] if ends is None else [f"layout.{end}_stage_layers={ends}" for end in ("first", "last")]
    config = load_config(fragments(model, name, "pretrain"), ["train.recompute=full", *stages])
    layout = Layout.from_config(config, num_ranks)
    assert layout.edp == 1
    assert max(arch.memory_per_rank(config, layout, rank).total_bytes for rank in range(layout.pp)) < 141e9


@pytest.mark.parametrize(("model", "layout"), sorted(ILLEGAL))
def test_other_combinations_are_refused(model: str, layout: str) -> None:
    with refuses(ConfigError, *ILLEGAL[model, layout]):
        load(model, layout)


@pytest.mark.parametrize(("model", "expected"), PARAMETERS.items())
def test_known_models_have_their_known_size(model: str, expected: int) -> None:
    assert arch.num_parameters(load(model).model) == expected


@pytest.mark.parametrize(("model", "expected"), EXPERTS.items())
def test_known_models_with_experts_have_their_known_sizes(model: str, expected: tuple[int, int]) -> None:
    section = load(model).model
    assert arch.num_parameters(section.model_copy(update={"mtp_depths": 0})) == expected[0]
    assert arch.num_active_parameters(section) == expected[1]


def test_deepseek_v3_has_a_layer_and_a_projection_more_that_predict_ahead() -> None:
    section = load("deepseek_v3").model
    ahead = arch.num_parameters(section) - arch.num_parameters(section.model_copy(update={"mtp_depths": 0}))
    assert ahead == 11_610_067_968
