"""Runs on models that read images: what is trained, and the sizes of images, as in the programs themselves.

Sources: LLaMA-Factory 0.9.5, model/adapter.py and data/mm_plugin.py; ms-swift 4.6.0, arguments/tuner_args.py and
model/models/qwen.py; qwen_vl_utils 0.0.14; axolotl 0.19.0, utils/freeze.py; verl 0.9.1, workers/config/actor.py.
"""

import json
import math
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

from mtrain.base.errors import ConfigError
from mtrain.config import Config
from mtrain.config.foreign.images import Parts
from mtrain.config.foreign.megatron_bridge import from_megatron_bridge
from mtrain.config.foreign.ms_swift import from_ms_swift
from mtrain.config.foreign.translation import Translation
from mtrain.hf.configuration import resolved
from tests.config.foreign.programs import PROGRAMS, head
from tests.config.foreign.test_same_run import of_axolotl, of_command, of_verl, truth
from tests.hf.folders import CONFIGS, TOWERS
from tests.messages import refuses

Values = Mapping[str, Any]
_LEAST, _MOST = 65536, 16777216
_PROCESSOR = {"image_processor_type": "Qwen2VLImageProcessorFast", "patch_size": 16, "merge_size": 2}
_PROCESSOR |= {"size": {"shortest_edge": _LEAST, "longest_edge": _MOST}}


class Way(NamedTuple):
    """A program that trains a model with images."""

    translate: Callable[[Values, Path], Translation]
    model: str
    """Setting that names the model."""
    base: Values
    freezes: tuple[str | None, str | None, str | None] = (None, None, None)
    """Settings that freeze tower, projector and language model."""
    defaults: tuple[bool, bool, bool] = (False, False, False)


_SWIFT = {"dataset": "a.jsonl", "max_length": 64, "output_dir": "x", "tuner_type": "full"}
_OF_SWIFT = (("freeze_vit", "freeze_aligner", "freeze_llm"), (True, True, False))
_LF = {"dataset": "a", "output_dir": "runs/x", "template": "qwen3_vl", "finetuning_type": "full", "max_steps": 9}
_OF_LF = (("freeze_vision_tower", "freeze_multi_modal_projector", "freeze_language_model"), (True, True, False))
_AXOLOTL = {"datasets": "a.jsonl", "learning_rate": 1e-4, "max_steps": 9}
_ACTOR = "actor_rollout_ref.actor."
_LOOP = {"trainer.total_training_steps": 9, f"{_ACTOR}ppo_micro_batch_size_per_gpu": 1}
_TRL = {"dataset_name": "a.jsonl", "output_dir": "x", "max_steps": 9}
WAYS = {
    "LLaMA-Factory": Way(PROGRAMS["LLaMA-Factory"].translate, "model_name_or_path", _LF, *_OF_LF),
    "swift sft": Way(of_command("swift", "sft"), "model", _SWIFT | {"max_steps": 9}, *_OF_SWIFT),
    "megatron sft": Way(of_command("megatron", "sft"), "model", _SWIFT | {"train_iters": 9}, *_OF_SWIFT),
    "axolotl": Way(of_axolotl, "base_model", _AXOLOTL, ("freeze_mm_modules", "freeze_mm_modules", None)),
    "trl sft": Way(PROGRAMS["trl sft"].translate, "model_name_or_path", _TRL),
    "verl sft_trainer": Way(
        of_verl("verl.trainer.sft_trainer"), "model.path", {"data.train_files": "a.parquet", "trainer.total_epochs": 1}
    ),
    "verl main_ppo": Way(
        of_verl("verl.trainer.main_ppo"),
        "actor_rollout_ref.model.path",
        _LOOP,
        (f"{_ACTOR}freeze_vision_tower", f"{_ACTOR}freeze_vision_tower", None),
    ),
}
OF_IMAGES = {*WAYS["LLaMA-Factory"].freezes, "image_min_pixels", "image_max_pixels"}
"""Settings of LLaMA-Factory that make a run one on images, whatever their value."""
_ALL = pytest.mark.parametrize("program", WAYS)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Folders of a model with DeepStack, of one without, and of a model of text."""
    found = {}
    for name in ("qwen3-vl-images", "qwen3.5-images", "qwen3"):
        folder = tmp_path_factory.mktemp(name)
        config = (CONFIGS | TOWERS)[name]()
        if name == "qwen3.5-images":
            config.text_config.rope_parameters["mrope_section"] = [1, 1, 0]
        config.save_pretrained(folder)
        if name in TOWERS:
            (folder / "preprocessor_config.json").write_text(json.dumps(_PROCESSOR))
        found[name] = str(folder)
    return found


def of(program: str, model: str, given: Values, folder: Path) -> Translation:
    way = WAYS[program]
    return way.translate({**way.base, way.model: model, **given}, folder).checked(resolved)


def configuration(found: Translation) -> Config:
    """Returns the configuration that `mtrain check` makes of the written file."""
    assert found.missing == []
    return Config.model_validate(resolved(yaml.safe_load("\n".join(found.lines()))))


@_ALL
def test_the_same_parts_are_trained(program: str, folders: Mapping[str, str], tmp_path: Path) -> None:
    """The written file loads, and freezes what the program freezes by its settings or its defaults."""
    way = WAYS[program]
    for seed in range(12):
        source = random.Random(f"{program}{seed}")
        drawn = {name: source.choice((True, False, "true", "no", 0, 1)) for name in way.freezes if name is not None}
        given = {name: value for name, value in drawn.items() if source.random() < 0.6}
        given = {name: source.choice((True, False)) for name in given} if program == "axolotl" else given
        expected = [
            truth_of(given.get(name, default)) if name is not None else default
            for name, default in zip(way.freezes, way.defaults)
        ]
        if all(expected):
            continue  # nothing is trained
        found = of(program, folders[source.choice(("qwen3-vl-images", "qwen3.5-images"))], given, tmp_path)
        vision = configuration(found).model.vision
        assert vision is not None
        assert [vision.freeze_tower, vision.freeze_projector, vision.freeze_language_model] == expected, (seed, given)
        assert [name for name in given if name not in head(found)] == []


@pytest.mark.parametrize("program", ["swift sft", "megatron sft"])
def test_learning_rates_of_parts(program: str, folders: Mapping[str, str], tmp_path: Path) -> None:
    """A trained part has its rate; a frozen one has none, there or here."""
    rate = "lr" if program == "megatron sft" else "learning_rate"
    for seed in range(8):
        source = random.Random(f"{program}{seed}")
        given = {name: source.choice(("1e-6", 0.002)) for name in ("vit_lr", "aligner_lr") if source.random() < 0.7}
        frozen = {name: source.random() < 0.5 for name in ("freeze_vit", "freeze_aligner")}
        found = of(program, folders["qwen3-vl-images"], {rate: 1e-4, **given, **frozen}, tmp_path)
        optimizer = configuration(found).optimizer
        for name, ours, freezes in (
            ("vit_lr", optimizer.tower_lr, "freeze_vit"),
            ("aligner_lr", optimizer.projector_lr, "freeze_aligner"),
        ):
            assert ours == (float(given[name]) if name in given and not frozen[freezes] else None)
        assert [name for name in given if name not in head(found)] == []


def truth_of(value: Any) -> bool:
    return bool(value) if isinstance(value, int) else truth({"no": False}.get(value, value))


@_ALL
def test_a_model_of_text_has_no_tower(program: str, folders: Mapping[str, str], tmp_path: Path) -> None:
    """Settings for images have no effect there, as in the programs, and the head names them."""
    given: dict[str, Any] = {name: True for name in WAYS[program].freezes[:2] if name is not None}
    given |= {"image_max_pixels": 5000} if program == "LLaMA-Factory" else {}
    found = of(program, folders["qwen3"], given, tmp_path)
    assert found.get("model.vision") is found.get("data.images") is None
    assert set(given) <= set(found.without_effect)
    assert configuration(found).model.vision is None


NAMES = {
    "Qwen/Qwen3-VL-8B-Instruct": True,
    "org/Qwen3.5-9B": True,
    "org/unknown": False,
    "Qwen/Qwen3.6-35B-A3B": True,
    "google/gemma-3-12b-it": True,
    "google/gemma-3-1b-it": False,
    "mistralai/Mistral-Small-3.2-24B-Instruct-2506": True,
    "mistralai/Mistral-Small-24B-Instruct-2501": False,
    "mistralai/Ministral-3-8B-Instruct-2512": True,
    "mistralai/Ministral-8B-Instruct-2410": False,
}
"""Model on the hub -> whether it reads images."""


@_ALL
def test_a_model_that_is_not_here_is_known_by_its_name(program: str, tmp_path: Path) -> None:
    for model, reads in NAMES.items() if program == "LLaMA-Factory" else list(NAMES.items())[:3]:
        found = of(program, model, {}, tmp_path)
        assert (found.get("model.vision") is not None) == reads
        freezes = [name for name in WAYS[program].freezes if name is not None]
        if freezes:
            assert of(program, model, {freezes[0]: True}, tmp_path).get("model.vision.freeze_tower") is True


@pytest.mark.parametrize(
    ("program", "adapted"),
    [
        ("LLaMA-Factory", {"finetuning_type": "lora"}),
        ("swift sft", {"tuner_type": "lora"}),
        ("megatron sft", {"tuner_type": "lora"}),
        ("axolotl", {"adapter": "lora", "lora_r": 8, "lora_alpha": 8, "lora_target_linear": True}),
        ("trl sft", {"use_peft": True, "lora_target_modules": ["all-linear"]}),
    ],
)
def test_adapters_are_on_the_language_model(
    program: str, adapted: Values, folders: Mapping[str, str], tmp_path: Path
) -> None:
    """Adapters that the program has on the tower as well are named."""
    tower, _, language_model = WAYS[program].freezes
    for given in ({}, {tower: False}, {language_model: True}) if program != "axolotl" else ({},):
        named = {str(name): value for name, value in given.items() if name is not None}
        found = of(program, folders["qwen3-vl-images"], {**adapted, **named}, tmp_path)
        assert trained(found) == {"freeze_language_model"}
        assert [name for name in named if not any(line.startswith(f"{name}=") for line in found.lost)] == []
        assert tower not in named or any(
            "model.vision.freeze_tower is true; set it to false" in line for line in found.lost
        )
    if program in ("axolotl", "trl sft"):
        assert any("only the language model has them" in line for line in found.notes)


def trained(found: Translation) -> set[str]:
    """Returns the keys of the parts that a run trains, by adapters or in full."""
    vision = configuration(found).model.vision
    assert vision is not None
    return {key for key in Parts._fields if not getattr(vision, key)}


def test_a_tuner_of_ms_swift_trains_the_other_parts_in_full(folders: Mapping[str, str], tmp_path: Path) -> None:
    """lora_llm reads rank and alpha alone (ms-swift 4, tuner_plugin/lora_llm.py)."""
    given = {"tuner_type": "lora_llm", "lora_rank": 4, "lora_dropout": 0.1, "freeze_vit": True, "vit_lr": 1e-5}
    found = of("swift sft", folders["qwen3-vl-images"], given, tmp_path)
    assert trained(found) == set(Parts._fields)
    run = configuration(found)
    assert run.adapter is not None
    assert (run.adapter.kind, run.adapter.rank, run.adapter.dropout) == ("lora", 4, 0.0)
    assert run.optimizer.lr_of_parts == {"tower_lr": 1e-5}
    assert {"lora_dropout", "freeze_vit"} <= set(found.without_effect)
    assert found.lost == []


_BOTH = {"freeze_tower", "freeze_projector"}


@pytest.mark.parametrize(
    ("modules", "parts"),
    [
        (["visual.merger"], {"freeze_projector"}),
        (["model.visual", "embed_tokens"], _BOTH),
        (["multi_modal_projector", "vision_tower"], _BOTH),
        (["visual.deepstack_merger_list.0"], {"freeze_projector"}),
        (["visual.blocks.0"], None),
    ],
)
def test_modules_that_peft_saves_are_parts_of_the_tower(
    modules: list[str], parts: set[str] | None, folders: Mapping[str, str], tmp_path: Path
) -> None:
    lora = {"adapter": "lora", "lora_r": 8, "lora_alpha": 8, "lora_target_linear": True}
    given = {"axolotl": lora | {"lora_modules_to_save": modules}}
    given["trl sft"] = {"use_peft": True, "lora_target_modules": ["all-linear"], "lora_modules_to_save": modules}
    given["swift sft"] = {"tuner_type": "lora", "modules_to_save": modules}
    given["LLaMA-Factory"] = {"finetuning_type": "lora", "additional_target": ",".join(modules)}
    for program, settings in given.items():
        found = of(program, folders["qwen3-vl-images"], settings, tmp_path)
        assert trained(found) == {"freeze_language_model"} | (parts or set()), program
        assert any("visual.blocks.0" in line for line in found.lost) == (parts is None), program
        text = of(program, folders["qwen3"], settings, tmp_path)
        assert any("has no vision tower here" in line for line in text.lost) == (parts is not None), program


@pytest.mark.parametrize(
    ("pattern", "targets"),
    [
        (
            r"model.language_model.layers.[\d]+.(mlp|cross_attn|self_attn).(up|down|gate|q|k|v|o)_proj",
            ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
        ),
        (r".*\.(q|v)_proj", ["q_proj", "v_proj"]),
        (r"model.layers.(0|1).self_attn.q_proj", ["q_proj"]),
        (r".*visual.*", None),
    ],
)
def test_targets_by_a_pattern(pattern: str, targets: list[str] | None, tmp_path: Path) -> None:
    """A regular expression means the modules that PEFT finds with it."""
    given = {"adapter": "lora", "lora_r": 8, "lora_alpha": 8, "lora_target_modules": pattern}
    found = of("axolotl", "org/unknown", given, tmp_path)
    assert found.get("adapter.targets") == targets
    assert any(line.startswith("lora_target_modules") for line in found.lost) == (
        ".(0|1)" in pattern or targets is None
    )


def resized(width: int, height: int, least: int, most: int) -> tuple[int, int]:
    """Resizes a picture as LLaMA-Factory's plugin does before the processor."""
    if width * height > most:
        factor = math.sqrt(most / (width * height))
        width, height = int(width * factor), int(height * factor)
    if width * height < least:
        factor = math.sqrt(least / (width * height))
        width, height = int(width * factor), int(height * factor)
    return width, height


@pytest.mark.parametrize("is_here", [True, False])
def test_sizes_of_images_in_llamafactory(is_here: bool, folders: Mapping[str, str], tmp_path: Path) -> None:
    """A picture has the same number of tokens, but for rounding twice there, as after its plugin and the processor."""
    source = random.Random(0)
    model = folders["qwen3-vl-images"] if is_here else "Qwen/Qwen3-VL-4B"
    for _ in range(12):
        least, most = source.choice((256, 1024, 70000, 200000)), source.choice((589824, 262144, 300000, 20_000_000))
        given = {"image_min_pixels": least, "image_max_pixels": most}
        given = {name: value for name, value in given.items() if source.random() < 0.7}
        found = of("LLaMA-Factory", model, given, tmp_path)
        images = found.get("data.images") or {}
        ours = images.get("min_pixels", _LEAST), images.get("max_pixels", _MOST)
        for width in (source.randint(40, 6000) for _ in range(20)):
            height = int(width * source.uniform(0.3, 3))
            theirs = resized(width, height, given.get("image_min_pixels", 1024), given.get("image_max_pixels", 589824))
            rows, columns = smart_resize(theirs[1], theirs[0], 32, _LEAST, _MOST)
            mine = smart_resize(height, width, 32, *ours)
            assert abs(mine[0] - rows) <= 32, (given, width, height)
            assert abs(mine[1] - columns) <= 32, (given, width, height)
        assert [name for name in given if name not in head(found)] == []


@pytest.mark.parametrize("start", ["swift sft", "megatron sft"])
def test_sizes_of_images_in_ms_swift(start: str) -> None:
    """Variables of the environment, or model_kwargs, give the limits of qwen_vl_utils, in tokens of 32 x 32 pixels."""
    words = f"{start} --model Qwen/Qwen3-VL-8B --dataset a.jsonl --max_length 64"
    for before, after, limits in (
        ("", "", (4 * 1024, 16384 * 1024)),
        ("MAX_PIXELS=602112 MIN_PIXELS=100000 CUDA_VISIBLE_DEVICES=0", "", (97 * 1024, 588 * 1024)),
        ("IMAGE_MAX_TOKEN_NUM=1024 MAX_PIXELS=1", "", (4 * 1024, 1024 * 1024)),
        ("", '--model_kwargs {"image_min_token_num":16,"IMAGE_MAX_TOKEN_NUM":64}', (16 * 1024, 64 * 1024)),
        ("MAX_PIXELS=602112", "--max_pixels 65536", (4 * 1024, 65536)),
        ("MAX_PIXELS=602112", "--max_pixels 700000", (4 * 1024, 588 * 1024)),
    ):
        found = from_ms_swift([*before.split(), *words.split(), *after.split()])
        assert found.get("data.images") == {"min_pixels": limits[0], "max_pixels": limits[1]}
    found = from_ms_swift(f"MAX_PIXELS=602112 {start} --model org/vision --dataset a --max_length 64".split())
    assert found.get("data.images") == {"max_pixels": 602112}
    found = from_ms_swift(["VIDEO_MAX_PIXELS=5", *words.split(), "--model_kwargs", '{"fps_max_frames": 12, "x": 1}'])
    named = {line.split("=")[0] for line in found.lost}
    assert named == {"model_kwargs: x", "FPS_MAX_FRAMES", "VIDEO_MAX_PIXELS"}


def test_columns_of_images(tmp_path: Path) -> None:
    info = {"pics": {"file_name": "p.json", "formatting": "sharegpt", "columns": {"messages": "m", "images": "photos"}}}
    (tmp_path / "dataset_info.json").write_text(json.dumps(info))
    found = of("LLaMA-Factory", "org/unknown", {"dataset": "pics", "dataset_dir": str(tmp_path)}, tmp_path)
    assert found.get("data.columns") == {"m": "conversations", "photos": "images"}
    assert found.get("model.vision.freeze_tower") is True
    assert of("verl sft_trainer", "M", {"data.image_key": "photos"}, tmp_path).get("data.columns") == {
        "photos": "images"
    }
    found = of("swift sft", "M", {"columns": '{"photos": "images", "clip": "videos"}'}, tmp_path)
    assert found.get("data.columns") == {"photos": "images"}
    assert any("videos" in line for line in found.lost)


def test_videos_and_sounds_are_named(tmp_path: Path) -> None:
    given = {"video_max_pixels": 16384, "video_fps": 1, "use_audio_in_video": True, "image_do_pan_and_scan": True}
    found = of("LLaMA-Factory", "Qwen/Qwen3-VL-4B", given, tmp_path)
    assert {line.split("=")[0] for line in found.lost} == set(given)
    found = of("verl sft_trainer", "Qwen/Qwen3-VL-4B", {"data.video_key": "films"}, tmp_path)
    assert [line.split("=")[0] for line in found.lost] == ["data.video_key"]
    found = of("axolotl", "M", {"processor_type": "AutoProcessor", "image_size": [512, 512]}, tmp_path)
    assert (found.get("model.vision.freeze_tower"), [line.split("=")[0] for line in found.lost]) == (
        False,
        ["image_size"],
    )


def test_a_family_whose_tower_is_not_trained(tmp_path: Path) -> None:
    """A run on text goes on, which the head says; settings for images are refused."""
    TOWERS["kimi-k2.5"]().save_pretrained(tmp_path)
    found = of("LLaMA-Factory", str(tmp_path), {}, tmp_path)
    assert found.get("model.vision") is None
    assert any(line.startswith("model.vision: ") for line in found.lost)
    with refuses(ConfigError, "model.vision", "freeze_vision_tower=True"):
        of("LLaMA-Factory", str(tmp_path), {"freeze_vision_tower": True}, tmp_path)
    for given in ({}, {"freeze_vision_tower": False}):  # the same, known by the name
        found = of("LLaMA-Factory", "moonshotai/Kimi-K2.5", given, tmp_path)
        assert found.get("model.vision") is found.get("data.images") is None
        lines = found.lost if given else found.notes
        assert [line for line in lines if line.startswith("moonshotai/Kimi-K2.5 reads images")]


@pytest.mark.parametrize("model", ["gemma3-images", "google/gemma-3-12b-it", "google/gemma-4-31B-it"])
def test_a_processor_without_limits_of_areas(model: str, tmp_path: Path) -> None:
    """Limits of LLaMA-Factory, whose default applies to every model, do not make a run that is refused."""
    if "/" not in model:
        config = TOWERS[model]()
        config.vision_config.vision_use_head, config.text_config.vocab_size = False, 64  # as published
        config.save_pretrained(tmp_path)
    for given in ({}, {"image_max_pixels": 70000, "freeze_vision_tower": False}):
        found = of("LLaMA-Factory", model if "/" in model else str(tmp_path), given, tmp_path)
        assert found.get("data.images") is None
        assert found.get("model.vision.freeze_tower") is not bool(given)
        assert [line for line in found.lost if "image_max_pixels" in line]


RECIPES = [
    ("gemma3_vl_12b_finetune_config", 4, 5e-6, (False, False, False)),
    ("gemma3_vl_12b_finetune_config peft=lora", 1, 1e-4, (True, True, False)),
    ("ministral3_14b_finetune_config", 2, 1e-4, (True, True, False)),
    ("ministral3_14b_finetune_config peft=none", 4, 5e-6, (False, False, False)),
    ("ministral3_14b_finetune_config peft=null", 4, 5e-6, (False, False, False)),
    ("qwen3_vl_8b_finetune_config peft.dim=8", 1, 1e-4, (True, True, False)),
    ("qwen3_vl_8b_finetune_config", 4, 1e-5, (True, False, True)),
    ("qwen3_vl_8b_finetune_config model.freeze_language_model=false", 4, 1e-5, (True, False, False)),
    ("qwen3_vl_30b_a3b_finetune_config peft=dora", 1, 2e-4, (True, True, False)),
]


@pytest.mark.parametrize(("words", "tp", "rate", "frozen"), RECIPES)
def test_recipes_of_megatron_bridge(words: str, tp: int, rate: float, frozen: tuple[bool, ...]) -> None:
    """Megatron-Bridge 0.3.1, recipes/gemma3_vl, ministral3 and qwen_vl: sizes and rates depend on adapters."""
    found = from_megatron_bridge([*words.split(), "dataset.train_data_path=[a.jsonl]", "dataset.image_folder=pics"])
    assert (found.get("layout.tp"), found.get("optimizer.lr")) == (tp, rate)
    vision = found.get("model.vision")
    assert (vision["freeze_tower"], vision["freeze_projector"], vision["freeze_language_model"]) == frozen
    assert (found.get("adapter.kind") is not None) == (frozen == (True, True, False))
    assert found.get("data.train") == [{"path": "a.jsonl"}]
    assert any(line.startswith("dataset.image_folder=pics") for line in found.lost)
