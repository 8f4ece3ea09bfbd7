"""Translation of runs on models that read images: parts that keep their weights, and limits of image sizes."""

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from mtrain.config.foreign.translation import Settings, Translation
from mtrain.config.foreign.values import number
from mtrain.config.load import read_mapping

_SECTION = "model.vision"
_NAMES = re.compile(
    r"(?<![a-z])vl(?![a-z])|(?<![a-z])vision(?![a-z])|qwen3[._][56]|gemma-?3-(?:4|12|27)b|"
    r"gemma-?4-(?:26|31)b|mistral-small-3[._][12]|ministral-3-",
    re.IGNORECASE,
)
"""Parts of names of models that read images, for a folder that is not on this machine."""
_TEXT_HERE = re.compile(r"kimi-k2[._][56]", re.IGNORECASE)
"""Parts of names of models whose text alone is trained here."""
_OTHER_SIZES = re.compile(r"gemma|mistral|ministral|pixtral", re.IGNORECASE)
"""Parts of names of models whose processors have no limits of areas."""
_QWEN3 = re.compile(r"qwen3(?![0-9])", re.IGNORECASE)
PIXELS_PER_TOKEN = 32**2
"""Area of an image token of Qwen3-VL and Qwen3.5, in pixels."""
_OF_QWEN3 = (65536, 16777216)


class Part(NamedTuple):
    """What a program does with a part of a model that reads images."""

    is_frozen: bool
    origin: str
    is_chosen: bool = True
    """Whether a setting chooses it."""
    is_full: bool = False
    """Whether it is trained in full, next to adapters of other parts."""


class Parts(NamedTuple):
    """Parts of a model that reads images; the fields are named as the keys of `model.vision`."""

    freeze_tower: Part
    freeze_projector: Part
    freeze_language_model: Part


def all_trained(run: Settings, signals: Collection[str] = ()) -> Parts:
    """Returns the parts of a program that freezes none of them; `signals` are as in `put_images`."""
    given = [name for name in signals if name in run.explicit]
    origin = f"{run.program} trains all parts of a model with {', '.join(given)}"
    origin = origin if given else f"{run.program}'s default, which trains all parts"
    return Parts(*[Part(False, origin, is_chosen=False)] * 3)


def put_images(config: Translation, run: Settings, parts: Parts, signals: Collection[str]) -> bool:
    """Sets `model.vision` for a model that reads images, by its config.json, its name, or settings for images.

    Adapters are on the language model only; with them, other parts are frozen, or trained in full.

    Args:
        signals: Names of settings that concern only images.

    Returns:
        Whether the model reads images.
    """
    model = config.get("model.hf")
    given = [name for name in signals if name in run.explicit]
    is_known = _reads_images(model)
    if is_known is None and _TEXT_HERE.search(Path(str(model)).name):
        line = f"{model} reads images; here its text alone is trained, and an export has its other tensors unchanged"
        (config.lost if given else config.notes).append(line + "".join(f"; {name}={run[name]}" for name in given))
        is_known = False
    if is_known is False or (is_known is None and not given):
        config.drop("data.images")
        return False
    if not given:
        config.notes.append(f"{model} reads images; for a run on text alone, remove model.vision and data.images")
    is_adapted = config.get("adapter.kind") is not None
    for key, part in parts._asdict().items():
        if is_adapted and (name := config.saved_in_tower.pop(key, None)) is not None:
            config.put(f"{_SECTION}.{key}", False, name)
        elif is_adapted and (part.is_full or part.is_frozen == (key != "freeze_language_model")):
            config.put(f"{_SECTION}.{key}", part.is_frozen, part.origin)
        elif is_adapted:
            _report_adapted(config, key, part)
        else:
            config.put(f"{_SECTION}.{key}", part.is_frozen, part.origin)
    return True


def _report_adapted(config: Translation, key: str, part: Part) -> None:
    """Reports a part that has adapters in the program only, or here only."""
    if part.is_frozen:
        config.lost.append(f"{part.origin}: the language model has no adapters there; here only it has some")
    elif part.is_chosen:
        config.lost.append(
            f"{part.origin}: only the language model has adapters here, so {_SECTION}.{key} is true; set it to false "
            "to train this part in full"
        )
    elif key == "freeze_tower":
        names = config.origins.get("adapter.targets", "the targets")
        config.notes.append(
            f"{names}: modules of these names in the vision tower have adapters in {config.program}; here only the "
            "language model has them"
        )
    if key != "freeze_language_model":
        config.put(f"{_SECTION}.{key}", True, "adapters are on the language model")


_PARTS = {
    "visual": ("freeze_tower", "freeze_projector"),
    "vision_tower": ("freeze_tower",),
    "merger": ("freeze_projector",),
    "deepstack_merger_list": ("freeze_projector",),
    "multi_modal_projector": ("freeze_projector",),
    "embed_vision": ("freeze_projector",),
}
"""Module of transformers -> keys of `model.vision` that freeze what is in it."""


def part_of_tower(module: str) -> tuple[str, ...]:
    """Returns the keys of `model.vision` that freeze a module, given by the end of its path; empty for a module that is
    not a part of its own."""
    names = [name for name in module.split(".") if not name.isdigit()]
    return _PARTS.get(names[-1], ()) if names else ()


def _reads_images(model: Any) -> bool | None:
    """Says whether a model reads images; None: neither a folder on this machine nor the name says so."""
    if model is None:
        return None
    file = Path(str(model), "config.json")
    if file.is_file():
        return isinstance(read_mapping(file).get("vision_config"), Mapping)
    return True if _NAMES.search(Path(str(model)).name) else None


def is_qwen3(model: Any) -> bool:
    """Says whether a model is of the families Qwen3-VL and Qwen3.5, by its config.json or its name."""
    file = Path(str(model), "config.json")
    name = read_mapping(file).get("model_type") if file.is_file() else Path(str(model)).name
    return _QWEN3.match(str(name)) is not None


def put_limits(config: Translation, least: tuple[Any, str], most: tuple[Any, str]) -> None:
    """Sets the limits of image areas of a program whose limits hold in addition to the processor's.

    Args:
        least: Smallest area of an image, in pixels, with its origin.
        most: Largest area.
    """
    model = config.get("model.hf")
    theirs = _limits_of_processor(model)
    is_here = Path(str(model), "config.json").is_file()
    if theirs == (None, None) and (is_here or _OTHER_SIZES.search(Path(str(model)).name)):
        line = "the processor of the model resizes images, and has no limits of areas here"
        said = [origin for _, origin in (least, most) if not config.is_default(origin)]
        config.lost += [f"{origin}: {line}" for origin in said or [most[1]]]
        return
    for key, (value, origin), own, narrower in zip(("min_pixels", "max_pixels"), (least, most), theirs, (max, min)):
        area = number(value)
        if own is None and config.is_default(origin) and key == "min_pixels":
            continue  # below that of every processor
        if own is None or narrower(area, own) != own:
            least_of_all, most_of_all = (area if limit is None else limit for limit in theirs)
            config.put(f"data.images.{key}", min(max(area, least_of_all), most_of_all), origin)
        elif not config.is_default(origin):
            config.notes.append(f"{origin}: the processor's own limit, {own} pixels, is narrower, and holds")


def _limits_of_processor(model: Any) -> tuple[int | None, int | None]:
    """Returns the smallest and the largest area of an image in a model's folder, or by its name; None: unknown."""
    for name in ("preprocessor_config.json", "processor_config.json"):
        file = Path(str(model), name)
        content = read_mapping(file) if file.is_file() else {}
        content = content.get("image_processor") or content
        size = content.get("size") or {}
        if "shortest_edge" in size and "longest_edge" in size:
            return int(size["shortest_edge"]), int(size["longest_edge"])
        if "min_pixels" in content and "max_pixels" in content:
            return int(content["min_pixels"]), int(content["max_pixels"])
    is_here = Path(str(model), "config.json").is_file()
    return _OF_QWEN3 if not is_here and is_qwen3(model) else (None, None)
